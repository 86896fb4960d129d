"""What users may put in place of the engine's communication has the effect that torch's has."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.fully_shard.side_by_side import (
    OURS,
    THEIRS,
    assert_same_training,
    both,
    build,
    by_block,
    forward_loss,
    skip_unless_torch_has,
    told,
    train,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fullshard.testing import device, ranks


class Recorded:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.sizes: list[Any] = []
        self.calls: list[Any] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.sizes.append((tuple(size), dtype, device.type))
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(Recorded):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self.calls.append((output_tensor.shape, input_tensor.shape, async_op, group))
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class ReduceScatter(Recorded):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.calls.append((output_tensor.shape, input_tensor.shape, str(op), group))
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


def units(api: Any, model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, api.FSDPModule)]


@pytest.mark.parametrize("policy", [{}, {"param_dtype": torch.bfloat16}])
@ranks(2)
def test_collectives_of_the_users_are_called_with_what_torchs_are(policy: dict[str, Any]) -> None:
    found: dict[Any, list[Any]] = {}

    for api in (THEIRS, OURS):

        def shard(api: Any, model: Any) -> None:
            by_block(mp_policy=api.MixedPrecisionPolicy(**policy))(api, model)
            gather, reduce = AllGather(), ReduceScatter()
            model.blocks[1].set_custom_all_gather(gather)
            model.blocks[1].set_custom_reduce_scatter(reduce)
            found[api] = [gather, reduce]

        trained = train(api, shard, steps=1)
        found[api].append(trained)

    for kind in (0, 1):
        theirs, ours = found[THEIRS][kind], found[OURS][kind]
        # Both fill the gaps of their layouts by their own rules, so sizes may differ by those.
        assert [(d, t) for _, d, t in ours.sizes] == [(d, t) for _, d, t in theirs.sizes]
        assert [call[2] for call in ours.calls] == [call[2] for call in theirs.calls]
        assert ours.calls[0][0].numel() > 0
    assert_same_training(found[OURS][2], found[THEIRS][2], 2e-2 if policy else 1e-5)


@ranks(2)
def test_the_engines_own_collectives_come_back_for_none() -> None:
    model: Any = build()
    by_block()(OURS, model)
    gather, reduce = AllGather(), ReduceScatter()
    model.blocks[0].set_custom_all_gather(gather)
    model.blocks[0].set_custom_reduce_scatter(reduce)
    forward_loss(model, 0).backward()
    gathered, reduced = len(gather.calls), len(reduce.calls)
    assert gathered > 0
    assert reduced > 0

    model.blocks[0].set_custom_all_gather(None)
    model.blocks[0].set_custom_reduce_scatter(None)
    forward_loss(model, 0).backward()

    assert (len(gather.calls), len(reduce.calls)) == (gathered, reduced)
    plain: Any = build()
    by_block()(OURS, plain)
    for _ in "ab":
        forward_loss(plain, 0).backward()
    torch.testing.assert_close(told(model.head.weight.grad)[-1], told(plain.head.weight.grad)[-1])


@ranks(2)
def test_memory_that_does_not_fit_is_refused() -> None:
    class Short(AllGather):
        def allocate(self, size: Any, **options: Any) -> torch.Tensor:
            return torch.empty(1, **options)

    model: Any = OURS.fully_shard(nn.Linear(4, 4))
    model.set_custom_all_gather(Short())

    with pytest.raises(ValueError, match=r"Short.allocate .* 20 elements .* shape \(1,\)"):
        model(torch.ones(1, 4))


@ranks(2)
def test_gradients_are_summed_and_divided_as_is_asked() -> None:
    for factor, sums in ((3.0, True), (None, True)):

        def shard(api: Any, model: Any, factor: float | None = factor, sums: bool = sums) -> None:
            by_block()(api, model)
            for unit in units(api, model):
                reduce = ReduceScatter()
                unit.set_custom_reduce_scatter(reduce)
                unit.set_force_sum_reduction_for_comms(sums)
                if factor is not None:
                    unit.set_reduce_scatter_divide_factor(factor)

        both(shard, steps=2)


@ranks(1)
def test_a_single_ranks_gradients_are_divided_and_hooked_too() -> None:
    for factor in (None, 3.0):

        def shard(api: Any, model: Any, factor: float | None = factor) -> None:
            by_block()(api, model)
            for unit in units(api, model):
                if factor is not None:
                    # Together with forced sums, torch divides a single rank's twice.
                    unit.set_gradient_divide_factor(factor)
            model.blocks[1].set_all_reduce_hook(lambda reduced: reduced.mul_(2.0))

        both(shard, steps=2)


@ranks(2)
def test_reduces_in_a_group_of_their_own_and_more_buffers_change_no_result() -> None:
    def shard(api: Any, model: Any) -> None:
        by_block()(api, model)
        if hasattr(model, "set_separate_reduce_scatter_group"):
            model.set_separate_reduce_scatter_group()
            model.set_reduce_scatter_max_input_buffers(3)

    ours, _ = both(shard)

    model: Any = ours.model
    reduce = ReduceScatter()
    model.set_custom_reduce_scatter(reduce)
    forward_loss(model, 9).backward()
    model.set_separate_reduce_scatter_group(False)
    forward_loss(model, 9).backward()
    own, shared = (group for *_, group in reduce.calls)
    assert own is not shared
    assert own.size() == shared.size() == 2


class UnderWay:
    """Counts the units whose gradients are being reduced behind what is computed."""

    def __init__(self, model: Any) -> None:
        self.now = self.most = 0
        for unit in units(OURS, model):
            reduction = unit._fullshard_module_unit.unit.reduction
            reduction.start = functools.partial(self._began, reduction.start)
            reduction.finish = functools.partial(self._ended, reduction.finish)

    def _began(self, start: Any) -> None:
        start()
        self.now += 1
        self.most = max(self.now, self.most)

    def _ended(self, finish: Any) -> None:
        finish()
        self.now -= 1


@ranks(2)
def test_more_buffers_let_more_gradients_be_on_their_way() -> None:
    most: dict[int, int] = {}
    for allowed in (1, 3):
        model: Any = build()
        by_block(reshard_after_forward=False)(OURS, model)
        model.set_reduce_scatter_max_input_buffers(allowed)
        under_way = UnderWay(model)
        forward_loss(model, 0).backward()
        assert under_way.now == 0
        most[allowed] = under_way.most

    # An accelerator's device may have been given one more, which is not counted here.
    assert most == {1: 1, 3: 3}


@ranks(2)
def test_memory_of_the_backend_is_used_where_it_has_any() -> None:
    def shard(api: Any, model: Any) -> None:
        by_block()(api, model)
        for unit in units(api, model):
            unit.set_allocate_memory_from_process_group_for_comm(True)

    both(shard, steps=2)


@ranks(2)
def test_symmetric_memory_is_refused_where_the_backend_has_none() -> None:
    model: Any = OURS.fully_shard(nn.Linear(4, 4))

    with pytest.raises(RuntimeError, match="needs a process group whose backend is NCCL"):
        model.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="NVSHMEM"):
        model.set_symm_mem_for_comm("NVSHMEM")


@ranks(2)
def test_what_cannot_be_combined_is_refused_with_torchs_words() -> None:
    skip_unless_torch_has("set_symm_mem_for_comm")
    for call in (
        lambda module: module.set_allocate_memory_from_process_group_for_comm(True),
        lambda module: module.set_symm_mem_for_comm(),
    ):
        messages = []
        for api in (THEIRS, OURS):
            module: Any = api.fully_shard(nn.Linear(4, 4))
            module.set_custom_all_gather(AllGather())
            with pytest.raises(AssertionError) as caught:
                call(module)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


class Skips(nn.Module):
    """Of its own parameters it uses some; of its children, one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.unit = (nn.Linear(3, 3) for _ in "abc")
        self.extra = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@ranks(2)
def test_unused_parameters_have_gradients_of_zeros_if_that_is_asked_for() -> None:
    skip_unless_torch_has("set_reduce_scatter_unused_params")
    for asked in (False, True):
        gradients = []
        for api in (THEIRS, OURS):
            torch.manual_seed(1)
            model: Any = Skips()
            api.fully_shard(model.unit)
            api.fully_shard(model)
            model.set_reduce_scatter_unused_params(asked)
            model(torch.ones(2, 3)).sum().backward()
            gradients.append({n: told(p.grad) for n, p in model.named_parameters()})
        theirs, ours = gradients
        for name, expected in theirs.items():
            assert (ours[name] is None) == (expected is None), (asked, name)
            if expected is not None:
                torch.testing.assert_close(ours[name][-1], expected[-1])


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(self.embed(x))))


@ranks(2)
def test_backward_does_not_gather_what_its_user_says_it_does_not_need() -> None:
    gathers: dict[bool, list[int]] = {True: [], False: []}
    gradients = []
    for api in (THEIRS, OURS):
        for needed in (True, False):
            torch.manual_seed(2)
            model: Any = Embeds()
            for module in (model.embed, model.first, model.second):
                api.fully_shard(module)
            api.fully_shard(model)
            gather = AllGather()
            model.embed.set_custom_all_gather(gather)
            model.embed.set_unshard_in_backward(needed)
            for _ in "ab":
                model(torch.arange(8)).sum().backward()
            gathers[needed].append(len(gather.calls))
            gradients.append(told(model.embed.weight.grad)[-1])

    assert gathers == {True: [4, 4], False: [2, 2]}
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


@ranks(4)
def test_hooks_and_factors_work_over_copies_as_torchs_do() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    dims: list[int] = []

    def double(reduced: torch.Tensor) -> None:
        dims.append(reduced.dim())
        reduced.mul_(2.0)

    def shard(api: Any, model: Any) -> None:
        by_block(mesh=mesh)(api, model)
        for unit in units(api, model):
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(3.0)
        model.blocks[0].set_all_reduce_hook(double)

    both(shard, steps=2)
    assert dims == [1] * 4


@ranks(2)
def test_an_event_after_the_optimizer_step_is_accepted_each_step() -> None:
    def step_with(api: Any, model: Any, step: int) -> torch.Tensor:
        event = torch.Event(device().type)
        if device().type != "cpu":
            event.record()
        model.set_post_optim_event(event)
        loss = forward_loss(model, step)
        loss.backward()
        return loss

    both(by_block(), step_with=step_with)
