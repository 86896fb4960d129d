"""The ``fullshard`` command: its list of commands. What they need is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(
        "The fullshard command needs typer: pip install 'fullshard[cli]'. Without it, "
        "`python -m fullshard.cli.run` is `fullshard run`."
    ) from missing

from fullshard.cli.command_line import call, show_help_or_version
from fullshard.cli.flags import value_of, with_option_flags

app = typer.Typer(
    help="Fully sharded data parallelism for PyTorch.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def commands(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show versions and exit.")] = False,
) -> None:
    """Fully sharded data parallelism for PyTorch."""
    show_help_or_version(context, version)


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[--ranks N] [torchrun's options]",
)
def run(
    arguments: Annotated[
        list[str], typer.Argument(metavar="(SCRIPT | -m MODULE) [ARGUMENTS]...", show_default=False)
    ],
) -> None:
    """Run a program written for torch.distributed.fsdp on fullshard, unchanged.

    Starts it on N ranks of this machine (default: one per GPU, or 2 without a GPU), each with
    fullshard in the place of torch.distributed.fsdp's wrapper. All options of torchrun are taken,
    those for several machines included (--nnodes, --rdzv-endpoint, --max-restarts, ...).
    """
    from fullshard.cli.run import run_program

    raise typer.Exit(run_program(arguments))


@app.command()
@with_option_flags(lambda field: True)
def train(
    values: dict[str, Any],
    config: Annotated[Path | None, typer.Option(help="TOML file with options.")] = None,
    name: Annotated[str | None, typer.Option(help="The run's name; else a number.")] = None,
    runs: Annotated[Path, typer.Option(help="Where runs' folders are.")] = Path("runs"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue: --name, or the last.")
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            help="Restarts after a failure, from the last checkpoint.",
            **value_of("max_restarts", int),
        ),
    ] = 0,
    nodes: Annotated[
        int, typer.Option(help="Machines that take part.", **value_of("nodes", int))
    ] = 1,
    rendezvous: Annotated[str | None, typer.Option(help="HOST:PORT of one of them.")] = None,
) -> None:
    """Train a GPT, sharded, on text. Needs no arguments.

    Writes options, metrics, a loss curve, checkpoints and a sample into the folder of the run.
    """
    from fullshard.cli.train import Request, run_training

    raise typer.Exit(
        run_training(Request(values, config, name, runs, resume, max_restarts, nodes, rendezvous))
    )


@app.command()
@with_option_flags(lambda field: field.metadata["planned"])
def plan(
    values: dict[str, Any],
    device_memory: Annotated[
        str | None, typer.Option(help="Does it fit? A size (80GiB) or a name (h100, a100-40g).")
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a preset's vocabulary, such as 32000 or 128256. [256]",
            show_default=False,
            rich_help_panel="Model",
            **value_of("vocabulary", int),
        ),
    ] = None,
) -> None:
    """Show the memory that a step of training will take on a rank, part by part.

    --model is a preset, or module:function. The function returns a model (on any device: it is
    called under the meta device) that takes tokens, or a model and its loss: loss(model,
    sequences, length).
    """
    from fullshard.cli.plan import plan as show_plan

    raise typer.Exit(show_plan(values, device_memory, vocabulary))


def main() -> None:
    """Entry point of the installed command."""
    raise SystemExit(call(app))


if __name__ == "__main__":
    main()
