"""Training with parameters that are all-gathered, and gradients that are reduced, encoded."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.encoded import (
    APIS,
    INT8,
    Block,
    build,
    gradients_of,
    loss_of,
    parameters_of,
    shard,
    step_alone,
)
from tests.engine.traffic import counted_bytes
from torch import nn

import fullshard
from fullshard import (
    Communication,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedGradScaler,
    ShardingStrategy,
)
from fullshard.engine.comm.collectives import Group
from fullshard.engine.grads.encoded_reduce import staging_dtype, start_encoded_reduce
from fullshard.engine.grads.gradients import stage
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

with_both_apis = pytest.mark.parametrize("api", APIS)
GATHER = Communication(torch.int8, min_numel=0)
REDUCE = Communication(reduce_dtype=torch.int8, min_numel=0)
#: The part of a block's largest absolute value that int8 may be off by.
INT8_ERROR = 1 / 254 + 2**-20


def seen_in_forward(model: Any) -> dict[str, torch.Tensor]:
    """What the blocks of a sharded model compute with."""
    seen: dict[str, torch.Tensor] = {}

    def look(path: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            seen[f"{path}.{name}"] = parameter.detach().clone()

    hooks: list[Any] = []
    for module in model.modules():
        if isinstance(module, Block):
            path = str(len(hooks))
            # On a module inside, whose hook runs while the block's full parameters are in place.
            hooks.append(
                module.norm.register_forward_pre_hook(lambda *_, p=path, m=module: look(p, m))
            )
    with torch.no_grad():
        loss_of(model)
    for hook in hooks:
        hook.remove()
    return seen


@with_both_apis
@ranks(3)
def test_all_ranks_compute_with_the_same_parameters_off_by_what_int8_loses(api: str) -> None:
    expected = dict(build().named_parameters())
    model = shard(api, build(), GATHER)

    seen = seen_in_forward(model)

    assert list(seen) == list(expected)
    largest = max(float(p.detach().abs().max()) for p in expected.values())
    for name, parameter in seen.items():
        off = (parameter - expected[name].detach()).abs().max()
        if parameter.dim() == 1:
            assert off == 0, name
        else:
            # A block may hold parts of any parameters of its unit.
            assert 0 < off <= largest * INT8_ERROR, name
        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, parameter.cpu())
        assert all(torch.equal(other, parameter.cpu()) for other in others), name


@with_both_apis
@ranks(3)
def test_shards_never_hold_what_was_encoded(api: str) -> None:
    expected = {name: p.detach().clone() for name, p in build().named_parameters()}
    model = shard(api, build(), INT8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
    found = parameters_of(model)

    for (name, parameter), value in zip(expected.items(), found.values(), strict=True):
        assert torch.equal(parameter, value), name


@with_both_apis
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@ranks(3)
def test_gradients_are_off_by_what_each_other_rank_lost_once(api: str, dtype: torch.dtype) -> None:
    size = dist.get_world_size()
    each = step_alone(build(), size)
    model = shard(api, build(), Communication(reduce_dtype=dtype, min_numel=0))

    loss_of(model).backward()
    found = gradients_of(model)

    part = INT8_ERROR if dtype is torch.int8 else 2**-8
    for name, gradient in zip(each[0], found.values(), strict=True):
        assert gradient is not None
        mean = torch.stack([of_rank[name] for of_rank in each]).mean(0)
        off = float((gradient.view_as(mean) - mean).abs().max())
        unit = name.split(".")[0]
        largest = [
            max(float(g.abs().max()) for n, g in of_rank.items() if n.startswith(unit))
            for of_rank in each
        ]
        rounding = 1e-6 * sum(largest)
        if mean.dim() == 1:
            assert off <= rounding, name
        else:
            # What a rank keeps of its own is not sent, whichever rank that is.
            assert 0 < off <= sum(sorted(largest)[1:]) * part / size + rounding, name


@settings(max_examples=15 if settings().max_examples <= 100 else 300)
@given(
    st.sampled_from(APIS),
    st.sampled_from([(torch.int8, INT8_ERROR), (torch.float8_e4m3fn, 1 / 16 + 2**-20)]),
    st.sampled_from([16, 33, 256]),
    st.integers(0, 400),
    st.booleans(),
)
@ranks(2)
def test_gradients_are_within_the_bound_whatever_is_encoded(
    api: str, kind: tuple[torch.dtype, float], block: int, least: int, keeps: bool
) -> None:
    dtype, part = kind
    each = step_alone(build(), 2)
    communication = Communication(reduce_dtype=dtype, block_size=block, min_numel=least)
    strategy = ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD
    model = shard(api, build(), communication, sharding_strategy=strategy)

    loss_of(model).backward()

    largest = [max(float(g.abs().max()) for g in of_rank.values()) for of_rank in each]
    bound = max(largest) * part / 2 + 1e-6 * sum(largest)
    for name, gradient in gradients_of(model).items():
        assert gradient is not None
        mean = (each[0][name] + each[1][name]) / 2
        assert float((gradient.view_as(mean) - mean).abs().max()) <= bound, name


@with_both_apis
@pytest.mark.parametrize("users", [(), (0,), (1, 2)])
@ranks(3)
def test_parameters_without_gradients_are_told_from_their_neighbours_in_a_block(
    api: str, users: tuple[int, ...]
) -> None:
    model: Any = build()
    for block in model:
        block.uses_skipped = dist.get_rank() in users
    # One block has parts of parameters that are used, and of those that are not.
    model = shard(api, model, INT8)

    for _ in range(2):
        loss_of(model).backward()
    found = gradients_of(model)

    absent = {name for name, gradient in found.items() if gradient is None}
    skipped = {name for name in found if "skipped" in name}
    assert absent == (set() if users else skipped)
    assert all(bool(g.isfinite().all()) for g in found.values() if g is not None)


class _Zeroed(nn.Module):
    """Has a weight whose gradient is negative zero, on the ranks that use it."""

    def __init__(self, is_used: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 5))
        self.other = nn.Parameter(torch.ones(5, 6))
        self.is_used = is_used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x @ self.other
        return out + (self.weight * -0.0).sum() if self.is_used else out


@with_both_apis
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16])
@ranks(2)
def test_a_gradient_of_negative_zeros_is_there_for_all_ranks(api: str, dtype: torch.dtype) -> None:
    model: Any = _Zeroed(dist.get_rank() == 0).to(device())
    communication = Communication(reduce_dtype=dtype, min_numel=0)
    if api == "wrapper":
        model = FullyShardedDataParallel(model, use_orig_params=True, communication=communication)
    else:
        model = fullshard.fully_shard(model, communication=communication)

    model(torch.ones(3, 5, device=device())).sum().backward()

    own = [p.grad is not None for p in model.parameters() if p.numel()]
    everywhere: list[Any] = [None] * 2
    dist.all_gather_object(everywhere, own)
    assert all(map(all, everywhere))


@with_both_apis
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@ranks(2)
def test_gradients_that_are_not_finite_stay_so_for_gradient_scalers(api: str, bad: float) -> None:
    model = shard(api, build(), INT8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler(device=device().type, init_scale=4.0)
    before = parameters_of(model)

    loss = loss_of(model) * (bad if dist.get_rank() == 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

    assert scaler.get_scale() == 2.0
    for name, parameter in parameters_of(model).items():
        assert torch.equal(parameter, before[name]), name


@with_both_apis
@pytest.mark.parametrize("communication", [GATHER, REDUCE, INT8])
@ranks(2)
def test_training_follows_full_precision(api: str, communication: Communication) -> None:
    losses: dict[Any, list[float]] = {}
    for options in (None, communication):
        model = shard(api, build(), options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses[options] = []
        for step in range(30):
            loss = loss_of(model, step % 3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[options].append(float(loss))

    first, last = losses[None][0], losses[None][-1]
    assert last < first / 4
    for expected, found in zip(losses[None], losses[communication], strict=True):
        assert abs(found - expected) < 0.02 * first


@with_both_apis
@ranks(2)
def test_low_precision_accumulation_and_clipping_go_with_encoding(api: str) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    norms = {}
    for options in (None, INT8):
        model = shard(api, build(), options, mixed_precision=precision)
        if api == "wrapper":
            with model.no_sync():
                loss_of(model, 1).backward()
        else:
            model.set_requires_gradient_sync(False)
            loss_of(model, 1).backward()
            model.set_requires_gradient_sync(True)
        loss_of(model, 2).backward()
        loss_of(model, 3).backward()
        if api == "wrapper":
            norms[options] = float(model.clip_grad_norm_(1e9))
        else:
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            norms[options] = float(whole_norm(norm))

    assert norms[INT8] == pytest.approx(norms[None], rel=2e-2)


def whole_norm(norm: Any) -> torch.Tensor:
    """The norm of all ranks' parts."""
    found: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return found


@with_both_apis
@ranks(3)
def test_gradients_in_bfloat16_are_sent_as_if_they_were_widened_first(api: str) -> None:
    precision = MixedPrecision(torch.bfloat16, torch.float32)
    model = shard(api, build(), INT8, mixed_precision=precision)
    block = next(module for module in model.modules() if isinstance(module, Block))
    units = [w._unit for w in FullyShardedDataParallel.fsdp_modules(model) if w.module is block]
    unit = units[0] if api == "wrapper" else block._fullshard_module_unit.unit  # type: ignore
    handle = next(handle for handle in unit.handles if handle.reduced_in is not None)
    torch.manual_seed(dist.get_rank())
    shapes = [slot.shape for slot in handle.layout.slots]
    gradients: list[Any] = [torch.randn(shape).bfloat16().to(device()) for shape in shapes]
    gradients[0] = None if dist.get_rank() == 0 else gradients[0]
    # As a backend other than gloo has it.
    group = Group(dist.new_group(), device().type)
    sums = []
    for dtype in (torch.float32, torch.bfloat16):
        staged = stage(handle, gradients, dtype=dtype)
        total, wait = start_encoded_reduce(
            handle, staged.flat, staged.absent, group, "unit", mean=False, keeps_dtype=False
        )
        wait()
        staged.release()
        sums.append(total)

    assert torch.equal(*sums)
    assert sums[1].dtype is torch.float32
    assert staging_dtype(handle, gradients, group) is torch.bfloat16
    kept = [gradient.float() for gradient in gradients[1:]]
    assert staging_dtype(handle, kept, group) is torch.float32


@ranks(4)
def test_copies_of_shards_agree_and_absent_gradients_are_known_to_all() -> None:
    model: Any = build()
    for block in model:
        block.uses_skipped = dist.get_rank() == 3
    mesh = dist.device_mesh.init_device_mesh(device().type, (2, 2))
    strategy = ShardingStrategy.HYBRID_SHARD
    model = shard("wrapper", model, INT8, sharding_strategy=strategy, device_mesh=mesh)

    loss_of(model).backward()
    found = gradients_of(model)

    # Only the fourth rank used it, on the third and fourth ranks' copy.
    assert all(gradient is not None for gradient in found.values())
    for gradient in found.values():
        others: list[Any] = [None] * 4
        dist.all_gather_object(others, gradient)
        assert all(torch.equal(other, others[0]) for other in others)


@with_both_apis
@ranks(2)
def test_frozen_tied_and_checkpointed_parameters_go_with_encoding(api: str) -> None:
    from torch.utils.checkpoint import checkpoint

    def made() -> Any:
        model: Any = build()
        model[1].up.weight.requires_grad_(False)
        model[2].skipped.weight = model[2].skipped.weight
        inner = model[0].forward
        model[0].forward = lambda x: checkpoint(inner, x, use_reentrant=False)
        return model

    each = step_alone(made(), 2)
    model = shard(api, made(), INT8)

    loss_of(model).backward()
    found = gradients_of(model)

    assert [name for name, g in found.items() if g is None] == ["1.up.weight"]
    for name, gradient in found.items():
        if gradient is not None:
            mean = (each[0][name] + each[1][name]) / 2
            assert (gradient - mean).norm() < 0.03 * mean.norm(), name


@ranks(2)
def test_a_run_may_change_what_it_sends_at_a_checkpoint() -> None:
    states: list[Any] = []
    expected: dict[str, torch.Tensor] = {}
    for options in (INT8, None, Communication(torch.float8_e4m3fn, torch.bfloat16, min_numel=0)):
        model = shard("wrapper", build(), options)
        with FullyShardedDataParallel.state_dict_type(
            model, fullshard.StateDictType.SHARDED_STATE_DICT
        ):
            if states:
                model.load_state_dict(states[-1])
            else:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                loss_of(model).backward()
                optimizer.step()
            states.append(model.state_dict())
        found = parameters_of(model)
        expected = expected or found
        for name, parameter in found.items():
            assert torch.equal(parameter, expected[name]), name


@ranks(2)
def test_full_precision_is_not_encoded() -> None:
    expected = build()
    os.environ["FSDP_USE_FULL_PREC_IN_EVAL"] = "1"
    try:
        model = shard("wrapper", build(), INT8)
    finally:
        del os.environ["FSDP_USE_FULL_PREC_IN_EVAL"]
    model.eval()

    with torch.no_grad():
        found, exact = loss_of(model), loss_of(expected)

    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-6)


@ranks(2)
def test_changes_to_encoded_parameters_between_forward_and_backward_are_refused() -> None:
    model = shard("wrapper", build(), INT8, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    loss_of(model)
    with torch.no_grad():
        model.module[0].module.up.weight.add_(1.0)

    with pytest.raises(AssertionError, match="encoded parameters: the change would lose precision"):
        loss_of(model)


@ranks(2)
def test_offloaded_shards_are_encoded_on_their_way() -> None:
    each = step_alone(build(), 2)
    model = shard("wrapper", build(), INT8, cpu_offload=CPUOffload(True))

    loss_of(model).backward()
    found = gradients_of(model)

    for name, gradient in found.items():
        assert gradient is not None
        mean = ((each[0][name] + each[1][name]) / 2).to(gradient.device)
        assert (gradient.view_as(mean) - mean).norm() < 0.03 * mean.norm(), name


@with_both_apis
@ranks(2)
def test_parameters_without_elements_are_not_encoded(api: str) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 3)).to(device())
    x = torch.ones(2, 4, device=device())
    if api == "wrapper":
        policy = ModuleWrapPolicy({nn.Linear})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=True, communication=INT8
        )
    else:
        for each in (*model, model):
            fullshard.fully_shard(each, communication=INT8)

    model(x).sum().backward()
    found = gradients_of(model)

    assert found["1.bias"] is not None
    assert found["1.bias"].tolist() == [2.0] * 3


@with_both_apis
@ranks(2)
def test_small_parameters_vectors_and_integers_are_sent_as_they_are(api: str) -> None:
    model: Any = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 63))
    model[0].scale = nn.Parameter(torch.ones(2, 64, dtype=torch.long), requires_grad=False)
    large = nn.Parameter(torch.ones(8192, dtype=torch.long).view(64, 128), requires_grad=False)
    model[0].integers = large
    model = model.to(device())
    communication = Communication(torch.int8, torch.int8, min_numel=4096)

    if api == "wrapper":
        model = FullyShardedDataParallel(model, use_orig_params=True, communication=communication)
        unit = model._unit
    else:
        unit = fullshard.fully_shard(model, communication=communication)._fullshard_module_unit.unit

    groups = {
        tuple(slot.name for slot in handle.layout.slots): handle.reduced_in is not None
        for handle in unit.handles
    }
    assert groups == {
        ("0.weight",): True,
        ("0.bias", "1.weight", "1.bias", "2.weight", "2.bias"): False,
        ("0.scale", "0.integers"): False,
    }


def _bytes_of_a_step(
    communication: Communication | None, precision: MixedPrecision, api: str
) -> int:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 128), nn.Tanh(), nn.Linear(128, 256)) for _ in range(4)]
    model: Any = nn.Sequential(*layers).to(device())
    if api == "wrapper":
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=lambda module, recurse, nonwrapped_numel: recurse or module in layers,
            use_orig_params=True,
            mixed_precision=precision,
            # So that all units are all-gathered twice, also on a host.
            backward_prefetch=None,
            communication=communication,
        )
    else:
        dtypes = precision.param_dtype, precision.reduce_dtype
        policy = fullshard.MixedPrecisionPolicy(*dtypes)
        for each in (*layers, model):
            fullshard.fully_shard(
                each, mp_policy=policy, reshard_after_forward=True, communication=communication
            )
    inputs = torch.randn(2, 256, device=device())
    model(inputs).square().sum().backward()
    with counted_bytes() as received:
        model(inputs).square().sum().backward()
    return received.total


def _compare_bytes(api: str) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    plain = _bytes_of_a_step(None, precision, api)

    gather = _bytes_of_a_step(Communication(torch.int8), precision, api)
    both = _bytes_of_a_step(Communication(torch.int8, torch.int8), precision, api)

    # Two bytes, or one and four for a block of 256; biases, a 170th of all, have their two bytes.
    encoded = 1 + 4 / 256
    # Of four units, a host keeps the two with which backward begins, if it prefetches there.
    gathers = 1.5 if api == "fully_shard" and device().type == "cpu" else 2.0
    bytes_of_all = 2 * gathers + 2
    assert gather / plain == pytest.approx((encoded * gathers + 2) / bytes_of_all, rel=1e-2)
    assert both / plain == pytest.approx(encoded * (gathers + 1) / bytes_of_all, rel=1e-2)
    assert both / plain <= 0.52
    if gathers == 2:
        assert gather / plain <= 0.68


@ranks(2)
def test_encoded_steps_send_fewer_bytes_on_two_ranks() -> None:
    _compare_bytes("wrapper")


@with_both_apis
@ranks(4)
def test_encoded_steps_send_fewer_bytes_on_four_ranks(api: str) -> None:
    _compare_bytes(api)


@with_both_apis
@ranks(2)
def test_a_trace_has_what_is_sent_encoded(api: str) -> None:
    nbytes: dict[Any, dict[str, int]] = {}
    for options in (None, INT8):
        model = shard(api, build(), options)
        loss_of(model).backward()
        with fullshard.trace(model) as trace:
            loss_of(model).backward()
        found = nbytes.setdefault(options, {})
        for record in trace.data.ranks[0].records:
            found[record.what] = found.get(record.what, 0) + record.nbytes

    for what in ("all-gather", "reduce-scatter"):
        # A byte and a 64th of four, of a vector's numbers all four.
        assert 0.25 < nbytes[INT8][what] / nbytes[None][what] < 0.4, what


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"all_gather_dtype": torch.float16}, "all_gather_dtype expects None or one of torch.int8"),
        ({"reduce_dtype": torch.float32}, "reduce_dtype expects None or one of torch.int8"),
        ({"block_size": 8}, "block_size expects a whole number from 16, but got 8"),
        ({"min_numel": True}, "min_numel expects a whole number from 0, but got True"),
        ({"secondary_shards": -1}, "secondary_shards expects True, False or the number"),
        ({"secondary_shards": "host"}, "secondary_shards expects True, False or the number"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Communication(**options)


@ranks(2)
def test_what_does_not_go_together_is_refused_before_anything_changes() -> None:
    def refused(match: str, **options: Any) -> None:
        model = build()
        with pytest.raises((ValueError, TypeError), match=match):
            FullyShardedDataParallel(model, **options)
        assert sum(p.numel() for p in model.parameters()) == sum(
            p.numel() for p in build().parameters()
        )

    refused("need use_orig_params=True", communication=INT8)
    no_shard = {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True}
    refused("is for sharded parameters", communication=INT8, **no_shard)
    refused("expects a fullshard.Communication", communication="int8", use_orig_params=True)
    kept = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True}
    refused("for strategies that reshard", communication=Communication(secondary_shards=2), **kept)
    refused(
        "a number of ranks that divides the 2 ranks",
        communication=Communication(secondary_shards=3),
        use_orig_params=True,
    )


@ranks(2)
def test_collectives_of_the_users_own_are_refused_beside_encoded_ones() -> None:
    model = shard("fully_shard", build(), INT8)

    for call in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
        with pytest.raises(NotImplementedError, match="Leave one of them out"):
            call(object())
    with pytest.raises(TypeError, match=r"expects a fullshard\.Communication, but got 'int8'"):
        fullshard.fully_shard(build(), communication="int8")  # type: ignore[arg-type]
