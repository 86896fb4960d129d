"""A training loop in torchtitan's manner, written for torch's ``fully_shard`` alone.

    fullshard run --ranks 2 examples/clients/fully_shard_train.py

The model is made on the meta device, each block is compiled and sharded over a mesh of
data-parallel and tensor-parallel ranks, and ``torch.distributed.checkpoint`` writes checkpoints.
"""

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, TOKENS, BLOCKS, STEPS = 32, 64, 3, 4


class Block(nn.Module):
    """A norm and two linear layers around an activation, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Predicts the next token from the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    @torch.no_grad()
    def init_weights(self) -> None:
        """The same values for any number of ranks: a function of the position alone."""
        for index, parameter in enumerate(self.parameters()):
            shape = parameter.shape
            positions = torch.arange(shape.numel(), device=parameter.device)
            values = torch.sin(positions * 0.37 + index).view(shape) * 0.1
            if isinstance(parameter, DTensor):
                from torch.distributed.tensor import distribute_tensor

                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.copy_(distribute_tensor(values, mesh, placements))
            else:
                parameter.copy_(values)


def parallelize(model: Model, mesh: DeviceMesh, backend: str) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.blocks:
        if mesh["tp"].size() > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        block.compile(backend=backend, fullgraph=True)
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


def batch(step: int, position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + position)
    return torch.randint(TOKENS, (4, 9), generator=generator)


def loss_of(model: nn.Module, step: int, position: int) -> torch.Tensor:
    sequences = batch(step, position).to(next(model.parameters()).device)
    tokens, targets = sequences[:, :-1], sequences[:, 1:]
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def device_type() -> str:
    """Where the process group's ranks compute."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def train(
    tensor_parallel: int = 1, backend: str = "aot_eager", max_norm: float = 1.0
) -> torch.Tensor:
    """The losses of a training that is saved and loaded in the middle."""
    shape = (dist.get_world_size() // tensor_parallel, tensor_parallel)
    mesh = init_device_mesh(device_type(), shape, mesh_dim_names=("dp", "tp"))
    model, optimizer = make(mesh, backend)
    losses: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        for step in range(STEPS):
            if step == STEPS // 2:
                save(model, optimizer, folders[0])
                model, optimizer = make(mesh, backend)
                load(model, optimizer, folders[0])
            losses.append(train_step(model, optimizer, step, mesh, max_norm))
        dist.barrier()
    return torch.stack(losses).cpu()


def make(mesh: DeviceMesh, backend: str) -> tuple[Any, torch.optim.Optimizer]:
    with torch.device("meta"):
        model: Any = Model()
    parallelize(model, mesh, backend)
    model.to_empty(device=mesh.device_type)
    model.init_weights()
    assert isinstance(model, FSDPModule)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True)


def train_step(
    model: Any, optimizer: Any, step: int, mesh: DeviceMesh, max_norm: float
) -> torch.Tensor:
    loss = loss_of(model, step, mesh["dp"].get_local_rank())
    loss.backward()
    if max_norm < float("inf"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=mesh["dp"].get_group())
    return mean / mesh["dp"].size()


def save(model: Any, optimizer: Any, folder: str) -> None:
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder)


def load(model: Any, optimizer: Any, folder: str) -> None:
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )


def train_bare(data_parallel: int, max_norm: float = 1.0) -> torch.Tensor:
    """The same training in one process, which computes every rank's loss."""
    model = Model()
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    losses = []
    for step in range(STEPS):
        parts = [loss_of(model, step, position) for position in range(data_parallel)]
        loss = torch.stack(parts).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def main() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    # Torch's own fully_shard does not clip gradients of which some are tensor-parallel.
    for tensor_parallel, max_norm in ((1, 1.0), (2, float("inf"))):
        losses = train(tensor_parallel, max_norm=max_norm)
        bare = train_bare(dist.get_world_size() // tensor_parallel, max_norm)
        torch.testing.assert_close(losses, bare, rtol=1e-4, atol=1e-4)
        if dist.get_rank() == 0:
            print("losses", [round(loss, 6) for loss in losses.tolist()], "as the bare model's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
