"""Models and optimizers for the tests of whole tensors, and the unsharded run they are compared to.

The reference is the unwrapped model with the unmodified optimizers. It is given, bit for bit, the
gradients that the sharded model has, so that nothing but the optimizer is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from tests.original.training import Block, Net, blocks_policy, build, loss_of, sharded
from torch import nn

import fullshard
from fullshard import FullyShardedDataParallel as FSDP
from fullshard import ShardingStrategy
from fullshard.engine.params.locations import clean_tensor_name
from fullshard.optim import WholeOptimizer
from fullshard.wrap import is_unit

#: Makes an optimizer of parameters.
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Shampoo(torch.optim.Optimizer):
    """A small one: preconditions matrices from both sides; steps everything else as SGD does."""

    def __init__(self, params: Any, lr: float = 0.02, epsilon: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "epsilon": epsilon})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"], group["epsilon"])

    def _step(self, parameter: Any, lr: float, epsilon: float) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        update = gradient
        if gradient.dim() == 2:
            rows, columns = gradient.shape
            if not state:
                state["step"] = 0
                state["left"] = epsilon * torch.eye(rows, device=gradient.device)
                state["right"] = epsilon * torch.eye(columns, device=gradient.device)
            state["step"] += 1
            state["left"] += gradient @ gradient.T
            state["right"] += gradient.T @ gradient
            update = _power(state["left"]) @ gradient @ _power(state["right"])
        parameter.sub_(update, alpha=lr)


def _power(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix to the power of minus a quarter."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=1e-6).pow(-0.25) @ vectors.T


class WideNet(Net):
    """With matrices of more than 4096 elements: torchao quantizes no smaller ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, 64), nn.Linear(64, 3)
        self.blocks = nn.ModuleList(Block(64) for _ in range(2))


class Counting(torch.optim.SGD):
    """Counts its steps itself, in an attribute and in its groups, and steps by the count."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            assert group["count"] == self.count
            group["lr"] = 0.1 / self.count
        super().step()


def muon(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=0.02)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw8bit(parameters: Any) -> torch.optim.Optimizer:
    import bitsandbytes

    # The least size that is quantized: tests have few elements.
    return bitsandbytes.optim.AdamW8bit(parameters, lr=0.01, min_8bit_size=16)


def adamw8bit_of_torchao(parameters: Any) -> torch.optim.Optimizer:
    import torchao.optim

    return torchao.optim.AdamW8bit(parameters, lr=0.01, block_size=16)


def everything(name: str, parameter: torch.Tensor) -> bool:
    """Choose all parameters."""
    return True


def is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
    """What is chosen by default of ``Net``."""
    return parameter.dim() == 2 and name.startswith("blocks.")


def wrapped(bare: nn.Module | None = None, how: Any = ShardingStrategy.FULL_SHARD, **options: Any):
    """A sharded ``Net``, with a unit for each block; or another model."""
    options = {"auto_wrap_policy": blocks_policy(), **options}
    return sharded(bare or build(Net), sharding_strategy=how, use_orig_params=True, **options)


def whole(make: Make, model: nn.Module, rest: Make | None = adamw, **options: Any):
    return fullshard.optim.whole(make, model, rest, **options)


def full_values(model: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Copies of all parameters and gradients, unsharded, by their names."""
    found = {}
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model, with_grads=True):
            for name, parameter in model.named_parameters():
                found[clean_tensor_name(name)] = _copies(parameter, parameter.grad)
        return found
    for module in reversed(list(filter(is_unit, model.modules()))):
        module.reshard()  # type: ignore[attr-defined]
    for name, parameter in model.named_parameters():
        found[name] = _copies(_full(parameter), _full(parameter.grad))
    return found


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies of all gradients, unsharded."""
    if isinstance(model, FSDP):
        return {name: gradient for name, (_, gradient) in full_values(model).items()}
    return {name: _full(parameter.grad) for name, parameter in model.named_parameters()}


def _full(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _copies(value: Any, gradient: Any) -> Any:
    return value.detach().clone(), None if gradient is None else gradient.detach().clone()


class Reference:
    """An unwrapped copy that steps with the gradients of the sharded model; on the first rank."""

    def __init__(self, model: nn.Module, bare: nn.Module, *optimizers: torch.optim.Optimizer):
        self.model, self.bare, self.optimizers = model, bare, optimizers
        self.parameters = dict(bare.named_parameters())
        #: Which parameters are stepped on another device than the sharded model's are.
        self.elsewhere: Callable[[str], bool] = lambda name: False

    def take_gradients(self) -> None:
        found = full_gradients(self.model)
        if dist.get_rank() == 0:
            for name, gradient in found.items():
                self.parameters[name].grad = gradient

    def step(self) -> None:
        for optimizer in self.optimizers if dist.get_rank() == 0 else ():
            optimizer.step()

    def assert_same(self, what: str = "") -> None:
        """Every bit of every parameter; two devices may round differently."""
        found = full_values(self.model)
        assert found.keys() == self.parameters.keys()
        for name, (value, _) in found.items() if dist.get_rank() == 0 else ():
            expected = self.parameters[name].detach()
            if self.elsewhere(name):
                torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
                continue
            assert torch.equal(value, expected), (what, name, (value - expected).abs().max())


def reference(
    model: nn.Module,
    make: Make,
    rest: Make | None = adamw,
    select: Callable[[str, torch.Tensor], bool] = is_hidden_matrix,
    bare: nn.Module | None = None,
) -> Reference:
    """The same optimizers, unmodified, of the unwrapped model."""
    bare = bare or build(Net)
    chosen = [p for n, p in bare.named_parameters() if p.requires_grad and select(n, p)]
    others = [p for n, p in bare.named_parameters() if p.requires_grad and not select(n, p)]
    optimizers = [make(chosen)]
    if others:
        assert rest is not None
        optimizers.append(rest(others))
    return Reference(model, bare, *optimizers)


def train(
    model: nn.Module,
    optimizer: WholeOptimizer,
    expected: Reference,
    steps: range,
    loss: Callable[[nn.Module, int], torch.Tensor] = loss_of,
) -> None:
    """Train both, and compare them after the first steps, every 20th and the last one."""
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        expected.take_gradients()
        optimizer.step()
        expected.step()
        if step < 3 or step % 20 == 0 or step == steps[-1]:
            expected.assert_same(f"after step {step}")
