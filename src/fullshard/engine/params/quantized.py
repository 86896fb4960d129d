"""Weights that bitsandbytes has quantised to 4 bits (``Params4bit``) or 8 (``Int8Params``).

Does not import bitsandbytes: if the program has not, there are no such weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .packed import Packing, plain

#: The attribute of a ``Linear4bit`` that lets it put its weight in another order for evaluation.
_REPACKS = "support_avx512bf16_for_cpu"
#: Has a module replace its parameters when it loads; new ones would have no scales.
_ASSIGN = "assign_to_params_buffers"


@dataclasses.dataclass(frozen=True, eq=False)
class Quantized(Packing):
    """A weight whose elements are a tensor of its own, and whose scales are attributes of it."""

    kind: type[nn.Parameter]
    attributes: tuple[str, ...]

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Quantized:
        """The packing of a quantised weight."""
        return cls(type(parameter), tuple(vars(parameter)))

    def names(self) -> Sequence[str]:
        return self.attributes

    def assemble(self, packed: torch.Tensor, kept: Any) -> Any:
        made: Any = torch.Tensor._make_subclass(self.kind, plain(packed), False)
        known = vars(kept)
        vars(made).update({name: known[name] for name in self.attributes if name in known})
        return made

    def pack(self, value: torch.Tensor) -> torch.Tensor:
        return plain(value) if isinstance(value, self.kind) else value


class Quantized4bit(Quantized):
    """A ``Params4bit``: its ``quant_state`` has the scales, and all copies of it are one object."""

    def tensors(self, kept: Any) -> list[torch.Tensor]:
        state = kept.quant_state
        found = [state.absmax, state.code]
        if state.nested:
            found += [state.offset, state.state2.absmax, state.state2.code]
        return found

    def aliases(self, kept: Any) -> Mapping[str, Any]:
        return _aliases(kept.quant_state)

    def assemble(self, packed: torch.Tensor, kept: Any) -> Any:
        if kept.quant_state.absmax.device != packed.device:
            # On the host, while the unit computes elsewhere: a state of its own.
            kept = _Elsewhere(vars(kept), packed.device)
        return super().assemble(packed, kept)

    def move(self, kept: Any, device: torch.device) -> None:
        if kept.quant_state.absmax.device != device:
            kept.quant_state.to(device)

    def adopt(self, kept: Any, new: Any) -> None:
        state = getattr(new, "quant_state", None)
        if state is not None and state is not kept.quant_state:
            replace_state(kept.quant_state, state)
            new.quant_state = kept.quant_state


class _Elsewhere:
    """The attributes of a weight, with its ``quant_state`` copied to another device."""

    def __init__(self, attributes: dict[str, Any], device: torch.device) -> None:
        vars(self).update(attributes)
        state = attributes["quant_state"]
        self.quant_state: Any = type(state).from_dict(state.as_dict(packed=True), device)


class Quantized8bit(Quantized):
    """An ``Int8Params``: ``CB`` is its elements, of which users hold a part, and ``SCB`` scales."""

    def tensors(self, kept: Any) -> list[torch.Tensor]:
        return [kept.SCB]

    def assemble(self, packed: torch.Tensor, kept: Any) -> Any:
        made = super().assemble(packed, kept)
        made.CB = plain(packed)
        made.SCB = kept.SCB.to(packed.device)
        return made

    def move(self, kept: Any, device: torch.device) -> None:
        kept.SCB = kept.SCB.to(device)

    def adopt(self, kept: Any, new: Any) -> None:
        scales = getattr(new, "SCB", None)
        if scales is not None and scales is not kept.SCB:
            kept.SCB.copy_(scales)


def _module() -> Any:
    return sys.modules.get("bitsandbytes")


def is_quantized(parameter: Any) -> bool:
    """True if a parameter is of a class of bitsandbytes, quantised or about to be."""
    module = _module()
    kinds = () if module is None else (module.nn.Params4bit, module.nn.Int8Params)
    return isinstance(parameter, kinds)


def packing_of(parameter: Any) -> Packing:
    """The packing of a weight of bitsandbytes; raises ValueError if it is not quantised."""
    if parameter.is_meta:
        raise ValueError("it is on the meta device: load the quantised model on every rank")
    if isinstance(parameter, _module().nn.Int8Params):
        return _packing_of_8_bits(parameter)
    if not parameter.bnb_quantized or parameter.quant_state is None:
        raise ValueError(
            "it is not quantised yet: call model.to(device), which quantises it, before wrapping"
        )
    if vars(parameter.quant_state).get("packing_format_for_cpu", False):
        raise ValueError(
            "an evaluation on this processor has put it in another order, for which its scales "
            "were rounded: shard the model before its first evaluation"
        )
    return Quantized4bit.of(parameter)


def _packing_of_8_bits(parameter: Any) -> Packing:
    if parameter.has_fp16_weights:
        raise ValueError(
            "it has has_fp16_weights=True, so that it is quantised anew in each forward: make its "
            "Linear8bitLt with has_fp16_weights=False, or use nn.Linear"
        )
    if parameter.dtype != torch.int8:
        raise ValueError(
            "it is not quantised yet: call model.to(device), which quantises it, before wrapping"
        )
    return Quantized8bit.of(parameter)


# -- when a unit is built -------------------------------------------------------------------------


def settle_module(module: Any, name: str) -> None:
    """Prepare a module for a weight that is sharded under ``name``."""
    parameter = module._parameters[name]
    if isinstance(parameter, _module().nn.Int8Params):
        _take_back_scales(module, parameter)
        parameter.CB = None
        _hook_once(module, _drop_format)
    else:
        if hasattr(module, _REPACKS):
            # It would replace the full weight by memory of its own, in which nothing is gathered.
            setattr(module, _REPACKS, False)
        _hook_once(module, _load_states)


def _hook_once(module: nn.Module, hook: Callable[..., None]) -> None:
    if not _has_hook(module, hook):
        module.register_load_state_dict_pre_hook(hook)


def _has_hook(module: nn.Module, hook: Callable[..., None]) -> bool:
    known = module._load_state_dict_pre_hooks.values()
    return any(getattr(each, "hook", each) is hook for each in known)


@contextlib.contextmanager
def loading_states(model: nn.Module) -> Iterator[None]:
    """A context in which modules outside of units load the ``quant_state`` of their weights, too.

    bitsandbytes' own only save it.
    """
    hooks = [
        module.register_load_state_dict_pre_hook(_load_states)
        for module in model.modules()
        if any(getattr(p, "quant_state", None) is not None for p in module._parameters.values())
        and not _has_hook(module, _load_states)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def settle_bias(module: Any, path: str, param_dtype: torch.dtype | None) -> None:
    """Convert a bias, for good, to the dtype that its module casts it to; ValueError if it cannot
    be.
    """
    bias = module._parameters.get("bias")
    if bias is None:
        return
    compute = getattr(module, "compute_dtype", None)
    if compute is not None and param_dtype not in (None, compute):
        raise ValueError(
            f"The {type(module).__name__} at {path!r} computes in {compute}, to which it casts its "
            f"bias, and mixed precision has the bias in {param_dtype}: make the two the same "
            "(bnb_4bit_compute_dtype, param_dtype)"
        )
    if compute is not None and bias.dtype != compute:
        # As its first forward would do.
        bias.data = bias.data.to(compute)
    module.register_forward_pre_hook(_refuse_to_cast_bias)


def _take_back_scales(module: Any, parameter: Any) -> None:
    """Give the weight its scales back, which its first forward has moved to the module."""
    state = getattr(module, "state", None)
    if parameter.SCB is None and state is not None:
        parameter.SCB = state.SCB
    if state is not None:
        state.CB = state.SCB = None
    if parameter.SCB is None:
        raise ValueError(
            f"The 8-bit weight of a {type(module).__name__} has no scales (SCB), neither as an "
            "attribute nor in the module's state. Quantise it anew (model.to(device))"
        )


def _refuse_to_cast_bias(module: Any, inputs: Any) -> None:
    """Refuse a forward that would replace the full bias by a cast one, for good."""
    bias, given = module.bias, inputs[0] if inputs else None
    compute = getattr(module, "compute_dtype", None) or getattr(given, "dtype", bias.dtype)
    if bias.dtype != compute:
        raise RuntimeError(
            f"A {type(module).__name__} with a bias in {bias.dtype} computes in {compute}, and "
            "would replace the bias by a cast copy, which is not updated with the sharded one. "
            f"Convert the bias to {compute} (mixed_precision's param_dtype, or bias.to before "
            "wrapping), or let the module compute in its dtype (bnb_4bit_compute_dtype)"
        )


def _aliases(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a ``QuantState`` by their names in state dicts."""
    found = {"absmax": state.absmax, "quant_map": state.code}
    if state.nested:
        found |= {"nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code}
    return found


def replace_state(old: Any, new: Any) -> None:
    """Copy the content of one ``QuantState`` into another, which several objects hold."""
    vars(old).clear()
    vars(old).update(vars(new))


def _load_states(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Load the ``quant_state`` of a module's weights, which bitsandbytes only saves."""
    local_metadata.pop(_ASSIGN, None)
    for name, parameter in module._parameters.items():
        state = getattr(parameter, "quant_state", None)
        if state is None:
            continue
        start = f"{prefix}{name}."
        keys = [key for key in state_dict if key.startswith(start)]
        found = {key[len(start) :]: _whole(state_dict.pop(key)) for key in keys}
        if not found:
            if prefix + name in state_dict:
                # The old scales would be applied to other elements.
                missing.append(f"{start}quant_state")
            continue
        try:
            new = type(state).from_dict(found, state.absmax.device)
        except (AssertionError, KeyError, ValueError) as error:
            reason = str(error) or f"its entries are {', '.join(found)}"
            errors.append(f"cannot load the quant_state of {prefix}{name}: {reason}")
            continue
        if tuple(new.shape) != tuple(state.shape):
            errors.append(
                f"size mismatch for {prefix}{name}: its quant_state is of a weight of shape "
                f"{tuple(new.shape)}, and the one in the current model of {tuple(state.shape)}."
            )
            continue
        replace_state(state, new)
        own = vars(parameter)
        own.update({alias: value for alias, value in _aliases(state).items() if alias in own})


def _drop_format(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any
) -> None:
    """Remove the entry about an 8-bit weight's order from local state dicts, as from all others.

    bitsandbytes does this if there is a weight under its own name.
    """
    local_metadata.pop(_ASSIGN, None)
    if f"{prefix}weight" not in state_dict:
        state_dict.pop(f"{prefix}weight_format", None)


def _whole(value: Any) -> Any:
    """A copy, for the state dict's tensors not to become the model's."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
