"""Models and the comparison with an unsharded run, shared by tests/original and tests/hazards.

The reference is the bare module on every rank, with its gradients averaged by hand after
backward: it knows nothing of units, so whatever a test does to a model can be done to it, too.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from fullshard.engine.params.locations import clean_tensor_name
from fullshard.engine.params.tensor_parallel import local_part
from fullshard.state.model.units import units_in
from fullshard.testing import device
from fullshard.wrap import ModuleWrapPolicy, decide

STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)


class InPlace(enum.Enum):
    """In place of a strategy: ``fully_shard``, and whether it frees parameters after forward."""

    RESHARD = True
    KEEP = False


#: Strategies, each with original parameters, and one of them flattened as well.
MODES = [(strategy, True) for strategy in STRATEGIES] + [(ShardingStrategy.FULL_SHARD, False)]
#: ``fully_shard``; that keeps parameters after forward only where tests may take long.
IN_PLACE = tuple(InPlace) if os.environ.get("FULLSHARD_LONG") else (InPlace.RESHARD,)
#: The strategies, and ``fully_shard``.
EITHER_API = (*STRATEGIES, *IN_PLACE)
EITHER_MODES = [*MODES, *((each, True) for each in IN_PLACE)]
WIDTH = 7


class Block(nn.Module):
    """A residual block whose numbers of elements divide by nothing."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, width + 2)
        self.down = nn.Linear(width + 2, width, bias=False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Three blocks between two linears; with ``blocks_policy`` four units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks_policy() -> ModuleWrapPolicy:
    return ModuleWrapPolicy({Block})


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """``make()``, the same on every rank, on the device of the test."""
    torch.manual_seed(7)
    return make().to(device())


def inputs(step: int, *shape: int) -> torch.Tensor:
    """Another batch for every step and every rank, the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(*(shape or (4, 5)), generator=generator).to(device())


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    """A loss that every output and every parameter of ``Net`` takes part in."""
    return model(inputs(step)).square().mean()


def train_step(model: nn.Module, step: int) -> torch.Tensor:
    """One forward and one backward."""
    loss = loss_of(model, step)
    loss.backward()
    return loss.detach()


def average_gradients(model: nn.Module) -> None:
    """Replace gradients by their mean over the ranks; None stays if every rank has None."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        local = parameter.grad
        present = torch.tensor(float(local is not None))
        dist.all_reduce(present)
        if present == 0:
            continue
        total = torch.zeros_like(parameter) if local is None else local.clone()
        dist.all_reduce(total)
        parameter.grad = total / dist.get_world_size()


def sharded(
    module: nn.Module,
    *,
    sharding_strategy: ShardingStrategy | InPlace = ShardingStrategy.FULL_SHARD,
    **options: Any,
) -> Any:
    """Wrap ``module``, or have ``fully_shard`` do what the wrapper's options say."""
    if isinstance(sharding_strategy, InPlace):
        return _sharded_in_place(module, sharding_strategy, **options)
    return FSDP(module, sharding_strategy=sharding_strategy, **options)


def _sharded_in_place(
    module: nn.Module,
    how: InPlace,
    auto_wrap_policy: Any = None,
    mixed_precision: MixedPrecision | None = None,
    ignored_modules: Iterable[nn.Module] = (),
    use_orig_params: bool = True,
    backward_prefetch: Any = None,
    forward_prefetch: bool = False,
    process_group: Any = None,
) -> nn.Module:
    """Prefetching is not asked for by options here, but it goes on as by default."""
    mesh = None
    if process_group is not None:
        mesh = DeviceMesh.from_group(process_group, device().type)
    precision = MixedPrecisionPolicy()
    if mixed_precision is not None:
        dtypes = mixed_precision.param_dtype, mixed_precision.reduce_dtype
        precision = MixedPrecisionPolicy(*dtypes)
    ignored = {p for each in ignored_modules for p in each.parameters()}
    chosen = [module]
    if auto_wrap_policy is not None:
        decisions = decide(module, auto_wrap_policy).decisions
        if any(decision.left_to_ancestor for decision in decisions):
            pytest.skip("what several units share has to be sharded with the modules that use it")
        chosen = [*(decision.module for decision in decisions), module]
    for each in chosen:
        fully_shard(
            each,
            mesh=mesh,
            reshard_after_forward=how.value,
            mp_policy=precision,
            ignored_params=ignored,
        )
    return module


@contextlib.contextmanager
def unsynchronized(model: Any) -> Iterator[None]:
    """Keep gradients unreduced inside the context, by what the model's API has for it."""
    if isinstance(model, FSDP):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def module_of(model: Any) -> Any:
    """The module that a wrapper wraps, or the model itself."""
    return model.module if isinstance(model, FSDP) else model


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model):
        return {clean_tensor_name(name): p.detach().clone() for name, p in model.named_parameters()}


def assert_same_parameters(reference: nn.Module, model: nn.Module, **tolerance: float) -> None:
    found = full_parameters(model)
    expected = dict(reference.named_parameters())
    assert list(found) == list(expected)
    for name, parameter in expected.items():
        torch.testing.assert_close(
            found[name],
            parameter.detach(),
            msg=lambda m, name=name: f"{name}: {m}",  # type: ignore[misc]
            **tolerance,
        )


def assert_same_gradients(reference: nn.Module, model: nn.Module, **tolerance: float) -> None:
    """Compare whole gradients with those of ``reference``, None with None."""
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        found = {clean_tensor_name(name): p.grad for name, p in model.named_parameters()}
        for name, parameter in reference.named_parameters():
            if parameter.grad is None:
                assert found[name] is None, name
            else:
                assert found[name] is not None, name
                torch.testing.assert_close(found[name], parameter.grad, **tolerance)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


def compare(
    make: Callable[[], nn.Module] = Net,
    step_of: Callable[[Any, int], torch.Tensor] = train_step,
    *,
    steps: int = 2,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    auto_wrap_policy: Any = None,
    use_orig_params: bool = True,
    **options: Any,
) -> Any:
    """Train ``make()`` bare and sharded side by side; ``step_of`` runs forward and backward.

    Losses and full parameters must be equal after every step. Returns the sharded model.
    """
    reference = build(make)
    model = sharded(
        copy.deepcopy(reference),
        auto_wrap_policy=blocks_policy() if auto_wrap_policy is None else auto_wrap_policy,
        use_orig_params=use_orig_params,
        **options,
    )
    compare_models(reference, model, step_of, steps=steps, optimizer=optimizer)
    return model


def compare_models(
    reference: nn.Module,
    model: nn.Module,
    step_of: Callable[[Any, int], torch.Tensor] = train_step,
    *,
    steps: int = 2,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    first_step: int = 0,
) -> None:
    """Train both with new optimizers and compare after every step."""
    optimizers = optimizer(reference), optimizer(model)
    for step in range(first_step, first_step + steps):
        for each in optimizers:
            each.zero_grad()
        expected = step_of(reference, step)
        average_gradients(reference)
        torch.testing.assert_close(step_of(model, step), expected)
        assert_at_rest(model)
        for each in optimizers:
            each.step()
        assert_same_parameters(reference, model)


def _let_backward_thread_finish(model: nn.Module) -> None:
    """After an exception a GPU's backward thread lets go a moment later than it is raised."""
    deadline = time.monotonic() + 2
    while any(unit.shows_full for unit in units_in(model)):
        if time.monotonic() > deadline:
            return
        time.sleep(0.01)


def assert_at_rest(model: nn.Module) -> None:
    """Between steps every unit shows shards and holds no full buffer."""
    if device().type != "cpu":
        _let_backward_thread_finish(model)
    for unit in units_in(model):
        assert not unit.shows_full, unit.name
        assert not unit.full_buffers, unit.name
        for handle in unit.handles:
            if not handle.is_sharded:
                continue
            if handle.use_orig_params:
                for parameter, piece in zip(handle.params, handle.pieces, strict=True):
                    assert local_part(parameter).numel() == piece.numel, unit.name
            for buffer in handle.full_buffers.values():
                nbytes = buffer.flat.untyped_storage().nbytes()
                assert buffer.is_shard_backed or nbytes == 0, unit.name


def living_bytes() -> int:
    """Bytes of all tensors that exist, each storage counted once."""
    gc.collect()
    if device().type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()
    return sum({s.data_ptr(): s.nbytes() for s in _storages(gc.get_objects())}.values())


def _storages(things: Iterable[Any]) -> Iterable[torch.UntypedStorage]:
    for thing in things:
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.layout is torch.strided:
            yield thing.untyped_storage()
