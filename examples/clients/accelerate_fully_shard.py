"""Hugging Face accelerate with ``fsdp_version=2`` on fullshard: training, saving and loading.

    fullshard run --ranks 2 examples/clients/accelerate_fully_shard.py

accelerate takes FSDP into account only where it finds a GPU; on a CPU it is told to do so.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, broadcast_object_list
from torch.distributed.fsdp import FSDPModule
from transformers_train import batch, llama

STEPS = 4


def make_accelerator(cpu: bool) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
        activation_checkpointing=True,
    )
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=plugin)
    if accelerator.distributed_type is not DistributedType.FSDP:
        for state in (PartialState(), accelerator.state):
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def train(accelerator: Accelerator) -> torch.Tensor:
    """The mean losses of a training that is saved and loaded in the middle."""
    model: Any = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, FSDPModule)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        (folder,) = broadcast_object_list([folder])
        for number in range(STEPS):
            if number == STEPS // 2:
                accelerator.save_state(folder)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                accelerator.load_state(folder)
            loss = model(**batch(number, accelerator.process_index, accelerator.device)).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().float())
        accelerator.wait_for_everyone()
    return accelerator.reduce(torch.stack(losses), "mean").cpu()


def train_bare(ranks: int, device: torch.device) -> torch.Tensor:
    """The same training in one process, which computes every rank's loss."""
    model: Any = llama().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for number in range(STEPS):
        parts = [model(**batch(number, rank, device)).loss for rank in range(ranks)]
        loss = torch.stack(parts).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    return torch.stack(losses).cpu()


def main() -> None:
    accelerator = make_accelerator(cpu=not torch.cuda.is_available())
    losses = train(accelerator)
    bare = train_bare(accelerator.num_processes, accelerator.device)
    torch.testing.assert_close(losses, bare, rtol=1e-4, atol=1e-4)
    accelerator.print("losses", [round(loss, 6) for loss in losses.tolist()], "as the bare model's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
