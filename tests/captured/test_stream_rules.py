"""Captured passes over streams that follow CUDA's rules of capture: no GPU is needed.

The models compute on the CPU, by what the engine does on an accelerator. What is tested is which
stream waits for which event; that replays compute what eager steps do, GPUs test.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from tests.captured.capture_rules import (
    BrokeCapture,
    Machine,
    Raced,
    Ranks,
    RuledStream,
    Working,
)
from tests.marks import in_long_runs
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard import (
    BackwardPrefetch,
    Communication,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from fullshard.engine.comm import streams
from fullshard.engine.comm.collectives import Group, group_for
from fullshard.engine.runtime import capturing, forward, policy, unit_base
from fullshard.engine.runtime.parts import FewRanks

CPU = torch.device("cpu")
UNITS = 4


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Generator[Machine, None, None]:
    """Have models on the CPU run as on an accelerator."""
    made = Machine()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda _: made)
        patch.setattr(streams, "_stream_number", lambda _: lambda: made.stack[-1].number)
        accelerated = streams.AcceleratorStreams(CPU)
    monkeypatch.setitem(streams._streams, CPU, accelerated)
    for module in (unit_base, forward):
        monkeypatch.setattr(module, "policy_for", lambda _: policy._ACCELERATOR)
    monkeypatch.setattr(capturing, "obstacle", lambda _: None)

    def record_stream(tensor: torch.Tensor, stream: RuledStream) -> None:
        made.memory.record(tensor, stream)

    monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)
    with made.watched_memory(), Working(made):
        yield made


def chain(machine: Machine, **options: Any) -> Any:
    group: Any = Ranks(machine)
    options.setdefault("use_orig_params", True)
    units = [FullyShardedDataParallel(nn.Linear(3, 3), group, **options) for _ in range(UNITS)]
    return FullyShardedDataParallel(nn.Sequential(*units), group, **options)


def step(model: Any) -> None:
    model(torch.ones(2, 3)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    model.zero_grad()


def take_turns(machine: Machine, model: Any, run: Callable[[Any], None] = step) -> None:
    """Eager steps, captures after each other, and eager passes between them."""
    for _ in range(3):
        run(model)
    with machine.graph():
        run(model)
    run(model)
    with machine.graph():
        run(model)
        run(model)
    with machine.graph():
        run(model)
    with torch.no_grad():
        model(torch.ones(2, 3))
    run(model)


def test_the_rules_are_those_of_cuda() -> None:
    machine = Machine()
    side, before = machine.Stream(), machine.Event()
    side.work()
    before.record(side)

    def wait_for_what_was_before() -> None:
        machine.current_stream().wait_event(before)

    def leave_work_behind() -> None:
        side.wait_stream(machine.current_stream())
        side.work()

    for act, told in (
        (wait_for_what_was_before, "uncaptured work"),
        (leave_work_behind, "unjoined"),
    ):
        with pytest.raises(BrokeCapture, match=told), machine.graph():
            act()
    inside = machine.Event()
    with machine.graph():
        inside.record(machine.current_stream())
    with pytest.raises(BrokeCapture, match="is over"):
        side.wait_event(inside)


@pytest.mark.parametrize("waits", [True, False])
def test_the_rules_know_who_reads_and_gets_memory_too_early(machine: Machine, waits: bool) -> None:
    compute, side = machine.current_stream(), machine.Stream()
    storage = torch.empty(4).untyped_storage()
    storage.resize_(0)

    def read_without_waiting() -> None:
        tensor = torch.ones(4)
        if waits:
            side.wait_stream(compute)
        with side:
            tensor.add(1)

    def take_memory_that_is_read() -> None:
        storage.resize_(16)
        tensor = torch.empty(0).set_(storage, 0, (4,))
        side.wait_stream(compute)
        with side:
            tensor.add(1)
        if waits:
            compute.wait_stream(side)
        storage.resize_(0)
        storage.resize_(16)

    for act in (read_without_waiting, take_memory_that_is_read):
        raised = pytest.raises(Raced, match=r"others use|has not waited")
        with contextlib.nullcontext() if waits else raised:
            act()


def test_a_capture_may_not_ask_for_values(machine: Machine) -> None:
    value = torch.ones(())
    assert value.item() == 1
    with pytest.raises(BrokeCapture, match="not permitted"), machine.graph():
        value.item()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("before", [True, False])
def test_a_captured_pass_waits_for_nothing_of_before(
    machine: Machine, strategy: str, before: bool
) -> None:
    backward = BackwardPrefetch.BACKWARD_PRE if before else BackwardPrefetch.BACKWARD_POST
    for ahead, limited, original in itertools.product([True, False], repeat=3):
        model = chain(
            machine,
            sharding_strategy=ShardingStrategy[strategy],
            backward_prefetch=backward,
            forward_prefetch=ahead,
            limit_all_gathers=limited,
            use_orig_params=original,
        )
        take_turns(machine, model)


class Block(nn.Module):
    """Partly frozen, and recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.LayerNorm(3).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = checkpoint(self._compute, x, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(found, torch.Tensor)
        return found

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.linear(x))


@pytest.mark.parametrize(
    "strategy",
    ["FULL_SHARD", pytest.param("SHARD_GRAD_OP", marks=in_long_runs), "HYBRID_SHARD", "NO_SHARD"],
)
@pytest.mark.parametrize("ahead", [True, pytest.param(False, marks=in_long_runs)])
def test_streams_wait_for_each_other_in_low_precision_with_frozen_parameters(
    machine: Machine, strategy: str, ahead: bool
) -> None:
    group: Any = Ranks(machine)
    options: Any = {
        "sharding_strategy": ShardingStrategy[strategy],
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32),
        "forward_prefetch": ahead,
        "limit_all_gathers": ahead,
        "use_orig_params": True,
    }
    ranks = (group, Ranks(machine)) if strategy == "HYBRID_SHARD" else group
    units = [FullyShardedDataParallel(Block(), ranks, **options) for _ in range(UNITS)]
    model = FullyShardedDataParallel(nn.Sequential(*units), ranks, **options)

    def clip_and_step(model: Any) -> None:
        model(torch.ones(2, 3)).sum().backward()
        model.clip_grad_norm_(1.0)
        step(model)

    take_turns(machine, model, clip_and_step)


@pytest.mark.parametrize("ahead", [True, False])
def test_streams_wait_for_each_other_where_fewer_bytes_are_sent(
    machine: Machine, ahead: bool
) -> None:
    encoded = Communication(all_gather_dtype=torch.int8, reduce_dtype=torch.int8)
    for communication in (encoded, None):
        model = chain(machine, communication=communication, forward_prefetch=ahead)
        few = FewRanks(group_for(Ranks(machine), CPU), None)
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            if communication is None:
                unit._unit.keep_parts(few)
        take_turns(machine, model)


def test_a_captured_step_may_accumulate_and_evaluate(machine: Machine) -> None:
    def accumulate(model: Any) -> None:
        with model.no_sync():
            model(torch.ones(2, 3)).sum().backward()
        step(model)

    def evaluate(model: Any) -> None:
        with torch.no_grad():
            model(torch.ones(2, 3))
        step(model)

    for run in (accumulate, evaluate):
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
            take_turns(machine, chain(machine, sharding_strategy=strategy), run)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("async_op", [True, False])
def test_a_captured_step_may_unshard_a_unit_before_its_forward(
    machine: Machine, async_op: bool, waits: bool
) -> None:
    def unshard_first(model: Any) -> None:
        handle = model.module[1].unshard(async_op=async_op)
        if handle is not None and waits:
            handle.wait()
        step(model)

    take_turns(machine, chain(machine), unshard_first)


def test_a_unit_unsharded_before_the_capture_is_refused_in_any_model(machine: Machine) -> None:
    models = [chain(machine), chain(machine)]

    def both() -> None:
        for model in models:
            step(model)

    both()
    models[1].module[1].unshard(async_op=True)
    with (
        pytest.raises(RuntimeError, match="being all-gathered since before the capture"),
        machine.graph(),
    ):
        both()
    for model in models:
        take_turns(machine, model)


def test_unreduced_gradients_of_before_are_refused(machine: Machine) -> None:
    model = chain(machine)
    with model.no_sync():
        model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="unreduced gradients from before"), machine.graph():
        step(model)
    step(model)
    take_turns(machine, model)


def test_marks_that_a_graph_reads_stay_whatever_comes_since(machine: Machine) -> None:
    model = chain(machine)
    marks = model.module[0]._unit.handles[0].used_marks
    flat = torch.zeros(marks._layout.padded_numel)
    alive = []
    with machine.graph():
        for captured in (True, False):
            if captured:
                model(torch.ones(2, 3)).sum().backward()
            marks.mark(flat, (captured, True))
            alive.append(weakref.ref(marks._by_pattern[captured, True]))
            streams._streams[CPU].capturing = False
    marks._by_pattern.clear()
    assert [reference() is not None for reference in alive] == [True, False]


def test_the_groups_of_all_models_are_told_of_a_capture(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[Group, list[bool]] = {}
    monkeypatch.setattr(
        Group, "note_capturing", lambda group, active: told.setdefault(group, []).append(active)
    )
    models = [chain(machine), chain(machine)]
    groups = [model._unit.shards for model in models]
    reduces: Any = Ranks(machine)
    groups.append(group_for(reduces, CPU))
    models[1].module[0]._unit.reduction.set_group(groups[2])

    def both() -> None:
        for model in models:
            step(model)

    both()
    with machine.graph():
        both()
    both()
    with machine.graph():
        step(models[1])

    assert [told[group] for group in groups] == [
        [True, False],
        [True, False, True],
        [True, False, True],
    ]


@pytest.mark.parametrize("where", [0, UNITS - 1])
@pytest.mark.parametrize("in_backward", [False, True])
def test_training_and_captures_go_on_after_one_that_broke(
    machine: Machine, in_backward: bool, where: int
) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def fail_in_backward(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(fail)

    model = chain(machine)
    inner = model.module[where].module
    step(model)
    for _ in range(2):
        hook = (
            inner.register_forward_hook(fail_in_backward)
            if in_backward
            else inner.register_forward_pre_hook(fail)
        )
        with pytest.raises(ZeroDivisionError), machine.graph():
            step(model)
        hook.remove()
        model.zero_grad()
        take_turns(machine, model)


def test_summoning_and_state_dicts_between_captures(machine: Machine) -> None:
    model = chain(machine)
    step(model)
    for between in (
        lambda: FullyShardedDataParallel.summon_full_params(model),
        lambda: contextlib.nullcontext(model.state_dict()),
    ):
        with machine.graph():
            step(model)
        with between():
            pass
        with machine.graph():
            step(model)
        step(model)
