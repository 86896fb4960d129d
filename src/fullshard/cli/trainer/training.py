"""The training program of ``fullshard train``, from top to bottom. Every rank runs it.

The launcher starts ``python -m fullshard.cli.trainer.training FOLDER [--resume]``; the options are
in the folder. Copy this file and ``model.py`` to start a training program of your own.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import CPUOffload, FullyShardedDataParallel, StopRequest

from ..data import Text, read_text
from ..model import GPT, initialize, next_token_loss
from ..options import Options, build_options
from ..output import Output
from ..planner.foretold import foretold_step
from ..planner.measure import Measured, watch_step
from ..planner.prediction import gpt_subject, predict_memory
from ..problems import BadInput
from ..sharding import STRATEGIES, checkpoint_units, communication, mixed_precision, wrap_policy
from .optimization import (
    keep_numbers_on_gpu,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)
from .reports import Progress, reporter_for
from .resumption import resumption_in_words
from .run_folder import RunFolder, skipped_in_silence

__all__ = ["start_rank", "train"]

#: The step whose memory is measured: later than all one-time allocations.
_MEASURED_STEP = 3
#: The first step that is traced: later than all agreements of ranks, and than the measured step.
_FIRST_TRACED_STEP = 5
_PROMPT = b"def "

#: Runs one step on micro-batches; returns this rank's loss and the norm of all gradients.
Step = Callable[[list[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]


def train(options: Options, folder: RunFolder, resume: bool, stop: StopRequest) -> None:
    """Train, save and sample. All ranks call this, with equal arguments, in a process group."""
    device = device_of_rank(options)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = read_text(options.data)

    model = build_model(options, device)
    optimizer = make_optimizer(options, model)
    done = load(folder, model, optimizer) if resume else 0
    keep_numbers_on_gpu(optimizer, options.capture and device.type == "cuda", device)

    reporter = reporter_for(rank, options, folder)
    tracing = make_trace(model, optimizer, options, folder)
    if rank == 0:
        before = build_options(folder.values(), str(folder.config))
        resumption = resumption_in_words(before, options, done)
        folder.accept_options()
        folder.drop_metrics_after(done)
        subject = gpt_subject(options)
        memory_of_step = predict_memory(subject, options, ranks, device)
        reporter.introduce(text, ranks, resumption, *memory_of_step)
        if tracing is not None:
            tracing.foretell(foretold_step(gpt_subject(options), options, ranks, device))

    run_step = make_step(model, optimizer, options)
    captured: fullshard.CapturedStep[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None
    captured = None
    if options.capture:
        captured = fullshard.capture(run_step, batches_of_step(text, options, done + 1, device))
        # The reporter says it.
        warnings.filterwarnings("ignore", message="This step is not captured")
    step = done
    memory: int | None = None
    with reporter:
        for step in range(done + 1, options.steps + 1):
            started = time.perf_counter()
            if tracing is not None and step - done == _FIRST_TRACED_STEP:
                if device.type == "cuda":
                    # A trace sees peaks above all since then.
                    torch.cuda.reset_peak_memory_stats(device)
                tracing.start()
            set_learning_rate(optimizer, learning_rate(options, step))

            with measured_step(model, optimizer, device, step - done) as measured:
                batches = batches_of_step(text, options, step, device)
                own_loss, own_norm = (captured or run_step)(batches)
                norm = own_norm.item()

            if captured is not None and captured.why_eager is not None:
                reporter.runs_eagerly(captured.why_eager)
                captured = None
            loss, stopping = reduce_loss_and_stop(own_loss, stop, device)
            if measured.peak is not None:
                memory = largest_of_ranks(measured.peak, device)
            seconds = time.perf_counter() - started
            reporter.step(Progress(step, loss, norm, learning_rate(options, step), seconds, memory))
            check_finite(step, loss, norm)
            is_last = stopping or step == options.steps
            if tracing is not None and (tracing.steps_recorded == options.trace or is_last):
                tracing.stop()
                if tracing.steps_recorded:
                    reporter.traced(tracing.summary())
                else:
                    reporter.not_traced(_FIRST_TRACED_STEP)
                tracing = None
            if stopping:
                break
            if options.save_every and step % options.save_every == 0 and step < options.steps:
                save(folder, model, optimizer, options, step)
                reporter.saved(step)
        if step > done:
            save(folder, model, optimizer, options, step)
            reporter.saved(step)

    if step < options.steps:
        stop.agreed()  # on the signal: ranks that got none leave with the same status
        reporter.stopped(step)
        return
    sample = sample_text(model, _PROMPT, options.sample, options.sequence, device)
    reporter.finish(sample)


def build_model(options: Options, device: torch.device) -> FullyShardedDataParallel:
    """Build a wrapped GPT. It is never materialized as a whole: each unit is when it is wrapped."""
    with torch.device("meta"):
        model = GPT(options.size(), options.sequence)
    policy = wrap_policy(model, options.wrap)
    if options.checkpoint_activations:
        checkpoint_units(model, policy)
    if dist.get_world_size() == 1:
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
    return FullyShardedDataParallel(
        model,
        sharding_strategy=STRATEGIES[options.strategy],
        auto_wrap_policy=policy,
        mixed_precision=mixed_precision(options),
        cpu_offload=CPUOffload(offload_params=options.offload),
        param_init_fn=materializer(model, options.seed, device),
        device_id=device,
        use_orig_params=True,
        communication=communication(options),
    )


def make_trace(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Options, folder: RunFolder
) -> fullshard.Trace | None:
    """Return a trace that writes a page, and a file for Perfetto; None if none was asked for."""
    if not options.trace:
        return None
    return fullshard.trace(model, optimizer, [folder.trace, folder.trace.with_suffix(".json")])


def materializer(model: nn.Module, seed: int, device: torch.device) -> Callable[[nn.Module], None]:
    """Return a function that allocates and initialises a module's own parameters.

    Their values depend on the module's path and the seed only, so they are the same on every rank
    and for every choice of units.
    """
    paths = {module: path for path, module in model.named_modules()}

    def materialize(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)
        torch.manual_seed(seed + zlib.crc32(paths[module].encode()))
        initialize(module)

    return materialize


def make_step(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer, options: Options
) -> Step:
    """Return a function that runs one step on the micro-batches of this rank.

    It returns this rank's loss and the norm of the whole model's gradients, and leaves all waiting
    for the device to the caller: that is what can be captured in a CUDA graph.
    """

    def run_step(batches: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros((), device=batches[0].device)
        for tokens in batches:
            loss = next_token_loss(model, tokens) / len(batches)
            # Reduced after every pass, without no_sync: gradient shards take less memory.
            loss.backward()
            total += loss.detach()
        norm = model.clip_grad_norm_(options.clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total, norm

    return run_step


def batches_of_step(
    text: Text, options: Options, step: int, device: torch.device
) -> list[torch.Tensor]:
    """Return this rank's part of a step's batch, one tensor for each pass."""
    passes = options.accumulate
    size = options.batch // (dist.get_world_size() * passes)
    first = dist.get_rank() * size * passes
    ranges = [range(start, start + size) for start in range(first, first + size * passes, size)]
    found = (text.batch(options.seed, step, each, options.sequence) for each in ranges)
    return [tokens.to(device) for tokens in found]


def reduce_loss_and_stop(
    loss: torch.Tensor, stop: StopRequest, device: torch.device
) -> tuple[float, bool]:
    """Return the mean loss over all ranks, and True if any rank was asked to stop."""
    sums = torch.stack([loss.double(), torch.tensor(float(stop.signal is not None), device=device)])
    dist.all_reduce(sums)
    return sums[0].item() / dist.get_world_size(), sums[1].item() > 0


def check_finite(step: int, loss: float, norm: float) -> None:
    """Raise ``FloatingPointError`` if the loss or the gradient norm is not finite.

    Such a step must not be saved. The gradient norm may be infinite or NaN a step before the loss
    is, and then the parameters are lost already.
    """
    for what, value in {"loss": loss, "gradient norm": norm}.items():
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {what} is {value} at step {step}, which was not saved. Resume from the "
                "latest checkpoint with a lower --learning-rate or more --warmup"
            )


@contextlib.contextmanager
def measured_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, step: int
) -> Iterator[Measured]:
    """Measure the memory of one early step only, because measuring slows a step down."""
    if step != _MEASURED_STEP:
        yield Measured()
        return
    state = [t for entry in optimizer.state.values() for t in entry.values()]
    with watch_step(device, [*model.parameters(), *state]) as measured:
        yield measured


def largest_of_ranks(number: int, device: torch.device) -> int:
    """Return the maximum of ``number`` over all ranks."""
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


# -- sampling ------------------------------------------------------------------------------------


@torch.no_grad()
def sample_text(
    model: nn.Module, prompt: bytes, length: int, context: int, device: torch.device
) -> str:
    """Sample ``length`` bytes after ``prompt``. All ranks call this, and get the same text."""
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(length):
        logits = model(tokens[:, -context:])[0, -1].float()
        # A temperature below 1 favours likely bytes.
        probabilities = torch.softmax(logits / 0.8, dim=-1)
        next_token = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, next_token[None]], dim=1)
    return bytes(tokens[0].tolist()).decode("utf-8", errors="replace")


# -- checkpoints ----------------------------------------------------------------------------------


def save(
    folder: RunFolder,
    model: FullyShardedDataParallel,
    optimizer: torch.optim.Optimizer,
    options: Options,
    step: int,
) -> None:
    """Save a checkpoint. The data and the learning rate of a step follow from its number alone."""
    fullshard.save(
        folder.checkpoints,
        model,
        optimizer,
        step=step,
        extra=model_facts(options),
        keep_last=options.keep,
    )


def load(
    folder: RunFolder, model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer
) -> int:
    """Load the latest undamaged checkpoint, saved on any number of ranks; returns its step.

    Returns 0 if there is none. Prints a line for each damaged checkpoint that it skips, and leaves
    these in place.
    """
    try:
        with skipped_in_silence():
            found = fullshard.resume(folder.checkpoints, model, optimizer)
    except fullshard.CheckpointError as problem:
        raise unusable(problem) from None
    if found is None:
        return 0
    if dist.get_rank() == 0:
        for reason in found.skipped:
            print(f"skipped   {reason}", file=Output(), flush=True)
    return found.step


def unusable(problem: fullshard.CheckpointError) -> BadInput:
    """The error for a folder in which no checkpoint can be loaded."""
    if problem.advises:
        return BadInput(str(problem))
    return BadInput(f"{problem}; remove its folder to resume from the checkpoint before it")


def model_facts(options: Options) -> dict[str, int]:
    """The sizes that have to be equal in a checkpoint and in the model that loads it."""
    size = options.size()
    return {
        "layers": size.layers,
        "heads": size.heads,
        "width": size.width,
        "sequence": options.sequence,
    }


# -- the rank -------------------------------------------------------------------------------------


def start_rank(options: Options) -> None:
    """Initialise the process group from the launcher's environment variables."""
    device = device_of_rank(options)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def device_of_rank(options: Options) -> torch.device:
    """The device of this rank: a GPU of its own, or the CPU if there is none or on request."""
    wanted = options.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def was_restarted() -> bool:
    """Return True if the launcher has restarted this rank after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def main(folder: RunFolder, resume: bool) -> None:
    """Train with the options in ``folder``; after a failure, resume from the latest checkpoint."""
    options = folder.options()
    with StopRequest() as stop:
        start_rank(options)
        train(options, folder, resume or was_restarted(), stop)
    dist.destroy_process_group()
    sys.exit(stop.exit_status)


if __name__ == "__main__":
    main(RunFolder(Path(sys.argv[1])), resume="--resume" in sys.argv[2:])
