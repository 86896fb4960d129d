"""Train a small model on two ranks, on the CPU. Run it with: python examples/train_two_ranks.py

Each rank holds half of every parameter, gradient and optimizer state, and sees its own half of
every batch.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

from fullshard import FullyShardedDataParallel as FSDP

WORLD_SIZE = 2
STEPS = 60


def build_model() -> nn.Module:
    torch.manual_seed(0)  # the same initial parameters on every rank
    hidden = [FSDP(nn.Sequential(nn.Linear(32, 32), nn.ReLU())) for _ in range(3)]
    return FSDP(nn.Sequential(nn.Linear(8, 32), *hidden, nn.Linear(32, 1)))


def train(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD_SIZE)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(rank)  # other data on every rank

    for step in range(1, STEPS + 1):
        inputs = torch.rand(64, 8, generator=data)
        targets = inputs.sum(dim=1, keepdim=True)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{folder}/rendezvous"
        processes.spawn(train, args=(rendezvous,), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    main()
