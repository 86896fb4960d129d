"""Lightning's FSDP strategy on fullshard: training, a checkpoint, and resuming from it.

    fullshard run --ranks 1 examples/clients/lightning_train.py          # one rank per GPU
    fullshard run --ranks 2 examples/clients/lightning_train.py --cpu    # or without a GPU

Lightning rejects its FSDP strategy without a GPU, but not a subclass of it.
"""

import argparse
import tempfile

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import DataLoader, TensorDataset


class AnywhereStrategy(FSDPStrategy):
    """A subclass of the strategy, which Lightning accepts without a GPU."""


class Block(nn.Module):
    """An MLP with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Regression(lightning.LightningModule):
    """Learns the sum of its inputs, and records the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(16, 1)
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (inputs,) = batch
        targets = inputs.sum(dim=1, keepdim=True)
        loss = nn.functional.mse_loss(self.head(self.blocks(inputs)), targets)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data() -> DataLoader:
    inputs = torch.rand(512, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs), batch_size=16)


def trainer(cpu: bool, steps: int, folder: str, state: str) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu" if cpu else "gpu",
        devices=dist.get_world_size() if dist.is_initialized() else "auto",
        strategy=AnywhereStrategy(
            auto_wrap_policy={Block},
            activation_checkpointing_policy={Block},
            state_dict_type=state,
        ),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def train(cpu: bool, folder: str, state: str) -> tuple[lightning.Trainer, Regression]:
    lightning.seed_everything(0, verbose=False)
    model = Regression()
    first = trainer(cpu, 40, folder, state)
    first.fit(model, data())
    wrapper = first.strategy.model
    assert isinstance(wrapper, FSDP)
    assert len(FSDP.fsdp_modules(wrapper)) == 4
    return first, model


def go_on(first: lightning.Trainer, cpu: bool, folder: str, state: str) -> Regression:
    path = f"{folder}/checkpoint"
    first.save_checkpoint(path)
    model = Regression()
    trainer(cpu, 60, folder, state).fit(model, data(), ckpt_path=path)
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--state", default="sharded", choices=["sharded", "full"])
    given = parser.parse_args()
    dist.init_process_group("gloo" if given.cpu else "nccl")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    first, model = train(given.cpu, folder[0], given.state)
    print(f"{FSDP.__module__}: loss {model.losses[0]:.4f}, then {model.losses[-1]:.4f}")
    other = go_on(first, given.cpu, folder[0], given.state)
    print(f"after a checkpoint: loss {other.losses[0]:.4f}, then {other.losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
