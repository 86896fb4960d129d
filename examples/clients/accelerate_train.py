"""Hugging Face accelerate's FSDP plugin on fullshard: training, clipping, saving and loading.

    fullshard run --ranks 1 examples/clients/accelerate_train.py          # one rank per GPU
    fullshard run --ranks 2 examples/clients/accelerate_train.py --cpu    # or without a GPU

accelerate uses FSDP only if it finds a GPU; ``--cpu`` makes it use FSDP on a CPU.
"""

import argparse
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType, broadcast_object_list
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers_train import batch, llama, train_bare

STEPS = 4


def make_accelerator(cpu: bool, precision: str, state_dict_type: str) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type=state_dict_type,
        activation_checkpointing=True,
        use_orig_params=True,  # the optimizer may be created before the model is wrapped
    )
    accelerator = Accelerator(cpu=cpu, fsdp_plugin=plugin, mixed_precision=precision)
    if accelerator.distributed_type is not DistributedType.FSDP:
        for state in (PartialState(), accelerator.state):
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        if precision != "no":
            plugin.set_mixed_precision(precision)
    return accelerator


def train(accelerator: Accelerator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = llama().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert isinstance(model, FSDP)
    assert len(FSDP.fsdp_modules(model)) == 3
    losses = [step(accelerator, model, optimizer, number) for number in range(STEPS)]
    save_and_load(accelerator, model, optimizer)
    return accelerator.reduce(torch.stack(losses), "mean").cpu()


def step(accelerator: Accelerator, model: FSDP, optimizer: Any, number: int) -> torch.Tensor:
    loss = model(**batch(number, accelerator.process_index, accelerator.device)).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().float()


def save_and_load(accelerator: Accelerator, model: FSDP, optimizer: Any) -> None:
    """Save model and optimizer, train, load them, train again, and expect the same losses."""
    folder = broadcast_object_list([tempfile.mkdtemp()])[0]
    accelerator.save_state(folder)
    expected = [step(accelerator, model, optimizer, number) for number in (50, 51, 52)]
    accelerator.load_state(folder)
    again = [step(accelerator, model, optimizer, number) for number in (50, 51, 52)]
    torch.testing.assert_close(again, expected)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--precision", default="no", choices=["no", "bf16", "fp16"])
    parser.add_argument("--state", default="SHARDED_STATE_DICT")
    given = parser.parse_args()
    accelerator = make_accelerator(given.cpu, given.precision, given.state)
    sharded = train(accelerator)
    bare = train_bare(llama().to(accelerator.device), accelerator.device)
    accelerator.print(f"bare           {bare.tolist()}")
    accelerator.print(f"{FSDP.__module__} {sharded.tolist()}")
    if given.precision == "no":
        torch.testing.assert_close(sharded, bare, rtol=1e-4, atol=1e-4)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
