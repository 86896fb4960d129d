"""Training, from top to bottom: what runs on every rank of ``fullshard train``.

The launcher starts ``python -m fullshard.cli.trainer.training FOLDER [--resume]``; the folder holds
the options. Copy this file and ``model.py`` to begin a training program of your own.
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
from ..planner.measure import Measured, watch_step
from ..planner.prediction import gpt_subject, predict_memory
from ..problems import BadInput
from ..sharding import STRATEGIES, checkpoint_units, mixed_precision, wrap_policy
from .rates import learning_rate
from .reports import Progress, reporter_for
from .resumption import resumption_in_words
from .run_folder import RunFolder, skipped_in_silence
from .sampling import sample_text

__all__ = ["start_rank", "train"]

#: The step whose memory is measured: by then everything that is made once is made.
_MEASURED_STEP = 3
_PROMPT = b"def "


def train(options: Options, folder: RunFolder, resume: bool, stop: StopRequest) -> None:
    """Train, save, sample. The process group is there; all ranks call this with the same."""
    device = device_of_rank(options)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = read_text(options.data)

    model = build_model(options, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.95), weight_decay=options.weight_decay, fused=True
    )
    done = load(folder, model, optimizer) if resume else 0

    reporter = reporter_for(rank, options, folder)
    if rank == 0:
        before = build_options(folder.values(), str(folder.config))
        resumption = resumption_in_words(before, options, done)
        folder.accept_options()
        folder.forget_metrics_after(done)
        subject = gpt_subject(options)
        memory_of_step = predict_memory(subject, options, ranks, device)
        reporter.introduce(text, ranks, resumption, *memory_of_step)

    step = done
    memory: int | None = None
    with reporter:
        for step in range(done + 1, options.steps + 1):
            started = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(options, step)

            with optimizer_params(model, optimizer, device, step - done) as measured:
                own_loss, norm = run_step(model, optimizer, text, options, step, device)

            loss, stopping = agree(own_loss, stop, device)
            if measured.peak is not None:
                memory = largest_of_ranks(measured.peak, device)
            seconds = time.perf_counter() - started
            reporter.step(Progress(step, loss, norm, learning_rate(options, step), seconds, memory))
            check_finite(step, loss, norm)
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
    """A GPT in units. It never exists whole: a unit gets its values when it is wrapped."""
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
    )


def materializer(model: nn.Module, seed: int, device: torch.device) -> Callable[[nn.Module], None]:
    """Gives a module's own parameters memory and values, which depend on its path and the seed.

    So they are the same on every rank, and however the model is cut into units.
    """
    paths = {module: path for path, module in model.named_modules()}

    def materialize(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)
        torch.manual_seed(seed + zlib.crc32(paths[module].encode()))
        initialize(module)

    return materialize


def run_step(
    model: FullyShardedDataParallel,
    optimizer: torch.optim.Optimizer,
    text: Text,
    options: Options,
    step: int,
    device: torch.device,
) -> tuple[torch.Tensor, float]:
    """One step on this rank's part of the batch; returns its loss and the whole gradient's norm."""
    passes = options.accumulate
    size = options.batch // (dist.get_world_size() * passes)
    first = dist.get_rank() * size * passes
    total = torch.zeros((), device=device)
    for start in range(first, first + size * passes, size):
        tokens = text.batch(options.seed, step, range(start, start + size), options.sequence)
        loss = next_token_loss(model, tokens.to(device)) / passes
        # Reduced after every pass: gradients accumulate in shards, and take no more memory.
        loss.backward()
        total += loss.detach()
    norm = model.clip_grad_norm_(options.clip or math.inf)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm.item()


def agree(loss: torch.Tensor, stop: StopRequest, device: torch.device) -> tuple[float, bool]:
    """The mean loss over all ranks, and whether any of them was asked to stop."""
    told = torch.stack([loss.double(), torch.tensor(float(stop.signal is not None), device=device)])
    dist.all_reduce(told)
    return told[0].item() / dist.get_world_size(), told[1].item() > 0


def check_finite(step: int, loss: float, norm: float) -> None:
    """Refuse to go on with, and to save, parameters that are not numbers.

    Gradients may be lost a step before the loss is, and the parameters with them.
    """
    for what, value in {"loss": loss, "gradients' norm": norm}.items():
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {what} is {value} at step {step}; the last checkpoint is from before it. "
                "Try a lower --learning-rate or more --warmup"
            )


@contextlib.contextmanager
def optimizer_params(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, step: int
) -> Iterator[Measured]:
    """Measure the memory of one step early in the run, and of no other: measuring takes time."""
    if step != _MEASURED_STEP:
        yield Measured()
        return
    state = [t for entry in optimizer.state.values() for t in entry.values()]
    with watch_step(device, [*model.parameters(), *state]) as measured:
        yield measured


def largest_of_ranks(number: int, device: torch.device) -> int:
    """The largest of all ranks' numbers."""
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


# -- checkpoints ----------------------------------------------------------------------------------


def save(
    folder: RunFolder,
    model: FullyShardedDataParallel,
    optimizer: torch.optim.Optimizer,
    options: Options,
    step: int,
) -> None:
    """Save what the next step depends on: data and learning rate follow from the step's number."""
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
    """Load the newest whole checkpoint, whatever ranks saved it; returns its step, or 0 for none.

    Damaged ones are skipped with a line for each, and stay where they are.
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
    """What to do about checkpoints of which none can be loaded."""
    if problem.advises:
        return BadInput(str(problem))
    return BadInput(f"{problem}; remove its folder to continue from the checkpoint before it")


def model_facts(options: Options) -> dict[str, int]:
    """What a checkpoint's model must have in common with the one that loads it."""
    size = options.size()
    return {
        "layers": size.layers,
        "heads": size.heads,
        "width": size.width,
        "sequence": options.sequence,
    }


# -- the rank -------------------------------------------------------------------------------------


def start_rank(options: Options) -> None:
    """Join the other ranks, as the launcher's environment variables say."""
    device = device_of_rank(options)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def device_of_rank(options: Options) -> torch.device:
    """One GPU per rank; the CPU where there is none, or where it was asked for."""
    wanted = options.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def was_restarted() -> bool:
    """Whether the launcher started this rank again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def main(folder: RunFolder, resume: bool) -> None:
    """Train with the options in ``folder``; after a failure go on from the last checkpoint."""
    options = folder.options()
    with StopRequest() as stop:
        start_rank(options)
        train(options, folder, resume or was_restarted(), stop)
    dist.destroy_process_group()
    sys.exit(stop.exit_status)


if __name__ == "__main__":
    main(RunFolder(Path(sys.argv[1])), resume="--resume" in sys.argv[2:])
