"""Programs for ``fully_shard`` drawn at random, run on torch's and on fullshard's, and compared.

Everything drawn is plain data that travels to the ranks. The module stays free of hypothesis, which
ranks need not import.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tests.fully_shard.side_by_side import (
    OURS,
    THEIRS,
    Model,
    Training,
    adamw,
    assert_same_training,
    inputs,
    sgd,
    told,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fullshard.testing import device

BLOCKS = 3


@dataclass(frozen=True)
class Step:
    """One step: what happens before, in and after its backwards."""

    #: Blocks that run, in this order; one may run twice, or not at all.
    order: tuple[int, ...]
    backwards: int = 1
    #: Whether only the last backward reduces gradients.
    accumulates_locally: bool = False
    evaluates_before: bool = False
    #: Blocks that are unsharded by hand before the step, and whether they are resharded again.
    unshards: tuple[int, ...] = ()
    reshards: bool = True
    clips: bool = False
    #: Whether parameters are scaled in place before the step.
    changes_parameters: bool = False
    reloads_state: bool = False
    set_to_none: bool = True


@dataclass(frozen=True)
class Program:
    """How a model is sharded, and what is done with it."""

    #: Which blocks share a call of ``fully_shard``; those that are left out belong to the root.
    groups: tuple[tuple[int, ...], ...]
    reshard_after_forward: bool | int | None
    steps: tuple[Step, ...]
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    cast_forward_inputs: bool = True
    frozen: tuple[str, ...] = ()
    ties: bool = False
    checkpointed: str = "no"
    adam: bool = True
    #: Whether a backward that another one follows in the same step leaves parameters unsharded.
    keeps_between_backwards: bool = False
    prefetches: bool = False
    #: Whether shards have copies, on a mesh of two dimensions.
    is_hybrid: bool = False


class Ordered(Model):
    """The model, whose blocks run in the order that a step says, checkpointed or not."""

    def __init__(self, program: Program) -> None:
        super().__init__(width=4, blocks=BLOCKS)
        self.order = tuple(range(BLOCKS))
        self.checkpointed = program.checkpointed
        if program.ties:
            self.blocks[1].down.weight = self.blocks[0].down.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for index in self.order:
            block: Any = self.blocks[index]
            if self.checkpointed == "no":
                hidden = block(hidden)
            else:
                reentrant = self.checkpointed == "reentrant"
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
        return self.head(hidden) * self.scale + self.shift


def run(api: Any, program: Program) -> Training:
    """Shard and train a model as ``program`` says."""
    torch.manual_seed(0)
    model: Any = Ordered(program)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in program.frozen)
    _shard(api, model, program)
    optimizer = (adamw if program.adam else sgd)(model.parameters())
    found = Training(model, optimizer=optimizer)
    for number, step in enumerate(program.steps):
        _prepare(model, step)
        for backward in range(step.backwards):
            is_last = backward == step.backwards - 1
            model.set_requires_gradient_sync(is_last or not step.accumulates_locally)
            model.set_reshard_after_backward(is_last or not program.keeps_between_backwards)
            output = model(inputs(10 * number + backward)).float()
            loss = output.square().mean()
            loss.backward()
            found.losses.append(loss.item())
        if step.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found.gradients.append({n: told(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
        found.parameters.append({n: told(p) for n, p in model.named_parameters()})
        optimizer.zero_grad(set_to_none=step.set_to_none)
    return found


def _shard(api: Any, model: Any, program: Program) -> None:
    policy = api.MixedPrecisionPolicy(
        param_dtype=program.param_dtype and getattr(torch, program.param_dtype),
        reduce_dtype=program.reduce_dtype and getattr(torch, program.reduce_dtype),
        cast_forward_inputs=program.cast_forward_inputs,
    )
    options: dict[str, Any] = {
        "reshard_after_forward": program.reshard_after_forward,
        "mp_policy": policy,
    }
    if program.is_hybrid:
        shape = (2, dist.get_world_size() // 2)
        options["mesh"] = init_device_mesh(
            device().type, shape, mesh_dim_names=("copies", "shards")
        )
    for group in program.groups:
        api.fully_shard([model.blocks[index] for index in group], **options)
    api.fully_shard(model, **options)
    sharded = [model.blocks[group[0]] for group in program.groups]
    for module, following in itertools.pairwise(sharded):
        if program.prefetches:
            module.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([module])


def _prepare(model: Any, step: Step) -> None:
    model.order = step.order
    if step.changes_parameters:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
    if step.reloads_state:
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    if step.evaluates_before:
        with torch.no_grad(), _evaluating(model):
            model(inputs(99))
    sharded = [model.blocks[index] for index in step.unshards]
    for block in sharded:
        if hasattr(block, "unshard"):
            block.unshard()
            if step.reshards:
                block.reshard()


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    yield
    model.train()


def check_same(program: Program) -> None:
    """Run ``program`` on both APIs, and compare all that users see; on every rank."""
    theirs, ours = run(THEIRS, program), run(OURS, program)
    low = "bfloat16" in (program.param_dtype, program.reduce_dtype)
    assert_same_training(ours, theirs, tolerance=2e-2 if low else 1e-4)
