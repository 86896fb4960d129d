"""What modules can be called with: containers of every kind, cast and moved as plain tensors are.

The expected numbers come from the bare module with the same arguments, cast by hand.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from tests.original.training import STRATEGIES, WIDTH, Block, Net, build, compare, inputs
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import MixedPrecision, ShardingStrategy
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

LOW = torch.bfloat16


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    parts: list[torch.Tensor]
    name: str = "batch"


@dataclasses.dataclass(frozen=True)
class FrozenBatch:
    x: torch.Tensor
    parts: tuple[torch.Tensor, ...]


@dataclasses.dataclass
class Strict:
    """A class whose initialisation must not run again."""

    x: torch.Tensor
    parts: list[torch.Tensor]
    made: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        assert self.x.dtype == torch.float32
        self.made = 1


class NamedBatch(NamedTuple):
    x: torch.Tensor
    parts: list[torch.Tensor]


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dict": lambda x: {"x": x, "parts": [x, x]},
    "ordered dict": lambda x: collections.OrderedDict(x=x, parts=[x, x]),
    "named tuple": lambda x: NamedBatch(x, [x, x]),
    "dataclass": lambda x: Batch(x, [x, x]),
    "frozen dataclass": lambda x: FrozenBatch(x, (x, x)),
    "dataclass with initialisation": lambda x: Strict(x, [x, x]),
    "nested": lambda x: {"x": x, "parts": (Batch(x, [x]), {"deep": NamedBatch(x, [x])})},
}


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a batch, found without the library's help."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors(v)] if isinstance(value, (list, tuple)) else []


class Takes(nn.Module):
    """Uses every tensor of its one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, batch: Any, scale: torch.Tensor | None = None) -> torch.Tensor:
        found = tensors(batch)
        assert {t.dtype for t in found} == {self.linear.weight.dtype}
        assert {t.device for t in found} == {self.linear.weight.device}
        result = sum(self.linear(t) * (i + 1) for i, t in enumerate(found))
        return result if scale is None else result * scale


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Takes()
        self.last = nn.Linear(3, 3)

    def forward(self, batch: Any, scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.last(self.inner(batch, scale=scale))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_containers_of_every_kind_are_cast_and_lead_gradients_back(kind: str, nested: bool) -> None:
    mine, same = inputs(0).requires_grad_(), inputs(0).requires_grad_()
    policy = ModuleWrapPolicy({Takes}) if nested else None
    mixed = MixedPrecision(LOW, cast_forward_inputs=True)
    model = FSDP(build(Outer), auto_wrap_policy=policy, mixed_precision=mixed)
    scale = torch.full((1,), 2.0, device=device())

    output = model(KINDS[kind](mine), scale=scale)
    output.float().square().sum().backward()
    low = build(Outer).to(LOW)
    by_hand = Batch(same.to(LOW), [same.to(LOW)] * (len(tensors(KINDS[kind](mine))) - 1))
    expected = low(by_hand, scale.to(LOW))
    expected.float().square().sum().backward()

    assert torch.equal(output, expected)
    # By hand every use of the input is cast on its own, too; their gradients are added up in
    # another order.
    torch.testing.assert_close(mine.grad, same.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_what_the_user_holds_is_not_changed(kind: str) -> None:
    batch = KINDS[kind](inputs(0))
    before = [(t, t.clone()) for t in tensors(batch)]

    FSDP(build(Outer), mixed_precision=MixedPrecision(LOW))(batch)

    after = tensors(batch)
    assert len(after) == len(before)
    for found, (same, value) in zip(after, before, strict=True):
        assert found is same
        assert torch.equal(found, value)


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_inputs_on_the_host_are_moved(kind: str) -> None:
    model = FSDP(build(Outer))

    output = model(KINDS[kind](inputs(0).cpu()))

    assert torch.equal(output, build(Outer)(KINDS[kind](inputs(0))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(5, 3)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        assert packed.batch_sizes.device == torch.device("cpu")
        return self.gru(packed)[0]


@pytest.mark.parametrize("enforce_sorted", [False, True])
@ranks(2)
def test_packed_sequences_are_cast_and_moved_and_their_sizes_stay_on_the_host(
    enforce_sorted: bool,
) -> None:
    lengths = (4, 2, 1) if enforce_sorted else (2, 4, 1)
    sequences = [inputs(n, n, 5).cpu() for n in lengths]
    packed = pack_sequence(sequences, enforce_sorted=enforce_sorted)
    model = FSDP(build(Recurrent), mixed_precision=MixedPrecision(LOW))

    output = model(packed)
    expected = build(Recurrent).to(LOW)(packed.to(device=device(), dtype=LOW))  # type: ignore[call-arg]

    assert torch.equal(output.data, expected.data)
    assert torch.equal(output.batch_sizes, expected.batch_sizes)
    output.data.float().sum().backward()


@ranks(2)
def test_objects_that_hold_no_tensors_pass_through_as_they_are() -> None:
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor, *things: Any, **named: Any) -> torch.Tensor:
            assert things == (None, 3, "text", marker)
            assert things[3] is marker
            assert named["settings"] is settings
            return self.linear(x)

    @dataclasses.dataclass
    class Settings:
        depth: int = 3

    marker, settings = object(), Settings()
    model = FSDP(build(Passing), mixed_precision=MixedPrecision(LOW))

    assert model(inputs(0), None, 3, "text", marker, settings=settings).dtype == LOW


@pytest.mark.parametrize("passes_through", [False, True])
@ranks(2)
def test_steps_leave_no_hooks_on_an_input_that_is_used_in_all_of_them(passes_through: bool) -> None:
    class Adapter(nn.Module):
        """Frozen and trainable parameters, and maybe its input among the outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(5, 5).requires_grad_(False)
            self.trainable = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.trainable(self.frozen(x))
            return (x, y) if passes_through else y

    reference, model = build(Adapter), FSDP(build(Adapter), use_orig_params=True)
    prompts = [inputs(0).requires_grad_() for _ in range(2)]
    for _ in range(3):
        for each, prompt in zip((reference, model), prompts, strict=True):
            output = each(prompt)
            sum(output if passes_through else [output]).square().sum().backward()
    del output
    torch.testing.assert_close(prompts[1].grad, prompts[0].grad)
    assert not prompts[1]._backward_hooks


@ranks(2)
def test_what_a_module_puts_into_its_arguments_is_the_callers_also_under_mixed_precision() -> None:
    class Storing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor, seen: list[Any], named: dict[str, Any]) -> torch.Tensor:
            seen.append(x.dtype)
            named["x"] = x.dtype
            return self.linear(x)

    model = FSDP(build(Storing), mixed_precision=MixedPrecision(LOW))
    seen: list[Any] = []
    named: dict[str, Any] = {}
    model(inputs(0), seen, named=named)
    assert (seen, named) == ([LOW], {"x": LOW})


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a_unit_with_adapters_takes_a_view_of_which_a_part_was_changed_in_place(
    strategy: ShardingStrategy,
) -> None:
    class Adapted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up.requires_grad_(False)

    class Cuts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Adapted() for _ in range(2))
            self.stem = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = self.stem(x)[:, :WIDTH]
                x[:, :2] *= 2
                x = block(x)
            return self.head(x)

    compare(
        Cuts,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Adapted}),
    )
