"""What users do to models and optimizers between steps, with optimizers of whole tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.engine import tensor_parallel
from tests.engine.parity import train as train_tensor_parallel
from tests.optim.training import (
    adamw,
    everything,
    full_values,
    is_hidden_matrix,
    muon,
    reference,
    sgd,
    train,
    whole,
    wrapped,
)
from tests.original.training import Block, InPlace, Net, build, inputs, loss_of, train_step
from tests.state.models import hybrid_groups
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.tensor import Shard

import fullshard
from fullshard import (
    CPUOffload,
    MixedPrecision,
    RanksDisagreeError,
    ShardedGradScaler,
    ShardingStrategy,
)
from fullshard import FullyShardedDataParallel as FSDP
from fullshard.testing import device, ranks
from fullshard.wrap import ModuleWrapPolicy

FULL_SHARD = ShardingStrategy.FULL_SHARD
EITHER = pytest.mark.parametrize("how", [FULL_SHARD, InPlace.RESHARD])


class Skipping(Block):
    """A block that may leave its linears out."""

    skipped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale if self.skipped else super().forward(x)


class SkippingNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Skipping() for _ in range(3))


def skip(model: nn.Module, *indices: int) -> None:
    for index, block in enumerate(m for m in model.modules() if isinstance(m, Skipping)):
        block.skipped = index in indices


@EITHER
@ranks(3)
def test_parameters_without_gradients_are_not_stepped_and_have_no_state(how: Any) -> None:
    policy = ModuleWrapPolicy({Skipping})
    model = wrapped(build(SkippingNet), how, auto_wrap_policy=policy)
    optimizer = whole(muon, model)
    expected = reference(model, muon, bare=build(SkippingNet))

    skip(model, 1)
    train(model, optimizer, expected, range(2))
    unused = optimizer.param_groups[0]["params"][2:4]
    assert [p for p in unused if optimizer.state[p]] == []
    # Used by one rank alone: all ranks have gradients.
    skip(model, *([1] if dist.get_rank() else []))
    train(model, optimizer, expected, range(2, 4))
    skip(model, 0)
    train(model, optimizer, expected, range(4, 6))


@EITHER
@ranks(2)
def test_gradients_that_the_user_clears_are_not_stepped(how: Any) -> None:
    model = wrapped(how=how)
    optimizer = whole(muon, model)
    expected = reference(model, muon)
    for step in range(3):
        optimizer.zero_grad()
        train_step(model, step)
        for name, parameter in model.named_parameters():
            if step == 1 and "blocks.0" in name:
                parameter.grad = None
        expected.take_gradients()
        optimizer.step()
        expected.step()
    expected.assert_same()


@EITHER
@ranks(2)
def test_frozen_parameters_are_left_out_and_those_frozen_later_stay_as_they_are(how: Any) -> None:
    def frozen() -> nn.Module:
        bare = build(Net)
        bare.blocks[1].requires_grad_(False)
        return bare

    model = wrapped(frozen(), how)
    optimizer = whole(muon, model)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 8]
    expected = reference(model, muon, bare=frozen())
    train(model, optimizer, expected, range(2))
    for network in (model, expected.bare):
        for name, parameter in network.named_parameters():
            if "blocks.0" in name:
                parameter.requires_grad_(False)
                parameter.grad = None
    train(model, optimizer, expected, range(2, 4))


class Tied(nn.Module):
    """Blocks that use one matrix twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)) for _ in range(2)
        )
        for block in self.blocks:
            block[2].weight = block[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))


@EITHER
@ranks(2)
def test_tied_matrices_are_stepped_once(how: Any) -> None:
    model = wrapped(build(Tied), how, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    optimizer = whole(muon, model)
    assert len(optimizer.param_groups[0]["params"]) == 2
    train(model, optimizer, reference(model, muon, bare=build(Tied)), range(4))


@pytest.mark.parametrize("keeps_low", [False, True])
@ranks(2)
def test_mixed_precision_steps_whole_tensors_in_full_precision(keeps_low: bool) -> None:
    precision = MixedPrecision(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.bfloat16 if keeps_low else torch.float32,
        keep_low_precision_grads=keeps_low,
    )
    model = wrapped(mixed_precision=precision)
    optimizer = whole(muon, model)
    expected = reference(model, muon)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).float().backward()
        wide = {n: (None if g is None else g.float()) for n, (_, g) in full_values(model).items()}
        for name, parameter in expected.parameters.items():
            parameter.grad = wide[name]
        if keeps_low:
            # The second optimizer steps shards with gradients in low precision itself.
            for parameter in model.parameters():
                if parameter.grad is not None and not is_whole(optimizer, parameter):
                    parameter.grad = None
            for name, parameter in expected.parameters.items():
                if not is_hidden_matrix(name, parameter):
                    parameter.grad = None
        optimizer.step()
        expected.step()
        expected.assert_same()
    for parameter in optimizer.param_groups[0]["params"]:
        for value in optimizer.state[parameter].values():
            assert value.dtype is torch.float32


def is_whole(optimizer: Any, parameter: Any) -> bool:
    return any(parameter is each for each in optimizer.param_groups[0]["params"])


@ranks(4)
def test_replicas_of_hybrid_sharding_step_alike() -> None:
    model = wrapped(how=ShardingStrategy.HYBRID_SHARD, process_group=hybrid_groups())
    optimizer = whole(muon, model)
    train(model, optimizer, reference(model, muon), range(4))
    owners = {each.owner for one in optimizer._rounds for each in one.parameters}
    assert owners == {0, 1}


@ranks(2)
def test_offloaded_parameters_are_stepped() -> None:
    model = wrapped(cpu_offload=CPUOffload(offload_params=True))
    expected = reference(model, muon)
    if device().type != "cpu":
        # AdamW steps the others where their shards are, on the host.
        expected.elsewhere = lambda name: not is_hidden_matrix(name, expected.parameters[name])
    train(model, whole(muon, model), expected, range(3))


@ranks(2)
def test_parameters_that_are_cut_along_another_dimension_are_whole() -> None:
    def even() -> nn.Sequential:
        torch.manual_seed(3)
        layers = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(4, 3))
        return layers.to(device())

    model = even()
    for layer in model:
        fullshard.fully_shard(
            layer,
            shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else None,
        )
    fullshard.fully_shard(model)
    choose = lambda name, parameter: parameter.dim() == 2  # noqa: E731
    optimizer = whole(muon, model, select=choose)
    train(model, optimizer, reference(model, muon, select=choose, bare=even()), range(4))


# -- what programs do with optimizers -------------------------------------------------------------


@EITHER
@ranks(2)
def test_learning_rate_schedulers_reach_both_optimizers(how: Any) -> None:
    model = wrapped(how=how)
    optimizer = whole(muon, model)
    expected = reference(model, muon)
    factor = lambda epoch: 0.5**epoch  # noqa: E731
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(each, factor)
        for each in (optimizer, *expected.optimizers)
    ]
    for step in range(3):
        train(model, optimizer, expected, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.02 / 8, 0.01 / 8]


@ranks(2)
def test_schedulers_that_change_momentum_work() -> None:
    model = wrapped()
    optimizer = whole(sgd, model, sgd)
    expected = reference(model, sgd, sgd)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(each, max_lr=0.2, total_steps=6)
        for each in (optimizer, *expected.optimizers)
    ]
    for step in range(4):
        train(model, optimizer, expected, range(step, step + 1))
        for scheduler in schedulers:
            scheduler.step()


@ranks(2)
def test_parameter_groups_are_made_by_name() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        slow = [p for p in parameters if "blocks.0" in p.fqn]
        fast = [p for p in parameters if "blocks.0" not in p.fqn]
        return torch.optim.Muon([{"params": fast}, {"params": slow, "lr": 0.001}], lr=0.02)

    model = wrapped()
    optimizer = whole(make, model)
    bare = build(Net)
    for name, parameter in bare.named_parameters():
        parameter.fqn = name  # type: ignore[attr-defined]
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.001, 0.01]
    train(model, optimizer, reference(model, make, bare=bare), range(3))


@ranks(2)
def test_clipped_and_accumulated_gradients_are_stepped() -> None:
    model = wrapped()
    optimizer = whole(muon, model)
    expected = reference(model, muon)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, 10 * step).backward()
        loss_of(model, 10 * step + 1).backward()
        loss_of(model, 10 * step + 2).backward()
        model.clip_grad_norm_(0.1)
        expected.take_gradients()
        optimizer.step()
        expected.step()
        expected.assert_same()


@ranks(2)
def test_gradients_that_are_not_reduced_are_refused() -> None:
    model = wrapped()
    optimizer = whole(muon, model)
    with model.no_sync():
        train_step(model, 0)
    with pytest.raises(
        RuntimeError,
        match=r"gradient of blocks\.\d\.\w+\.weight is not reduced.*inside no_sync\(\)",
    ):
        optimizer.step()


@ranks(2)
def test_a_gradient_scaler_skips_a_step_on_all_ranks() -> None:
    model = wrapped()
    optimizer = whole(muon, model)
    expected = reference(model, muon)
    scaler = ShardedGradScaler(device=device().type, init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(inputs(step)).square().mean()
        scaler.scale(loss * (torch.inf if step == 1 and dist.get_rank() == 0 else 1)).backward()
        scaler.unscale_(optimizer)
        expected.take_gradients()
        scaler.step(optimizer)
        scaler.update()
        if step != 1:
            expected.step()
        expected.assert_same()


@EITHER
@ranks(2)
def test_what_is_done_to_parameters_between_steps_is_stepped(how: Any) -> None:
    model = wrapped(how=how)
    optimizer = whole(muon, model)
    expected = reference(model, muon)
    train(model, optimizer, expected, range(1))
    with torch.no_grad():
        for network in (model, expected.bare):
            for parameter in network.parameters():
                parameter.mul_(0.5)
    train(model, optimizer, expected, range(1, 3))


@ranks(2)
def test_a_step_is_followed_by_a_forward_with_its_parameters() -> None:
    """Units that stay unsharded on a CPU notice that their parameters have changed."""
    model = wrapped(how=ShardingStrategy.SHARD_GRAD_OP)
    optimizer = whole(muon, model)
    expected = reference(model, muon)
    for step in range(3):
        train(model, optimizer, expected, range(step, step + 1))
        with torch.no_grad():
            found = model(inputs(99))
            if dist.get_rank() == 0:
                torch.testing.assert_close(found, expected.bare(inputs(99)))


@ranks(4)
def test_a_rank_has_a_quarter_of_the_state_of_even_matrices() -> None:
    def even() -> nn.Module:
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8)) for _ in range(6)]
        return nn.Sequential(*layers).to(device())

    model = FSDP(
        even(),
        auto_wrap_policy=lambda module, recurse, nonwrapped_numel: (
            recurse or (isinstance(module, nn.Sequential) and len(module) == 2)
        ),
        use_orig_params=True,
    )
    optimizer = whole(muon, model)
    model(torch.randn(4, 8, device=device())).sum().backward()
    optimizer.step()

    chosen = optimizer.param_groups[0]["params"]
    mine = sum(v.numel() for p in chosen for v in optimizer.state[p].values())
    assert mine == 12 * 8 * 24 // 4
    stand_ins = [e.stand_in for r in optimizer._rounds for e in r.parameters]
    memory = {s.data_ptr(): s.untyped_storage().nbytes() for s in stand_ins}
    assert sum(memory.values()) == 4, "all stand-ins are one element"


# -- errors ---------------------------------------------------------------------------------------


@ranks(2)
def test_what_cannot_be_stepped_is_refused() -> None:
    flat = FSDP(build(Net), use_orig_params=False)
    with pytest.raises(ValueError, match="use_orig_params=True"):
        whole(muon, flat)
    with pytest.raises(ValueError, match="Net is not sharded: wrap it"):
        whole(muon, build(Net))
    model = wrapped()
    with pytest.raises(ValueError, match=r"10 trainable parameters .*embed.weight.*Pass rest="):
        whole(muon, model, None)
    with pytest.raises(ValueError, match=r"None of the 16 trainable parameters .* select="):
        whole(muon, model, select=lambda name, parameter: False)
    with pytest.raises(ValueError, match="LBFGS computes with all parameters together"):
        whole(torch.optim.LBFGS, model)
    with pytest.raises(ValueError, match="holds 1 of the 6 parameters"):
        whole(lambda parameters: muon(parameters[:1]), model)
    with pytest.raises(TypeError, match="returned a list"):
        whole(list, model)  # type: ignore
    optimizer = whole(muon, model)
    with pytest.raises(TypeError, match="neither copied nor pickled"):
        copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match=r"fullshard\.optim\.whole"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


@ranks(4)
def test_tensor_parallel_matrices_are_refused_and_may_be_left_to_the_second_optimizer() -> None:
    mesh = tensor_parallel.mesh_of(2, 2)
    model = tensor_parallel.sharded(mesh, strategy=FULL_SHARD, use_orig_params=True)
    with pytest.raises(ValueError, match=r"Parameter \S+ is tensor-parallel.*; pass select="):
        whole(muon, model, select=everything)
    same = tensor_parallel.sharded(mesh, strategy=FULL_SHARD, use_orig_params=True)
    optimizer = whole(sgd, model, sgd, select=lambda name, parameter: name == "gain")
    for each, steps_it in ((model, optimizer), (same, sgd(same.parameters()))):
        train_tensor_parallel(each, steps_it, steps=2, rank=mesh["dp"].get_local_rank())
    for found, expected in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(found, expected)


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in "ab")
        self.lm_head = nn.Linear(8, 11, bias=False)


@pytest.mark.parametrize("units", [{nn.Sequential}, {nn.Embedding, nn.Linear}, set()])
@ranks(2)
def test_matrices_are_chosen_but_not_those_of_embeddings_and_heads(units: Any) -> None:
    model = FSDP(build(Language), auto_wrap_policy=ModuleWrapPolicy(units), use_orig_params=True)
    optimizer = whole(muon, model)
    names = [each.name for one in optimizer._rounds for each in one.parameters]
    assert sorted(names) == ["blocks.0.0.weight", "blocks.1.0.weight"]


@ranks(2)
def test_blocks_that_are_sharded_without_the_model_around_them_are_chosen() -> None:
    model = build(Language)
    for block in model.blocks:
        fullshard.fully_shard(block)
    optimizer = whole(muon, model)
    names = [each.name for one in optimizer._rounds for each in one.parameters]
    assert sorted(names) == ["blocks.0.0.weight", "blocks.1.0.weight"]
    assert len(optimizer.param_groups[1]["params"]) == 8


@ranks(2)
def test_each_of_several_wrapped_models_has_first_and_last_layers_of_its_own() -> None:
    pair = nn.ModuleDict({"left": wrapped(), "right": wrapped()})
    optimizer = whole(muon, pair)
    names = {each.name for one in optimizer._rounds for each in one.parameters}
    assert names == {
        f"{side}.blocks.{i}.{which}.weight"
        for side in ("left", "right")
        for i in range(3)
        for which in ("up", "down")
    }


@ranks(2)
def test_parameters_are_chosen_by_their_names() -> None:
    names = ["blocks.2.down.weight", "embed.weight"]
    optimizer = whole(muon, wrapped(), select=names)
    chosen = [each.name for one in optimizer._rounds for each in one.parameters]
    assert sorted(chosen) == names
    unknown = r"select= has names of no trainable .* of \S+: \['block', 'x'\]"
    with pytest.raises(ValueError, match=unknown):
        whole(muon, wrapped(), select=[*names, "x", "block"])
    with pytest.raises(ValueError, match=r"\['blocks'\]. Pass names of the unwrapped model"):
        whole(muon, wrapped(), select="blocks")


@EITHER
@ranks(2)
def test_ranks_that_choose_other_parameters_are_told_so(how: Any) -> None:
    model = wrapped(how=how, process_group=dist.new_group([0, 1]))
    others = "blocks.1" if dist.get_rank() else "blocks.2"
    optimizer = whole(muon, model, select=lambda n, p: is_hidden_matrix(n, p) and others not in n)
    train_step(model, 0)
    with pytest.raises(RanksDisagreeError, match=r"optimizer step of unit '4 whole tensors, \w+'"):
        optimizer.step()


@ranks(2)
def test_all_parameters_can_be_chosen() -> None:
    model = wrapped()
    optimizer = whole(adamw, model, None, select=everything)
    train(model, optimizer, reference(model, adamw, None, everything), range(3))
    assert optimizer.rest is None


@ranks(3)
def test_ranks_that_run_out_of_data_take_part_in_the_steps_of_others() -> None:
    model, bare = wrapped(), build(Net)
    optimizer = whole(sgd, model, sgd)
    expected = reference(model, sgd, sgd, bare=bare)
    batches = [2, 4, 3]

    def loss(network: nn.Module, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        batch = torch.randn(4, 5, generator=generator).to(device())
        return network(batch).square().mean()

    with Join([model], optimizer=optimizer):
        for step in range(batches[dist.get_rank()]):
            optimizer.zero_grad()
            loss(model, dist.get_rank(), step).backward()
            optimizer.step()

    for step in range(max(batches)):
        bare.zero_grad()
        active = [rank for rank, count in enumerate(batches) if step < count]
        (sum((loss(bare, rank, step) for rank in active), torch.zeros(())) / 3).backward()
        for each in expected.optimizers:
            each.step()
    for name, (value, _) in full_values(model).items():
        torch.testing.assert_close(value, expected.parameters[name].detach())


@ranks(2)
def test_a_closure_inside_of_join_is_refused() -> None:
    model = wrapped()
    optimizer = whole(muon, model)

    def closed() -> None:
        with Join([model], optimizer=optimizer):
            optimizer.step(lambda: train_step(model, 0))

    with pytest.raises(RuntimeError, match="got a closure inside Join"):
        closed()
