"""Encoded reduces across several hosts, for backends that do not treat hosts differently.

These are backends such as NCCL; for gloo see ``across_hosts.py``. The ranks of a host first add up
their parts, unencoded, by a reduce-scatter among themselves; then ranks of the same position on all
hosts exchange these sums, encoded. So there is one message per rank between two hosts, and each
number is encoded once, however many ranks a host has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..encoding.encodings import Encoding
from .collectives import Group, group_for
from .hosts import hosts_of
from .process_groups import group_among


class TwoLevels:
    """The ranks of this host, ``inside``, and those of this position on all hosts, ``across``."""

    @classmethod
    def of(cls, group: Any, device: torch.device) -> TwoLevels | None:
        """The two levels of ``group``; None if it has only one. All its ranks call this.

        A group has one level if its ranks are on one host, or each on a host of its own, or not one
        host after another with equally many ranks on each.
        """
        if not isinstance(group, dist.ProcessGroup):
            return None
        size, per_host = group.size(), hosts_of(group).ranks_per_host
        if per_host in (None, 1, size):
            return None
        ranks = dist.get_process_group_ranks(group)
        inside = [ranks[first : first + per_host] for first in range(0, size, per_host)]
        across = [ranks[position::per_host] for position in range(per_host)]
        groups = (
            group_among(inside, group, "reduces inside hosts"),
            group_among(across, group, "reduces across hosts"),
        )
        return cls(*(group_for(each, device) for each in groups))

    def __init__(self, inside: Group, across: Group) -> None:
        self.inside = inside
        self.across = across

    def start_encoded_reduce(
        self,
        output: torch.Tensor,
        full: torch.Tensor,
        present: torch.Tensor,
        encoding: Encoding,
        unit: str,
    ) -> Callable[[], torch.Tensor]:
        """As that of :class:`Group`, level by level."""
        hosts, neighbours = self.across.size, self.inside.size
        numel, count = output.numel(), present.numel()
        # What a neighbour adds up: the parts of all ranks of its position, and the flags, which are
        # added up with them.
        staged = output.new_empty(neighbours, hosts * numel + count)
        by_position = full.view(hosts, neighbours, numel).transpose(0, 1)
        staged[:, : hosts * numel].unflatten(1, (hosts, numel)).copy_(by_position)
        staged[:, hosts * numel :].copy_(present)
        sums = output.new_empty(staged.shape[1])
        self.inside.reduce_scatter(sums, staged.view(-1), unit)
        on_host = (sums[hosts * numel :] > 0).to(torch.uint8)
        parts = sums[: hosts * numel]
        return self.across.start_encoded_reduce(output, parts, on_host, encoding, unit)
