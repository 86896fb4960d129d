"""When parameters are gathered and freed, on the user's word, beside torch's fully_shard."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fully_shard.side_by_side import (
    OURS,
    THEIRS,
    Model,
    both,
    build,
    by_block,
    forward_loss,
    told,
)
from tests.fully_shard.test_communication import AllGather
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.testing import ranks


class Noting(AllGather):
    """Notes, among what else happens, that a block is all-gathered."""

    def __init__(self, events: list[str], index: int) -> None:
        super().__init__()
        self._events, self._index = events, index

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._events.append(f"gather {self._index}")
        return super().__call__(*args, **options)


def watched(api: Any, **options: Any) -> tuple[Any, list[str]]:
    """A model, and what happens to its blocks."""
    events: list[str] = []
    model: Any = build()
    by_block(**options)(api, model)
    for index, block in enumerate(model.blocks):
        block.set_custom_all_gather(Noting(events, index))

        def forward(module: Any, inputs: Any, index: int = index) -> None:
            events.append(f"forward {index}")

        def backward(module: Any, inputs: Any, output: Any, index: int = index) -> None:
            output.register_hook(lambda _: events.append(f"backward {index}"))

        # Inside the block, where its parameters are there already.
        block.norm.register_forward_pre_hook(forward)
        block.down.register_forward_hook(backward)
    return model, events


def gathers_before(events: list[str], moment: str) -> set[str]:
    return {event for event in events[: events.index(moment)] if event.startswith("gather")}


@ranks(2)
def test_chosen_modules_are_gathered_before_a_forward_computes() -> None:
    for api in (THEIRS, OURS):
        model, events = watched(api)
        first, second, third = model.blocks
        first.set_modules_to_forward_prefetch([second, third])

        forward_loss(model, 0)

        assert gathers_before(events, "forward 0") == {"gather 0", "gather 1", "gather 2"}
        # Without, there is nothing to go by in the first forward.
        model, events = watched(api)
        forward_loss(model, 0)
        assert gathers_before(events, "forward 0") == {"gather 0"}


@ranks(2)
def test_chosen_modules_are_gathered_before_a_backward_computes() -> None:
    for api in (THEIRS, OURS):
        for chosen in ([], [0], [1, 0]):
            model, events = watched(api, reshard_after_forward=True)
            model.blocks[2].set_modules_to_backward_prefetch([model.blocks[i] for i in chosen])
            loss = forward_loss(model, 0)
            del events[:]
            loss.backward()
            before = gathers_before(events, "backward 2")
            # A host that computes itself does not free what its backward begins with.
            kept = {"gather 1", "gather 2"}
            assert before - kept == ({"gather 0"} if 0 in chosen else set()), (chosen, events)


@ranks(2)
def test_parameters_that_stay_are_not_gathered_again() -> None:
    def twice(prepare: Callable[[Any], None]) -> list[int]:
        counts: list[int] = []
        for api in (THEIRS, OURS):
            model, events = watched(api, reshard_after_forward=False)
            prepare(model)
            for step in range(2):
                forward_loss(model, step).backward()
            counts.append(events.count("gather 0"))
        return counts

    assert twice(lambda model: None) == [2, 2]
    assert twice(lambda model: model.set_reshard_after_backward(False)) == [1, 1]


class Skipping(Model):
    """A model that may leave its norm out."""

    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden if self.skips else self.norm(hidden))


def shard_tail(api: Any, model: Any, reshards: bool) -> None:
    """As accelerate and transformers do: what runs at both ends, in one unit."""
    api.fully_shard([model.norm, model.embed, model.head], reshard_after_forward=reshards)
    api.fully_shard(model)


@pytest.mark.parametrize("reshards", [True, False])
@ranks(2)
def test_modules_in_a_list_are_gathered_once_however_far_apart_they_run(reshards: bool) -> None:
    counts: list[tuple[int, int]] = []
    for api in (THEIRS, OURS):
        model: Any = Skipping()
        shard_tail(api, model, reshards)
        gather = AllGather()
        model.head.set_custom_all_gather(gather)

        loss = forward_loss(model, 0)
        of_forward = len(gather.calls)
        loss.backward()
        gather.calls.clear()
        with torch.no_grad():
            forward_loss(model, 0)
        counts.append((of_forward, len(gather.calls)))

    assert counts[1] == counts[0] == (1, 1)


@ranks(2)
def test_a_module_in_a_list_may_be_left_out() -> None:
    def step_with(api: Any, model: Any, step: int) -> torch.Tensor:
        model.skips = step == 1
        loss = forward_loss(model, step)
        loss.backward()
        return loss

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Skipping()

    for reshards in (True, False):
        shard = functools.partial(shard_tail, reshards=reshards)
        both(shard, make=make, step_with=step_with, steps=4)


@ranks(2)
def test_reshard_after_forward_decides_on_the_gather_of_backward() -> None:
    counts = []
    for api in (THEIRS, OURS):
        model, events = watched(api)
        for reshards in (True, False):
            model.set_reshard_after_forward(reshards)
            forward_loss(model, 0).backward()
            counts.append(events.count("gather 0"))
            del events[:]

    assert counts == [2, 1, 2, 1]


@ranks(2)
def test_a_handle_shows_full_parameters_when_it_is_waited_for() -> None:
    for api in (THEIRS, OURS):
        model, events = watched(api)
        block = model.blocks[0]
        forward_loss(model, 0).backward()
        del events[:]
        handle = block.unshard(async_op=True)
        assert isinstance(handle, api.UnshardHandle)
        assert events == ["gather 0"]
        assert isinstance(block.up.weight, DTensor)
        handle.wait()
        handle.wait()
        assert not isinstance(block.up.weight, DTensor)
        assert block.unshard() is None
        forward_loss(model, 0)
        assert events.count("gather 0") == 1
        assert isinstance(api.fully_shard(nn.Tanh()).unshard(async_op=True), api.UnshardHandle)


@ranks(2)
def test_gradients_are_there_after_backwards_that_are_not_the_last() -> None:
    gradients = []
    for api in (THEIRS, OURS):
        model, _ = watched(api)
        for is_last in (False, False, True):
            model.set_is_last_backward(is_last)
            forward_loss(model, 0).backward()
            gradients.append(told(model.head.weight.grad)[-1])

    for theirs, ours in zip(gradients[:3], gradients[3:], strict=True):
        torch.testing.assert_close(ours, theirs)


@ranks(2)
def test_models_that_share_streams_train_as_alone() -> None:
    losses = []
    for api in (THEIRS, OURS):
        models = [watched(api)[0] for _ in "ab"]
        api.share_comm_ctx(models)
        for model in models:
            forward_loss(model, 3).backward()
        losses.append([told(model.head.weight.grad)[-1] for model in models])
        if api is OURS:
            streams = {
                id(unit._fullshard_module_unit.unit.streams)
                for m in models
                for unit in (m, *m.blocks)
            }
            assert len(streams) == 1

    torch.testing.assert_close(losses[1], losses[0])


@ranks(2)
def test_a_step_that_raised_is_reset_on_the_root_alone() -> None:
    messages = []
    for api in (THEIRS, OURS):
        model, _ = watched(api)
        fails = model.head.register_forward_pre_hook(lambda module, args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward_loss(model, 0)
        fails.remove()
        with pytest.raises(RuntimeError) as caught:
            model.blocks[0].reset_iter_state()
        messages.append(str(caught.value))
        model.reset_iter_state()
        forward_loss(model, 0).backward()
        messages.append(told(model.head.weight.grad)[-1])

    assert messages[2].startswith(messages[0])
    torch.testing.assert_close(messages[3], messages[1])
