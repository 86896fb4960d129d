"""transformers' Trainer with FSDP 2 on fullshard: training, a checkpoint, and going on from it.

    fullshard run --ranks 2 examples/clients/trainer_fully_shard.py

accelerate takes FSDP into account only where it finds a GPU; on a CPU it is told to do so.
"""

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers_train import batch, llama

STEPS = 4


class Sequences(torch.utils.data.Dataset):
    """The sequences of :func:`batch`, one after another; every rank gets one of a step's."""

    def __len__(self) -> int:
        return STEPS * dist.get_world_size()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        found = batch(*divmod(index, dist.get_world_size()), torch.device("cpu"))
        return {name: value[0] for name, value in found.items()}


class HostTrainer(Trainer):
    """A Trainer that shards on a CPU as it does on a GPU."""

    def create_accelerator_and_postprocess(self) -> None:
        """Have accelerate shard; it would average the gradients of whole models otherwise."""
        super().create_accelerator_and_postprocess()
        if self.accelerator.distributed_type is not DistributedType.FSDP:
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            for state in (PartialState(), self.accelerator.state):
                state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = plugin
        self.is_fsdp_enabled = True

    def get_train_sampler(self, *_: Any) -> Any:
        """In order."""
        return torch.utils.data.SequentialSampler(self.train_dataset)

    _get_train_sampler = get_train_sampler


class Losses(TrainerCallback):
    """Keeps the losses that the Trainer logs, by step."""

    def __init__(self) -> None:
        self.found: dict[int, float] = {}
        self.norms: dict[int, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Called by the Trainer after every step."""
        if logs and "loss" in logs:
            self.found[state.global_step] = float(logs["loss"])
            self.norms[state.global_step] = float(logs["grad_norm"])


def arguments(folder: str) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        fsdp=True,
        fsdp_config={
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
            "activation_checkpointing": True,
        },
        per_device_train_batch_size=1,
        max_steps=STEPS,
        save_steps=STEPS // 2,
        logging_steps=1,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        adam_epsilon=1e-4,
        weight_decay=0.01,
        max_grad_norm=1.0,
        report_to=[],
        disable_tqdm=True,
    )


def train(folder: str, checkpoint: str | None = None) -> Losses:
    losses = Losses()
    trainer = HostTrainer(llama(), arguments(folder), train_dataset=Sequences(), callbacks=[losses])
    trainer.train(resume_from_checkpoint=checkpoint)
    assert isinstance(trainer.model_wrapped, FSDPModule)
    trainer.accelerator.free_memory()
    return losses


def main() -> None:
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        (folder,) = folders
        losses = train(folder)
        half = STEPS // 2
        resumed = train(folder, f"{folder}/checkpoint-{half}")
        dist.barrier()
    later = {step: loss for step, loss in losses.found.items() if step > half}
    assert list(resumed.found) == list(later), (resumed.found, later)
    for step, loss in later.items():
        assert abs(resumed.found[step] - loss) < 1e-4, (resumed.found, later)
    if dist.get_rank() == 0:
        print("losses", [round(loss, 6) for loss in losses.found.values()], "and on from half")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
