"""Collectives over gloo that cross the network between hosts once, where ranks share hosts.

Each works in two levels: between hosts, every byte goes from one rank to one rank (see ``Hosts``
for which); inside a host, that rank and its neighbours exchange it. Between two hosts of two ranks
each, the collectives of one level send twice as much.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..encoding.encodings import Encoding
from .encoded_exchange import EncodedParts
from .hosts import Hosts, hosts_of
from .messages import own_alias
from .pending_work import PendingWork

#: Up to how many bytes an exchange of copies costs less than a broadcast for each piece.
_SMALL = 256 * 1024


class AcrossHosts:
    """A process group whose ranks are spread over hosts. All tensors are flat and of real numbers.

    ``inside`` connects the ranks of this host. ``wait`` waits for works as the group does, so that
    a rank that does something else is noticed.
    """

    @classmethod
    def of(cls, group: Any, wait: Callable[..., None]) -> AcrossHosts | None:
        """The collectives of ``group`` across hosts, or None where no ranks share one of several.

        Its ranks all call this, before the first of these collectives.
        """
        known = _connected.get(group)
        if known is None:
            hosts = hosts_of(group)
            inside = _connect(group, hosts) if hosts.spread else None
            known = _connected[group] = hosts, inside
        hosts, inside = known
        return None if inside is None else cls(group, hosts, inside, wait)

    def __init__(self, group: Any, hosts: Hosts, inside: Any, wait: Callable[..., None]) -> None:
        self._group = group
        self._wait = wait
        self._rank: int = group.rank()
        self._size: int = group.size()
        self._hosts = hosts
        self._relays = hosts.relays(self._rank)
        self._neighbours = hosts.neighbours(self._rank)
        self._position = self._neighbours.index(self._rank)
        #: Of each neighbour: the ranks whose pieces it has, its own first, after the first level.
        self._held = [[n, *hosts.relayed(n)] for n in self._neighbours]
        self._inside = inside
        self._from_each = [_from(position) for position in range(len(self._neighbours))]

    # -- all-gather -----------------------------------------------------------------------------

    def gather(self, output: torch.Tensor, piece: torch.Tensor) -> PendingWork:
        """Start filling ``output`` with all ranks' pieces; neighbours share when it is waited for.

        So hosts exchange while the caller computes. The ranks of a host have to wait for their
        all-gathers, and start what else is here, in the same order: neighbours wait for each other.
        """
        rows = output.view(self._size, piece.numel())
        sent = piece.repeat(len(self._relays)) if len(self._relays) > 1 else piece
        relayed = self._held[self._position][1:]
        received = piece.new_empty(len(relayed) * piece.numel())
        of, to = (dict.fromkeys(them, piece.numel()) for them in (relayed, self._relays))
        pending = self._exchange(received, sent, of, to)
        if rows[self._rank].data_ptr() != piece.data_ptr():
            rows[self._rank].copy_(piece)
        pending.and_then(functools.partial(self._share, rows, received, relayed))
        return pending

    def _share(self, rows: torch.Tensor, received: torch.Tensor, relayed: Sequence[int]) -> None:
        """Exchange the rows that ranks received from other hosts among the ranks of this host."""
        for row, part in zip(relayed, received.view(len(relayed), rows.shape[1]), strict=True):
            rows[row].copy_(part)
        if len(self._neighbours) == 1:
            return
        if rows.nbytes <= _SMALL:
            self._swap_rows(rows)
        else:
            self._broadcast_rows(rows)

    def _swap_rows(self, rows: torch.Tensor) -> None:
        width = rows.shape[1]
        mine = torch.cat([rows[row] for row in self._held[self._position]])
        others = len(self._neighbours) - 1
        sent = mine.repeat(others) if others > 1 else mine
        theirs = [*self._held[: self._position], [], *self._held[self._position + 1 :]]
        of = [width * len(held) for held in theirs]
        to = [mine.numel()] * len(theirs)
        to[self._position] = 0
        received = mine.new_empty(sum(of))
        self._wait(_exchange(self._inside, received, sent, of, to))
        gathered = [row for held in theirs for row in held]
        for row, part in zip(gathered, received.view(len(gathered), width), strict=True):
            rows[row].copy_(part)

    def _broadcast_rows(self, rows: torch.Tensor) -> None:
        started = []
        for held, options in zip(self._held, self._from_each, strict=True):
            for row in held:
                part = rows[row]
                started.append(PendingWork(self._inside.broadcast([part], options), [part]))
                del part
        self._wait(*started)

    # -- reduce-scatter -------------------------------------------------------------------------

    def exchange_parts(self, full: torch.Tensor) -> tuple[PendingWork, Sequence[torch.Tensor]]:
        """Add up inside hosts, and start sending the sums between them.

        Returns the tensors whose sum is this rank's part when the work is complete.
        """
        width = full.numel() // self._size
        mine = self._held[self._position]
        sums = self._sum_inside(full.view(self._size, width)).view(len(mine), width)
        received = full.new_empty(len(self._relays) * width)
        sent = sums.view(-1)[width:]
        of, to = dict.fromkeys(self._relays, width), dict.fromkeys(mine[1:], width)
        pending = self._exchange(received, sent, of, to)
        return pending, (sums[0], *received.view(len(self._relays), width).unbind())

    def _sum_inside(
        self,
        parts: torch.Tensor,
        beside: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """The sums, over this host's ranks, of the parts for which this rank is the relay, its own
        first.

        ``beside`` are numbers that follow each part. Sums are in ``dtype``, if it is given.
        """
        count = len(self._neighbours)
        order = [row for held in self._held for row in held]
        after = () if beside is None else (beside,)
        sent = torch.cat([part for row in order for part in (parts[row], *after)])
        if count == 1:
            return sent if dtype is None else sent.to(dtype)
        width = parts.shape[1] + sum(each.numel() for each in after)
        to = [width * len(held) for held in self._held]
        own = to[self._position]
        received = sent.new_empty(own * count)
        self._wait(_exchange(self._inside, received, sent, [own] * count, to))
        first, *others = received.view(count, own).unbind()
        first = first if dtype is None else first.to(dtype)
        for other in others:
            first.add_(other)
        return first

    def start_encoded_reduce(
        self,
        output: torch.Tensor,
        full: torch.Tensor,
        present: torch.Tensor,
        encoding: Encoding,
    ) -> Callable[[], torch.Tensor]:
        """Add up inside hosts, as they are, and start sending the sums between them, encoded.

        Ends as :meth:`Group.start_encoded_reduce` does.
        """
        width = full.numel() // self._size
        mine = self._held[self._position]
        # Each part is followed by a number for each parameter; these are added up as well.
        flags = present.to(full.dtype)
        sums = self._sum_inside(full.view(self._size, width), flags, output.dtype)
        sums = sums.view(len(mine), width + flags.numel())
        present = (sums[0, width:] > 0).to(torch.uint8)
        parts = EncodedParts(encoding, width, present)
        sent, received = parts.empty(len(mine) - 1), parts.empty(len(self._relays))
        parts.encode(sums[1:, :width], sent)
        of = dict.fromkeys(self._relays, parts.width)
        to = dict.fromkeys(mine[1:], parts.width)
        pending = self._exchange(received.view(-1), sent.view(-1), of, to)
        return functools.partial(
            self._add_parts, pending, parts, received, sums[0, :width], output, present
        )

    def _add_parts(
        self,
        pending: PendingWork,
        parts: EncodedParts,
        received: torch.Tensor,
        own: torch.Tensor,
        output: torch.Tensor,
        present: torch.Tensor,
    ) -> torch.Tensor:
        self._wait(pending)
        return parts.add(received, own, output, present)

    # -- the rest -------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Start summing ``tensor`` in place: a reduce-scatter and an all-gather."""
        width = -(-tensor.numel() // self._size)
        padded = tensor.new_zeros(width * self._size)
        padded[: tensor.numel()].copy_(tensor)
        pending, parts = self.exchange_parts(padded)
        return functools.partial(self._finish_all_reduce, pending, parts, padded, tensor)

    def _finish_all_reduce(
        self,
        pending: PendingWork,
        parts: Sequence[torch.Tensor],
        padded: torch.Tensor,
        tensor: torch.Tensor,
    ) -> None:
        self._wait(pending)
        own = padded.view(self._size, -1)[self._rank]
        add_up(parts, own)
        self._wait(self.gather(padded, own.clone()))
        tensor.copy_(padded[: tensor.numel()])

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite ``tensor`` with that of the first rank."""
        relays = self._hosts.relays(0) if self._rank == 0 else ()
        sent = tensor.repeat(len(relays)) if relays else tensor.new_empty(0)
        of_first = {0: tensor.numel()} if self._rank in self._hosts.relays(0) else {}
        received = tensor if of_first else tensor.new_empty(0)
        self._wait(self._exchange(received, sent, of_first, dict.fromkeys(relays, tensor.numel())))
        root = self._hosts.relay(0, self._hosts.of_ranks[self._rank])
        if len(self._neighbours) > 1:
            options = self._from_each[self._neighbours.index(root)]
            self._wait(PendingWork(self._inside.broadcast([tensor], options), [tensor]))

    def _exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: dict[int, int],
        sent_sizes: dict[int, int],
    ) -> PendingWork:
        """Start an all-to-all between hosts; the sizes are numbers of elements by rank."""
        of = [received_sizes.get(rank, 0) for rank in range(self._size)]
        to = [sent_sizes.get(rank, 0) for rank in range(self._size)]
        return _exchange(self._group, received, sent, of, to)


def _exchange(
    channel: Any, received: torch.Tensor, sent: torch.Tensor, of: list[int], to: list[int]
) -> PendingWork:
    """Start an all-to-all that receives ``of[r]`` elements from rank r and sends it ``to[r]``."""
    received, sent = own_alias(received), own_alias(sent)
    return PendingWork(channel.alltoall_base(received, sent, of, to), [received, sent])


def add_up(parts: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    """Write the sum of two or more tensors to ``output``, which may be one of them."""
    torch.add(parts[0], parts[1], out=output)
    for part in parts[2:]:
        output.add_(part)


def _from(rank: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


#: The hosts of a group's ranks and the connections of those on this one. A group is connected once,
#: since the addresses of the first time stay in its store.
_connected: weakref.WeakKeyDictionary[Any, tuple[Hosts, Any]] = weakref.WeakKeyDictionary()


def _connect(group: Any, hosts: Hosts) -> Any:
    """Connect the ranks of this host by gloo, without registering a process group with torch."""
    _, store = dist.distributed_c10d._world.pg_map[group]
    neighbours = hosts.neighbours(group.rank())
    timeout = group._get_backend(group._device_types[0]).options._timeout
    name = f"fullshard/inside/{neighbours[0]}"
    position = neighbours.index(group.rank())
    return dist.ProcessGroupGloo(dist.PrefixStore(name, store), position, len(neighbours), timeout)
