"""What a trace records of real steps on real ranks."""

from __future__ import annotations

import copy
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import FullyShardedDataParallel, ShardingStrategy
from fullshard.state.model.units import steps_of, units_in
from fullshard.testing import device, ranks
from fullshard.tracing.analysis import accounted_for, straggler
from fullshard.tracing.records import CAUSES, COLLECTIVES, What
from fullshard.tracing.report import peak_of

from .training import APIS, Block, in_place, model, stepper, wrapped

each_api = pytest.mark.parametrize("api", sorted(APIS))


def engine_classes(sharded: nn.Module) -> list[type]:
    """The classes of everything that a trace extends."""
    found: list[type] = []
    for unit, schedule in steps_of(sharded):
        things = (unit, unit.reduction, unit.shards, schedule, schedule._backward)
        found += [type(each) for each in things]
    return found


@each_api
@ranks(2)
def test_every_unit_is_gathered_computes_and_is_reduced(api: str) -> None:
    sharded = APIS[api]()
    step, optimizer = stepper(sharded)
    step()

    with fullshard.trace(sharded, optimizer) as trace:
        step()
        step()

    count = Counter((record.what, record.unit) for record in trace.records)
    names = [unit.name for unit in units_in(sharded)]
    assert len(names) == 4
    for name in names:
        assert count[What.FORWARD, name] == 2
        assert count[What.BACKWARD, name] == 2
        assert count[What.REDUCE_SCATTER, name] == 2
        assert count[What.ALL_GATHER, name] >= 2
        # Whatever was all-gathered was waited for.
        assert count[What.ALL_GATHER, name] == count[What.WAIT_ALL_GATHER, name]
    assert count[What.OPTIMIZER, ""] == 2
    assert len(trace.data.steps_of(0)) == 2


@each_api
@ranks(2)
def test_backward_goes_through_units_in_reverse(api: str) -> None:
    sharded = APIS[api]()
    step, _ = stepper(sharded)
    step()

    with fullshard.trace(sharded) as trace:
        step()

    blocks = [unit.name for unit in units_in(sharded)][1:]
    forward = [r.unit for r in trace.records if r.what is What.FORWARD and r.unit in blocks]
    backward = [r.unit for r in trace.records if r.what is What.BACKWARD and r.unit in blocks]
    assert forward == blocks
    assert backward == blocks[::-1]


@ranks(2)
def test_bytes_of_collectives_are_those_of_the_units_parameters() -> None:
    sharded = in_place()
    step, _ = stepper(sharded)
    step()

    with fullshard.trace(sharded) as trace:
        step()

    # Two linears of 16 to 32 and back, with biases, in float32.
    expected = 4 * (16 * 32 + 32 + 32 * 16 + 16)
    sizes = {r.nbytes for r in trace.records if r.what in COLLECTIVES and r.unit in ("0", "1", "2")}
    assert sizes == {expected}


@each_api
@ranks(2)
def test_times_are_in_order(api: str) -> None:
    sharded = APIS[api]()
    step, _ = stepper(sharded)
    step()

    with fullshard.trace(sharded) as trace:
        step()

    (only,) = trace.data.steps_of(dist.get_rank())
    for record in trace.records:
        assert record.issued <= record.started <= record.ended
    last = {r.unit: r for r in trace.records if r.what is What.REDUCE_SCATTER}
    waits = {r.unit: r for r in trace.records if r.what is What.WAIT_REDUCE}
    for unit, wait in waits.items():
        # Compute goes on after the collective has ended.
        assert last[unit].ended <= wait.ended
    assert only.seconds > 0


@each_api
@ranks(2)
def test_a_traced_step_computes_what_an_untraced_one_does(api: str) -> None:
    plain_step, _ = stepper(plain := APIS[api]())
    traced_step, optimizer = stepper(traced := APIS[api]())

    expected = [plain_step() for _ in range(4)]
    found = [traced_step()]
    with fullshard.trace(traced, optimizer):
        found += [traced_step(), traced_step()]
    found.append(traced_step())

    assert found == expected
    for one, other in zip(plain.parameters(), traced.parameters(), strict=True):
        assert torch.equal(*(getattr(p, "_local_tensor", p) for p in (one, other)))


@each_api
@ranks(2)
def test_the_engine_is_what_it_was_after_a_trace(api: str) -> None:
    sharded = APIS[api]()
    step, optimizer = stepper(sharded)
    step()
    before = engine_classes(sharded)
    hooks = len(_global_optimizer_pre_hooks)

    with fullshard.trace(sharded, optimizer):
        step()
        assert engine_classes(sharded) != before

    assert engine_classes(sharded) == before
    assert len(_global_optimizer_pre_hooks) == hooks
    for unit in units_in(sharded):
        # Nothing was put on the objects themselves.
        bound = [v for v in vars(unit).values() if isinstance(v, types.MethodType)]
        assert all("racing" not in method.__module__ for method in bound)


@ranks(2)
def test_a_step_that_raises_ends_the_trace_and_leaves_the_engine_as_it_was() -> None:
    sharded = wrapped()
    step, _ = stepper(sharded)
    step()
    before = engine_classes(sharded)

    trace = fullshard.trace(sharded)
    with pytest.raises(ZeroDivisionError):
        fail_in(trace, step)

    assert engine_classes(sharded) == before
    with pytest.raises(RuntimeError, match="nothing recorded"):
        _ = trace.data
    step()


def fail_in(trace: fullshard.Trace, step: Callable[[], object]) -> None:
    with trace:
        step()
        _ = 1 / 0


@ranks(2)
def test_a_copy_made_during_a_trace_is_not_traced() -> None:
    sharded = wrapped()
    step, _ = stepper(sharded)
    step()

    with fullshard.trace(sharded):
        copied = copy.deepcopy(sharded)
        step()

    assert all("Traced" not in type(unit).__name__ for unit in units_in(copied))
    copied_step, _ = stepper(copied)
    copied_step()


@ranks(2)
def test_another_model_on_the_same_ranks_is_not_recorded() -> None:
    traced_step, _ = stepper(traced := wrapped(blocks=1))
    other_step, _ = stepper(wrapped(blocks=3))
    traced_step(), other_step()

    with fullshard.trace(traced) as trace:
        traced_step()
        other_step()

    gathers = [r.unit for r in trace.records if r.what is What.REDUCE_SCATTER]
    assert len(gathers) == 2


@ranks(2)
def test_recording_ends_after_the_steps_that_were_asked_for() -> None:
    sharded = wrapped()
    step, optimizer = stepper(sharded)
    step()
    before = engine_classes(sharded)

    with fullshard.trace(sharded, optimizer, steps=2) as trace:
        for _ in range(3):
            step()
        assert engine_classes(sharded) == before
        step()

    assert len(trace.data.steps_of(0)) == 2


@ranks(2)
def test_backwards_that_accumulate_are_one_step() -> None:
    sharded = wrapped()
    step, optimizer = stepper(sharded)
    step()
    inputs = torch.ones(4, 16, device=device())

    with fullshard.trace(sharded, optimizer) as trace:
        sharded(inputs).sum().backward()
        step()

    assert len(trace.data.steps_of(0)) == 1
    assert sum(r.what is What.BACKWARD and r.unit == "0" for r in trace.records) == 2


@ranks(2)
def test_without_an_optimizer_a_step_ends_with_its_backward() -> None:
    sharded = wrapped()
    inputs = torch.ones(4, 16, device=device())
    sharded(inputs).sum().backward()

    with fullshard.trace(sharded) as trace:
        for _ in range(3):
            sharded(inputs).sum().backward()

    assert len(trace.data.steps_of(0)) == 3


@ranks(2)
def test_a_slow_rank_is_marked_as_the_straggler() -> None:
    sharded = wrapped()
    step, optimizer = stepper(sharded)
    for _ in range(3):
        # Until the ranks expect each other's operations, they wait where these are agreed on.
        step()

    with fullshard.trace(sharded, optimizer) as trace:
        for _ in range(2):
            if dist.get_rank() == 1:
                time.sleep(0.1)
            step()

    found = straggler(trace.data.summaries)
    assert found is not None
    assert found.rank == 1
    # It sleeps for 0.1 s in each step, and the other rank waits for that.
    assert 0.05 < found.seconds < 0.5
    assert "rank 1 is busy" in trace.summary()


@each_api
@ranks(2)
def test_memory_that_is_released_a_unit_late_is_not_counted_for_longer(api: str) -> None:
    # As on an accelerator: when one unit is resharded, the one before it gives its memory back.
    sharded = APIS[api](width=64, blocks=9)
    step, optimizer = stepper(sharded, width=64)
    step()
    units = list(units_in(sharded))
    owed: list[Any] = []
    for unit in units:
        for handle in unit.handles:
            for buffer in handle.full_buffers.values():
                _release_late(buffer, owed)

    with fullshard.trace(sharded, optimizer) as trace:
        step()

    (own,) = [t for t in trace.data.ranks if t.rank == dist.get_rank()]
    block = 4 * (64 * 128 + 128 + 128 * 64 + 64)
    assert max(m.unsharded for m in own.memory) <= 5 * block


def _release_late(buffer: Any, owed: list[Any]) -> None:
    release, allocate = buffer.release, buffer.allocate

    def release_another() -> None:
        for earlier in owed:
            earlier()
        owed[:] = [release]

    def allocate_again() -> None:
        owed[:] = [each for each in owed if each is not release]
        allocate()

    buffer.release, buffer.allocate = release_another, allocate_again


@each_api
@ranks(2)
def test_memory_is_counted_by_cause(api: str) -> None:
    sharded = APIS[api](width=64)
    step, optimizer = stepper(sharded, width=64)
    step()
    at_rest = sum(getattr(p, "_local_tensor", p).nbytes for p in sharded.parameters())

    with fullshard.trace(sharded, optimizer) as trace:
        step()

    (own,) = [t for t in trace.data.ranks if t.rank == dist.get_rank()]
    # Shards and gradient shards may be padded; Adam has two values for each element.
    block = 4 * (64 * 128 + 128 + 128 * 64 + 64)
    for moment in own.memory:
        assert moment.shards == pytest.approx(at_rest, rel=0.01)
        assert moment.optimizer == pytest.approx(2 * at_rest, rel=0.01)
        assert moment.unsharded <= 3 * block + 10_000
    assert max(m.unsharded for m in own.memory) >= 2 * block
    assert max(m.reduce_buffers for m in own.memory) >= block
    assert max(m.gradients for m in own.memory) == pytest.approx(at_rest, rel=0.01)
    assert own.memory[0].unsharded == own.memory[0].reduce_buffers == 0
    if (peak := peak_of(own)) is not None and peak.rest is not None:
        assert peak.total == sum(getattr(peak, cause) for cause in CAUSES)


@each_api
@ranks(2)
def test_gradients_that_were_cleared_are_no_memory_when_the_next_forward_begins(api: str) -> None:
    step, optimizer = stepper(sharded := APIS[api]())
    step()

    with fullshard.trace(sharded, optimizer) as trace:
        step()
        step()

    own = next(each for each in trace.data.ranks if each.rank == dist.get_rank())
    second = own.steps[1].started
    gathered = min(r.issued for r in own.records if r.what is What.ALL_GATHER and r.issued > second)
    before = [moment for moment in own.memory if second < moment.at < gathered]
    assert before
    assert before[-1].gradients == 0


@ranks(2)
def test_a_trace_accounts_for_a_steps_time() -> None:
    sharded = wrapped(width=512, blocks=6)
    step, optimizer = stepper(sharded, width=512, rows=256)
    step()

    with fullshard.trace(sharded, optimizer) as trace:
        for _ in range(3):
            step()

    assert accounted_for(trace.data.ranks[0]) > 0.95


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2)
def test_other_strategies_are_traced_too(strategy: str) -> None:
    sharded = wrapped(strategy=ShardingStrategy[strategy])
    step, optimizer = stepper(sharded)
    step()

    with fullshard.trace(sharded, optimizer) as trace:
        step()

    count = Counter(record.what for record in trace.records)
    assert count[What.REDUCE_SCATTER] == 4
    assert count[What.ALL_GATHER] == (4 if strategy == "SHARD_GRAD_OP" else 0)


@ranks(4)
def test_hybrid_sharding_is_traced_on_all_ranks_with_both_of_its_collectives() -> None:
    mesh = init_device_mesh(device().type, (2, 2))
    sharded = FullyShardedDataParallel(
        model(),
        auto_wrap_policy=fullshard.wrap.ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
        device_mesh=mesh,
    )
    step, optimizer = stepper(sharded)
    step()

    with fullshard.trace(sharded, optimizer) as trace:
        step()

    assert [summary.rank for summary in trace.data.summaries] == [0, 1, 2, 3]
    assert [each.rank for each in trace.data.ranks] == [0, 1, 2, 3]
    count = Counter(record.what for record in trace.records)
    # Each unit's reduce-scatter, and the all-reduce of its shard's gradients.
    assert count[What.REDUCE_SCATTER] == 8


@ranks(2)
def test_what_a_checkpoint_recomputes_is_told_from_forward_and_backward() -> None:
    sharded = wrapped(blocks=2)
    inner = next(m for m in sharded.modules() if isinstance(m, nn.Sequential))
    unit = inner[0]
    inner[0] = Checkpointed(unit)
    step, optimizer = stepper(sharded)
    step()

    with fullshard.trace(sharded, optimizer) as trace:
        step()

    recomputed = [record.unit for record in trace.records if record.what is What.RECOMPUTE]
    assert recomputed == ["0.unit"]


class Checkpointed(nn.Module):
    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.unit, x, use_reentrant=False)


@each_api
@ranks(2)
def test_evaluation_between_steps_is_recorded_and_is_no_step(api: str) -> None:
    sharded = APIS[api]()
    step, optimizer = stepper(sharded)
    step()

    with fullshard.trace(sharded, optimizer) as trace:
        step()
        with torch.no_grad():
            sharded(torch.ones(4, 16, device=device()))
        step()

    assert len(trace.data.steps_of(0)) == 2
    assert sum(r.what is What.FORWARD and r.unit == "0" for r in trace.records) == 3


@ranks(2)
def test_the_first_rank_writes_what_is_asked_for(folder: str) -> None:
    sharded = wrapped()
    step, optimizer = stepper(sharded)
    step()
    paths = [Path(folder, "sub", name) for name in ("trace.html", "trace.json")]

    with fullshard.trace(sharded, optimizer, path=paths):
        step()

    dist.barrier()
    assert all(path.stat().st_size > 1000 for path in paths)


@ranks(2)
def test_a_trace_without_a_step_writes_nothing_and_says_so(folder: str) -> None:
    sharded = wrapped()
    stepper(sharded)[0]()
    path = Path(folder, "trace.html")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fullshard.trace(sharded, path=path), torch.no_grad():
            sharded(torch.ones(4, 16, device=device()))

    said = [str(each.message) for each in caught if "recorded no step" in str(each.message)]
    assert len(said) == (1 if dist.get_rank() == 0 else 0)
    dist.barrier()
    assert not path.exists()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def test_a_model_without_units_is_refused() -> None:
    with pytest.raises(ValueError, match="has no units"):
        fullshard.trace(nn.Linear(2, 2)).start()


def test_a_path_of_no_known_format_is_refused_before_anything_is_recorded() -> None:
    with pytest.raises(ValueError, match=r"\.html, \.json, \.png"):
        fullshard.trace(nn.Linear(2, 2), path="trace.txt")


def test_fewer_than_one_step_are_refused() -> None:
    with pytest.raises(ValueError, match="1 step or more"):
        fullshard.trace(nn.Linear(2, 2), steps=0)


@each_api
@ranks(2)
def test_two_models_on_the_same_ranks_have_a_trace_each(api: str) -> None:
    one_step, one_optimizer = stepper(one := APIS[api](blocks=1))
    other_step, other_optimizer = stepper(other := APIS[api](blocks=3))
    for step in (one_step, other_step) * 2:
        step()

    before = engine_classes(one), engine_classes(other)
    with fullshard.trace(one, one_optimizer) as small:
        with fullshard.trace(other, other_optimizer) as large:
            one_step()
            other_step()
        one_step()

    assert (engine_classes(one), engine_classes(other)) == before
    for trace, units, steps in ((small, 2, 2), (large, 4, 1)):
        reduced = Counter(r.unit for r in trace.records if r.what is What.REDUCE_SCATTER)
        assert sorted(reduced.values()) == [steps] * units
        assert len(trace.data.steps_of(0)) == steps


@each_api
@ranks(2)
def test_a_second_trace_of_the_same_model_is_refused_and_the_first_goes_on(api: str) -> None:
    step, optimizer = stepper(sharded := APIS[api]())
    step()

    with fullshard.trace(sharded, optimizer) as trace:
        step()
        with pytest.raises(RuntimeError, match="twice at the same time"):
            fullshard.trace(sharded, optimizer).start()
        step()

    assert len(trace.data.steps_of(0)) == 2


@each_api
@ranks(2)
def test_forwards_alone_are_no_steps_and_have_a_summary(api: str) -> None:
    sharded = APIS[api]()
    with fullshard.trace(sharded) as trace, torch.no_grad():
        sharded(torch.rand(4, 16, device=device()))

    assert trace.summary().startswith("0 steps of ")
    assert "no backward ended in the trace" in trace.summary()
    assert sum(r.what is What.FORWARD for r in trace.records) == 4


@each_api
@ranks(2)
def test_waits_of_an_evaluation_after_the_last_step_do_no_harm(api: str) -> None:
    step, optimizer = stepper(sharded := APIS[api]())
    step()
    with fullshard.trace(sharded, optimizer) as trace:
        step()
        with torch.no_grad():
            sharded(torch.rand(4, 16, device=device()))

    assert "1 step of " in trace.summary()


@each_api
@ranks(2)
def test_backwards_that_are_accumulated_are_one_step_of_an_optimizer_seen_later(api: str) -> None:
    sharded = APIS[api]()
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)

    with fullshard.trace(sharded) as trace:
        for _ in range(2):
            for _ in range(3):
                sharded(torch.rand(4, 16, device=device())).sum().backward()
            optimizer.step()

    assert len(trace.data.steps_of(0)) == 2


@ranks(2)
def test_the_state_of_an_optimizer_that_is_not_passed_is_the_optimizers_memory() -> None:
    step, optimizer = stepper(sharded := wrapped(width=256), width=256)
    step()
    state = sum(v.nbytes for s in optimizer.state.values() for v in s.values())

    with fullshard.trace(sharded) as trace:
        step()
        step()

    memory = trace.data.ranks[dist.get_rank()].memory
    assert {moment.optimizer for moment in memory} == {state}
    # It is not counted a second time, as something else.
    assert min(moment.rest or 0 for moment in memory) < state / 2


@ranks(2)
def test_optimizers_of_other_models_end_no_steps() -> None:
    step, _ = stepper(sharded := wrapped())
    other = nn.Linear(2, 2)
    others = torch.optim.AdamW(other.parameters())
    step()

    with fullshard.trace(sharded) as trace:
        for _ in range(2):
            step()
            other(torch.ones(2)).sum().backward()
            others.step()

    assert sum(r.what is What.OPTIMIZER for r in trace.records) == 2
    assert len(trace.data.steps_of(0)) == 2
    last = max(r.ended for r in trace.records if r.what is What.OPTIMIZER)
    mine = next(each for each in trace.data.ranks if each.rank == dist.get_rank())
    assert mine.steps[-1].ended - mine.steps[0].started == pytest.approx(
        last - min(r.issued for r in trace.records), abs=0.05
    )


@ranks(2)
def test_an_optimizer_of_whole_tensors_is_one_optimizer() -> None:
    sharded = wrapped()
    optimizer = fullshard.optim.whole(
        lambda parameters: torch.optim.Muon(parameters, lr=0.02),
        sharded,
        rest=lambda parameters: torch.optim.AdamW(parameters),
    )
    inputs = torch.rand(4, 16, device=device())
    with fullshard.trace(sharded, optimizer) as trace:
        for _ in range(2):
            sharded(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert sum(r.what is What.OPTIMIZER for r in trace.records) == 2
    tensors = [v for s in optimizer.state.values() for v in s.values() if hasattr(v, "nbytes")]
    assert trace.data.ranks[dist.get_rank()].memory[-1].optimizer == sum(
        v.nbytes for v in tensors if v.device == device()
    )


@ranks(2)
def test_a_trace_that_cannot_be_written_ends_no_training() -> None:
    step, optimizer = stepper(sharded := wrapped())
    step()

    with (
        warnings.catch_warnings(record=True) as caught,
        fullshard.trace(sharded, optimizer, "/proc/no/trace.html") as trace,
    ):
        warnings.simplefilter("always")
        step()

    said = [str(each.message) for each in caught if "could not write" in str(each.message)]
    assert len(said) == (dist.get_rank() == 0)
    assert len(trace.data.ranks) == 2


@ranks(2)
def test_a_trace_without_steps_is_not_saved(tmp_path: Path) -> None:
    with fullshard.trace(wrapped()) as trace:
        pass

    with pytest.raises(RuntimeError, match="recorded no step of"):
        trace.save(tmp_path / "trace.html")
