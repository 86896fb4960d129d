"""Encoded reduces of ranks on several hosts whose backend does not look at hosts by itself.

For backends such as NCCL; gloo's are in ``across_hosts.py``. The ranks of a host first add up what
they have, as it is, with a reduce-scatter among themselves; then ranks of the same position on all
hosts send each other these sums, encoded. So between two hosts there is one message for each rank,
and what is sent is encoded once, however many ranks a host has.
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
        """The two levels of ``group``, whose ranks all ask for them; None if it has one level only.

        That is if its ranks are on one host, each on one of its own, or not one host after another
        with equally many on each.
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
