"""The speed of a machine: compute, memory, network, and the cost of an operation on it.

An operation takes as long as its arithmetic and its memory traffic together, since hardly any
kernel overlaps both completely: a roofline with a round corner. The H200 and the CPU were fitted to
steps that were measured (``docs/trace.md`` says which); the other presets have the same part of
what their makers' sheets say.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..problems import BadInput

__all__ = ["MACHINES", "Machine", "machine_named", "machine_of", "rate_of"]


@dataclass(frozen=True)
class Machine:
    """The speed of one rank's device and of its network, as far as steps reach it.

    ``flops`` in the compute dtype, ``float32_flops`` in float32; rates are per second. ``network``
    is the bandwidth at which a rank receives. ``per_operation`` and ``per_unit`` are seconds that
    the host needs to give out an operation, and a unit's part of a step; on a host that computes
    itself they are added.
    """

    name: str
    flops: float
    float32_flops: float
    memory: float
    network: float
    latency: float = 20e-6
    per_kernel: float = 2e-6
    per_operation: float = 0.0
    per_unit: float = 0.0
    #: The part of a collective's time that is taken from compute, where the same cores do both.
    takes_compute: float = 0.0
    #: The bandwidth between device and host, and of the host's memory for one rank (offload).
    host_link: float = 25e9
    host_memory: float = 20e9

    def seconds_of(self, function: Any, args: Any, kwargs: Any, result: Any) -> float:
        """The time of an operation."""
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not outputs or _is_view(outputs, inputs):
            return 0.0
        moved = sum(tensor.nbytes for tensor in (*inputs, *outputs)) / self.memory
        formula = flop_registry.get(function.overloadpacket)
        if formula is None:
            return max(moved, self.per_kernel)
        flops = formula(*args, **kwargs, out_val=result)
        rate = self.float32_flops if outputs[0].dtype is torch.float32 else self.flops
        return max(flops / rate + moved, self.per_kernel)

    def collective(self, nbytes: float, ranks: int) -> float:
        """The time of an all-gather or reduce-scatter of ``nbytes`` in total."""
        if ranks == 1:
            return 0.0
        return self.latency + nbytes * (ranks - 1) / ranks / self.network

    def traffic(self, nbytes: float) -> float:
        """The time to read or write ``nbytes`` of the device's memory."""
        return nbytes / self.memory


def _is_view(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> bool:
    held = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in held for tensor in outputs) and not any(
        tensor._version for tensor in outputs
    )


_TERA, _GIGA = 1e12, 1e9

#: What the host of the H200 needed: 14.7 µs for each operation of the unwrapped models, and 0.75 ms
#: for each of fullshard's units and steps.
_HOST: dict[str, float] = {"per_operation": 14.5e-6, "per_unit": 0.75e-3}

MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h200", 840 * _TERA, 50 * _TERA, 3600 * _GIGA, 400 * _GIGA, **_HOST),
        Machine("h100", 840 * _TERA, 50 * _TERA, 2500 * _GIGA, 400 * _GIGA, **_HOST),
        Machine("b200", 1900 * _TERA, 65 * _TERA, 6000 * _GIGA, 800 * _GIGA, **_HOST),
        Machine("a100", 265 * _TERA, 16 * _TERA, 1500 * _GIGA, 250 * _GIGA, **_HOST),
        Machine("cpu", 72 * _GIGA, 72 * _GIGA, 14 * _GIGA, 2 * _GIGA, takes_compute=0.6),
    )
}


def machine_named(name: str, flops: str | None = None, bandwidth: str | None = None) -> Machine:
    """A preset, with another speed of compute (``300T``) or of the network (``50G``), if given."""
    known = MACHINES.get(name.lower())
    if known is None:
        raise BadInput(f"machine expects one of {', '.join(MACHINES)}, but got {name!r}")
    if flops is not None:
        rate = rate_of("flops", flops)
        factor = rate / known.flops
        known = dataclasses.replace(known, flops=rate, float32_flops=known.float32_flops * factor)
    if bandwidth is not None:
        known = dataclasses.replace(known, network=rate_of("bandwidth", bandwidth))
    return known


def machine_of(device: torch.device) -> Machine | None:
    """The preset for a device of this machine; None if there is none."""
    if device.type == "cpu":
        cores = torch.get_num_threads()
        core = MACHINES["cpu"]
        rate = cores * core.flops
        return dataclasses.replace(core, flops=rate, float32_flops=rate)
    name = torch.get_device_module(device).get_device_name(device).lower()
    return next((machine for preset, machine in MACHINES.items() if preset in name), None)


_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(?:b|flops)?(?:/s)?", re.ASCII | re.IGNORECASE)


def rate_of(option: str, text: str) -> float:
    """A number per second, such as 400G or 50GB/s.

    >>> rate_of("bandwidth", "50GB/s")
    50000000000.0
    """
    found = _RATE.fullmatch(text.strip())
    if found is None or not math.isfinite(rate := float(found[1])) or not rate:
        raise BadInput(f"{option} expects a rate per second, such as 400G, but got {text!r}")
    return rate * 1000.0 ** " kmgtp".index(found[2].lower() or " ")
