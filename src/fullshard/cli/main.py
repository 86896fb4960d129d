"""The commands of ``fullshard``. Each imports its implementation when it runs, to start fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ModuleNotFoundError as missing:
    raise SystemExit(
        "The fullshard command needs typer, which is not installed. Install it with "
        "`pip install 'fullshard[cli]'`, or use `python -m fullshard.cli.launcher.run` instead of "
        "`fullshard run`."
    ) from missing

from fullshard.cli.command_line import call, show_help_or_version
from fullshard.cli.flags import value_of, with_option_flags
from fullshard.cli.help_pages import GroupedCommand, ProgramCommand

app = typer.Typer(
    help="Fully sharded data parallelism for PyTorch.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def commands(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show versions and exit.")] = False,
) -> None:
    """Fully sharded data parallelism for PyTorch."""
    show_help_or_version(context, version)


@app.command(
    cls=ProgramCommand,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[--ranks N] [--trace FILE] [torchrun's options]",
)
def run(
    arguments: Annotated[
        list[str], typer.Argument(metavar="(SCRIPT | -m MODULE)", show_default=False)
    ],
) -> None:
    """Run a program written for torch's FSDP, unchanged.

    Starts the program on N ranks of this machine (default: one per GPU, or 2 without a GPU), with
    fullshard's FullyShardedDataParallel in place of torch's. Accepts all options of torchrun,
    including those for several machines (--nnodes, --rdzv-endpoint, --max-restarts, ...).
    With --trace FILE, writes a trace of --trace-steps steps (default: 3), from the fifth on: a
    page (.html), a file for Perfetto (.json) or a picture (.png).
    Forwards SIGTERM to the ranks, which have 30 s to save and exit (--shutdown-timeout).
    """
    from fullshard.cli.launcher.run import run_program

    raise typer.Exit(run_program(arguments))


@app.command(cls=GroupedCommand)
@with_option_flags(lambda field: True)
def train(
    values: dict[str, Any],
    config: Annotated[Path | None, typer.Option(help="TOML file with options.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run. [run-1, run-2, ...]")] = None,
    runs: Annotated[
        Path, typer.Option(help="Folder for all runs. [runs]", show_default=False)
    ] = Path("runs"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run --name, or the latest run.")
    ] = False,
    max_restarts: Annotated[
        int,
        typer.Option(
            help="Restarts after a failure, each from the latest checkpoint. [0]",
            show_default=False,
            **value_of("max_restarts", int),
        ),
    ] = 0,
    nodes: Annotated[
        int,
        typer.Option(help="Number of machines. [1]", show_default=False, **value_of("nodes", int)),
    ] = 1,
    rendezvous: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of one machine, the same on all, where launchers meet."),
    ] = None,
) -> None:
    """Train a sharded GPT on text. All options have defaults.

    Writes options, metrics, a loss curve, checkpoints and sampled text to the run's folder.
    """
    from fullshard.cli.trainer.train import Request, run_training

    raise typer.Exit(
        run_training(Request(values, config, name, runs, resume, max_restarts, nodes, rendezvous))
    )


@app.command(cls=GroupedCommand)
@with_option_flags(lambda field: field.metadata["planned"])
def plan(
    values: dict[str, Any],
    device_memory: Annotated[
        str | None,
        typer.Option(help="Check that it fits: a size (80GiB) or a GPU (h100, a100-40g)."),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Vocabulary size of a preset, such as 32000 or 128256. [256]",
            show_default=False,
            rich_help_panel="Model",
            **value_of("vocabulary", int),
        ),
    ] = None,
    api: Annotated[
        str,
        typer.Option(
            help="API that shards the model: wrapper, fully_shard. [wrapper]",
            show_default=False,
            rich_help_panel="Sharding",
        ),
    ] = "wrapper",
    picture: Annotated[
        Path | None,
        typer.Option(help="Write a timeline of the step: .html, .json (Perfetto) or .png."),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(help="Find the fastest options that fit: a size (80GiB) or a GPU (h100)."),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="Machine for times: h100, h200, b200, a100, cpu."),
    ] = None,
    flops: Annotated[
        str | None, typer.Option(help="FLOP/s that a rank reaches, such as 400T. [the machine's]")
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(help="Bytes/s that a rank receives, such as 50G. [the machine's]"),
    ] = None,
) -> None:
    """Predict the memory that a training step takes on each rank, and its time.

    --model is a preset, or module:function for a model of your own. The function is called on the
    meta device and returns a model that takes tokens (as models of transformers do), or a tuple of
    a model and its loss function: loss(model, sequences, length).

    With --picture, --machine, --flops or --bandwidth, also predicts the time of a step. With --fit,
    tries strategies, units, checkpointing, offload and batches, and shows the fastest that fit;
    options that you give stay as they are.

    The exit status is 3 if the model does not fit in --device-memory or --fit, and 0 otherwise.
    """
    from fullshard.cli.planner.plan import plan as show_plan
    from fullshard.cli.planner.timing import Timing

    timing = Timing(picture, fit, machine, flops, bandwidth)
    raise typer.Exit(show_plan(values, device_memory, vocabulary, api, timing))


def main() -> None:
    """Entry point of the installed command."""
    raise SystemExit(call(app))


if __name__ == "__main__":
    main()
