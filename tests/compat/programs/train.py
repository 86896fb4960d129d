"""A program as people write them for torch's wrapper: torch's names only, no word of fullshard.

Run by ``tests/compat/test_programs.py`` on two CPU ranks. It compares itself with DDP.
"""

import copy
import functools
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.head = nn.Linear(16, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(31, (4, 7), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(model: nn.Module, clip) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, batch(2 * step)).backward()
        loss = loss_of(model, batch(2 * step + 1))
        loss.backward()
        norms.append(float(clip(0.5)))
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor([losses, norms])


def sharded(bare: nn.Module, **options) -> FSDP:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return FSDP(
        bare,
        auto_wrap_policy=policy,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        sync_module_states=True,
        **options,
    )


def save_and_load(model: FSDP, options: dict) -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    expected = loss_of(model, batch(99)).item()

    # Sharded, through torch.distributed.checkpoint, in the two ways that programs do it.
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0] + "/sharded")
    other = sharded(Model(), **options)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=folder[0] + "/sharded")
    set_model_state_dict(other, state["model"])
    assert loss_of(other, batch(99)).item() == expected

    other = sharded(Model(), **options)
    with FSDP.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder[0] + "/sharded")
        other.load_state_dict(state["model"])
    assert loss_of(other, batch(99)).item() == expected

    # Full, on rank 0 alone, loaded into a bare model and back.
    full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, folder[0] + "/full.pt")
    else:
        assert not state
    dist.barrier()
    bare = Model()
    bare.load_state_dict(torch.load(folder[0] + "/full.pt"))
    assert abs(loss_of(bare, batch(99)).item() - expected) < 1e-6
    options_full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    other = sharded(Model(), **options)
    set_model_state_dict(other, bare.state_dict(), options=options_full)
    assert loss_of(other, batch(99)).item() == expected


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    bare = Model()
    reference = DDP(copy.deepcopy(bare))
    expected = train(reference, lambda norm: nn.utils.clip_grad_norm_(reference.parameters(), norm))
    for options in (
        {},
        {"use_orig_params": True, "forward_prefetch": True},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"sharding_strategy": ShardingStrategy.NO_SHARD},
    ):
        model = sharded(copy.deepcopy(bare), **options)
        torch.testing.assert_close(train(model, model.clip_grad_norm_), expected)
        with FSDP.summon_full_params(model):
            for (_, ours), theirs in zip(
                model.named_parameters(), reference.parameters(), strict=True
            ):
                torch.testing.assert_close(ours, theirs)
        if "sharding_strategy" not in options:
            save_and_load(model, options)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(f"{FSDP.__module__} {os.environ['WORLD_SIZE']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    main()
