"""LoRA adapters of PEFT inside a frozen Llama, sharded in two ways, and compared unsharded.

    fullshard run --ranks 2 examples/clients/peft_lora.py

With ``use_orig_params=True``, each layer is a unit with frozen and trainable parameters. PEFT's own
policy makes the adapters units instead, and works without original parameters.
"""

import warnings

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.utils.other import fsdp_auto_wrap_policy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers_train import llama, train_bare, train_sharded


def with_adapters() -> nn.Module:
    base = llama()  # sets the seed
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def shard(model: nn.Module, way: str) -> FSDP:
    if way == "layers":
        policy = ModuleWrapPolicy({LlamaDecoderLayer})
        return FSDP(model, auto_wrap_policy=policy, use_orig_params=True)
    return FSDP(model, auto_wrap_policy=fsdp_auto_wrap_policy(model))


def compare(way: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Train both; returns their losses, after checking that the adapters learned the same."""
    bare = with_adapters().to(device)
    before = {name: value.clone() for name, value in get_peft_model_state_dict(bare).items()}
    sharded = shard(with_adapters().to(device), way)
    losses = train_bare(bare, device), train_sharded(sharded, device)
    with FSDP.state_dict_type(sharded, StateDictType.FULL_STATE_DICT):
        learned = sharded.state_dict()
    # PEFT looks names up in a model: the bare one has those of the state dict.
    adapters = get_peft_model_state_dict(bare, state_dict=learned)
    expected = get_peft_model_state_dict(bare)
    torch.testing.assert_close(adapters, expected, rtol=1e-4, atol=1e-5)
    assert not any(torch.equal(before[name], expected[name]) for name in before)
    return losses


def main() -> None:
    warnings.filterwarnings("ignore", message=".*both parameters with requires_grad.*")
    dist.init_process_group("gloo")
    for way in ("layers", "PEFT's policy"):
        losses = torch.stack(compare(way, torch.device("cpu")), dim=1)
        for step, (bare, sharded) in enumerate(losses):
            if dist.get_rank() == 0:
                print(f"{way:14} step {step}  bare {bare:.5f}  {FSDP.__module__} {sharded:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
