"""Model and optimizer state, saved in the middle of training and loaded by a new model.

Each of the ways that programs written for torch's wrapper use; torch's names only.
"""

import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def build(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    model = FSDP(
        nn.Sequential(*layers),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=bool(seed % 2),
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)


def train(model: FSDP, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.rand(4, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    for seed in (0, 1):
        model, optimizer = build(seed)
        train(model, optimizer, 0, 3)
        saved_model, saved_optimizer = get_state_dict(model, optimizer)
        dcp.save(
            {"model": saved_model, "optimizer": saved_optimizer},
            checkpoint_id=f"{folder}/sharded{seed}",
        )
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            full = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        expected = torch.tensor(train(model, optimizer, 3, 6))

        model, optimizer = build(seed + 2)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=f"{folder}/sharded{seed}")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        torch.testing.assert_close(torch.tensor(train(model, optimizer, 3, 6)), expected)

        model, optimizer = build(seed + 2)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            model.load_state_dict(full[0])
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, full[1]))
        torch.testing.assert_close(torch.tensor(train(model, optimizer, 3, 6)), expected)
    dist.destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore", FutureWarning)
    main(sys.argv[1])
