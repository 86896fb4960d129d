"""Models constructed on the meta device: values, sharing, broadcasts, memory, and what is refused.

Expected values come from the same modules constructed on a real device from the same seed, or
from rank 0's own copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine.memory import watched_memory
from tests.original.training import Net, blocks_policy, build, compare_models, full_parameters
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

with_both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


def to_empty(module: nn.Module) -> None:
    """What people pass who load rank 0's values by ``sync_module_states``."""
    module.to_empty(device=device(), recurse=False)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


class Normed(nn.Module):
    """Linears, a batch norm and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


class Table(nn.Module):
    """A buffer that its own ``reset_parameters`` fills."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("table", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table


class Tied(nn.Module):
    """A weight that two units, and a module outside of both, share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.third = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.third.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).tanh()))


@with_both_modes
@ranks(2)
def test_rank_0_on_the_host_and_the_others_on_meta_end_up_with_rank_0s_values(
    use_orig_params: bool,
) -> None:
    torch.manual_seed(dist.get_rank())
    values = Normed()
    values.norm.running_mean.fill_(dist.get_rank() + 2.0)
    expected = [{name: value.clone() for name, value in values.state_dict().items()}]
    dist.broadcast_object_list(expected)

    model = FSDP(
        values if dist.get_rank() == 0 else on_meta(Normed),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=device(),
        param_init_fn=None if dist.get_rank() == 0 else to_empty,
        sync_module_states=True,
        use_orig_params=use_orig_params,
    )

    found = model.state_dict()
    assert list(found) == list(expected[0])
    for name, value in expected[0].items():
        assert torch.equal(found[name].cpu(), value), name
        assert found[name].device == device(), name
    bare = Normed()
    bare.load_state_dict(expected[0])
    compare_models(bare.to(device()), model)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "NO_SHARD"])
@ranks(2)
def test_values_reach_copies_and_unsharded_ranks_too(strategy: str) -> None:
    torch.manual_seed(dist.get_rank())
    bare = Net()
    expected = [copy.deepcopy(bare.state_dict())]
    dist.broadcast_object_list(expected)
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    groups = {"process_group": (alone, dist.group.WORLD)} if strategy == "HYBRID_SHARD" else {}

    model = FSDP(
        bare if dist.get_rank() == 0 else on_meta(Net),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=blocks_policy(),
        device_id=device(),
        param_init_fn=to_empty,
        sync_module_states=True,
        **groups,
    )

    for name, value in full_parameters(model).items():
        assert torch.equal(value.cpu(), expected[0][name]), name


@with_both_modes
@ranks(2)
def test_reset_parameters_fills_parameters_and_buffers_and_the_model_trains(
    use_orig_params: bool,
) -> None:
    model = FSDP(
        on_meta(Table),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=device(),
        sync_module_states=True,
        use_orig_params=use_orig_params,
    )

    assert torch.equal(model.table, torch.arange(3.0, device=device()))
    bare = build(Table)
    bare.load_state_dict(model.state_dict())
    compare_models(bare, model)


@pytest.mark.parametrize("classes", [{nn.Linear}, {nn.Tanh}], ids=["own units", "one unit"])
@with_both_modes
@ranks(2)
def test_shared_parameters_stay_shared(use_orig_params: bool, classes: set[type]) -> None:
    bare = on_meta(Tied)
    weight = bare.first.weight
    weight.decay = False

    model = FSDP(
        bare,
        auto_wrap_policy=ModuleWrapPolicy(classes),
        device_id=device(),
        sync_module_states=True,
        use_orig_params=use_orig_params,
    )

    with FSDP.summon_full_params(model):
        assert model.first.weight is model.second.weight is model.third.weight
    names = ["first.weight", "first.bias", "second.bias"]
    assert sorted(full_parameters(model)) == sorted(names)
    if use_orig_params:
        assert any(parameter is weight for parameter in model.parameters())
        assert weight.decay is False
    reference = build(Tied)
    reference.load_state_dict(model.state_dict())
    compare_models(reference, model)


@ranks(2)
def test_an_optimizer_built_on_meta_parameters_stays_valid() -> None:
    bare = on_meta(Normed)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    model = FSDP(
        bare,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=device(),
        sync_module_states=True,
        use_orig_params=True,
    )
    reference = build(Normed)
    reference.load_state_dict(model.state_dict())

    compare_models(
        reference,
        model,
        optimizer=lambda m: optimizer if m is model else torch.optim.SGD(m.parameters(), lr=0.1),
    )


WIDTH, LAYERS = 640, 6
UNIT = 4 * WIDTH * (WIDTH + 1)
SMALL = UNIT // 2


@pytest.mark.parametrize("by_broadcast", [False, True])
@with_both_modes
@ranks(4)
def test_no_more_than_one_unit_is_whole_at_a_time(
    use_orig_params: bool, by_broadcast: bool
) -> None:
    def construct() -> FSDP:
        layers = on_meta(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
        return FSDP(
            layers,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=device(),
            param_init_fn=to_empty if by_broadcast else None,
            sync_module_states=by_broadcast,
            use_orig_params=use_orig_params,
        )

    construct()
    with watched_memory() as memory:
        model = construct()

    shards = LAYERS * UNIT // 4
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(shards / 4, abs=LAYERS)
    assert memory.left <= shards + SMALL
    # A thread of gloo's may hold on for a moment to what it has just broadcast.
    assert memory.peak <= shards + (2 if by_broadcast else 1) * UNIT + SMALL


class Helpless(nn.Module):
    """Parameters that nothing but its constructor fills."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class HoldsHelpless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.inner = nn.ModuleDict({"part": Helpless()})


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({Helpless})], ids=["whole", "parts"])
@ranks(2)
def test_modules_without_a_way_to_be_initialised_are_named_before_anything_changes(
    policy: Any,
) -> None:
    module = on_meta(HoldsHelpless)

    with pytest.raises(RuntimeError, match=r"'inner.part' \(Helpless\) has parameters or buffers"):
        FSDP(module, auto_wrap_policy=policy)

    assert type(module.inner["part"]) is Helpless
    assert module.linear.weight.is_meta


class HelplessBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(3, device="meta"))


@ranks(2)
def test_a_buffer_alone_on_meta_is_noticed() -> None:
    module = HelplessBuffer().to_empty(device="cpu").to(device())
    module.table = module.table.to("meta")

    with pytest.raises(RuntimeError, match=r"'\(root\)' \(HelplessBuffer\) has parameters or buf"):
        FSDP(module)


@ranks(2)
def test_a_function_that_leaves_parameters_on_meta_is_refused_with_their_places() -> None:
    def forgetful(module: nn.Module) -> None:
        if not isinstance(module, Helpless):
            to_empty(module)

    with pytest.raises(RuntimeError, match=r"'inner.part' \(Helpless\) .* after param_init_fn"):
        FSDP(on_meta(HoldsHelpless), param_init_fn=forgetful)


@ranks(2)
def test_a_function_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected 3 to be callable"):
        FSDP(on_meta(Net), param_init_fn=3)


@ranks(2)
def test_a_function_is_called_once_per_module_that_has_something_to_initialise() -> None:
    seen: list[str] = []

    def record(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        to_empty(module)
        module.reset_parameters()

    model = FSDP(
        on_meta(Normed), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), param_init_fn=record
    )

    assert sorted(seen) == ["BatchNorm1d", "Linear", "Linear"]
    assert torch.equal(model.norm.running_var, torch.ones(4, device=model.norm.running_var.device))


@ranks(2)
def test_ignored_modules_stay_on_meta() -> None:
    bare = on_meta(Normed)

    model = FSDP(bare, ignored_modules=[bare.second], device_id=device(), use_orig_params=True)

    assert bare.second.weight.is_meta
    assert all(p.device == device() for n, p in model.named_parameters() if "second" not in n)


@ranks(2)
def test_the_first_rank_overwrites_buffers_of_every_dtype_and_expanded_ones() -> None:
    dtypes = (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.complex64)

    def with_buffers(value: int) -> nn.Module:
        module = nn.Linear(3, 3)
        for dtype in dtypes:
            module.register_buffer(str(dtype)[6:], torch.full((2, 3), value).to(dtype))
        module.register_buffer("expanded", torch.full((4,), value).expand(3, 4))
        module.register_buffer("none_of_them", torch.empty(0))
        return module.to(device())

    model = FSDP(with_buffers(dist.get_rank()), sync_module_states=True)
    expected = dict(with_buffers(0).named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, expected[name])
