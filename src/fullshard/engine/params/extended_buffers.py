"""Full parameters of tensor subclasses that decide themselves what is all-gathered.

A subclass's ``fsdp_pre_all_gather`` returns the tensors to all-gather, of any dtypes, and its
``fsdp_post_all_gather`` makes the full parameter from the result: first as a new tensor, returned
together with the inner tensors that own its memory; later it fills these, through ``out``.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .buffers import FullBuffer, _parts_with_memory
from .tensor_parallel import Distributions, as_shown, is_distributed

#: The sets of tracked full parameters that a unit remembers.
_FOLLOWERS = 8


class _Extended:
    """One parameter: the tensors that its subclass all-gathers, and the full parameter made from
    them.
    """

    def __init__(self, arguments: tuple[Any, ...], dtype: torch.dtype, ranks: int) -> None:
        self._arguments = arguments
        self._dtype = dtype
        self._ranks = ranks
        self._metadata: Any = None
        self.sent: list[torch.Tensor] = []
        self.gathered: list[torch.Tensor] = []
        #: The full parameter, once there has been one.
        self.full: Any = None
        #: The storages that it needs, and those that it does not, once it is made.
        self.needed: list[torch.UntypedStorage] = []
        self.spare: list[torch.UntypedStorage] = []
        self._sizes: dict[int, int] = {}

    def prepare(self, local: Any, device: torch.device) -> None:
        """Call the subclass for the tensors to all-gather, and allocate memory for the result."""
        arguments = _fitting(local.fsdp_pre_all_gather, self._arguments)
        inputs, self._metadata = local.fsdp_pre_all_gather(*arguments)
        self.sent = [given.detach().to(device, non_blocking=True).contiguous() for given in inputs]
        for storage in (*self.needed, *self.spare):
            storage.resize_(self._sizes[storage._cdata])
        kinds = [(given.dtype, self._shape(given)) for given in self.sent]
        known = [(each.dtype, tuple(each.shape)) for each in self.gathered]
        if kinds != known:
            if self.full is not None:
                raise RuntimeError(
                    f"{type(local).__name__}.fsdp_pre_all_gather returned tensors that are "
                    f"gathered into {kinds}, but the full parameter was made from {known}. Return "
                    "the same shapes and dtypes each time"
                )
            self.gathered = [torch.empty(s, dtype=d, device=device) for d, s in kinds]
            self._note([known.untyped_storage() for known in self.gathered], [])

    def _shape(self, given: torch.Tensor) -> tuple[int, ...]:
        return (self._ranks * given.shape[0], *given.shape[1:]) if given.dim() else (self._ranks,)

    def finish(self, local: Any) -> None:
        """Let the subclass make the full parameter from the gathered tensors, or fill it again."""
        self.sent = []
        outputs = tuple(self.gathered)
        if self.full is None:
            self.full, inner = local.fsdp_post_all_gather(outputs, self._metadata, self._dtype)
            # Nothing else, such as a scale: tensors that autograd saved keep the one they had, and
            # the next all-gather sets another.
            needed = {t.untyped_storage()._cdata: t.untyped_storage() for t in inner}
            spare = [t.untyped_storage() for t in outputs]
            self._note([*needed.values()], [s for s in spare if s._cdata not in needed])
        else:
            with torch.autograd._unsafe_preserve_version_counter(self.full):
                local.fsdp_post_all_gather(outputs, self._metadata, self._dtype, out=self.full)
        for storage in self.spare:
            storage.resize_(0)

    def _note(self, needed: list[torch.UntypedStorage], spare: list[torch.UntypedStorage]) -> None:
        self.needed, self.spare = needed, spare
        self._sizes = {storage._cdata: storage.nbytes() for storage in (*needed, *spare)}

    def release(self) -> None:
        """Give all memory back."""
        self.sent = []
        for storage in (*self.needed, *self.spare):
            storage.resize_(0)


class ExtendedBuffer(FullBuffer):
    """Full parameters of subclasses, used instead of a flat buffer.

    Note: attributes of subclasses
        A subclass may keep values such as a scale as attributes of the object that it made, and set
        them again in ``out``. The module computes with other objects, made from it for autograd, to
        which these attributes are copied each time.
    """

    prepares_gather = True
    is_copied_out = True

    def __init__(
        self,
        locals_: Callable[[], Sequence[Any]],
        arguments: Sequence[tuple[Any, ...]],
        dtype: torch.dtype,
        device: torch.device,
        world_size: int,
        distributions: Distributions,
    ) -> None:
        self._locals = locals_
        self._device = device
        self._distributions = distributions
        self.world_size = world_size
        self.flat = torch.empty(0, dtype=dtype, device=device)
        self.filled_from = None
        self._extended = [_Extended(given, dtype, world_size) for given in arguments]
        self.views: list[torch.Tensor] = []
        self.shown: list[Any] = []
        self._followers: deque[Sequence[Any]] = deque(maxlen=_FOLLOWERS)
        self._is_allocated = False
        self.allocate, self.release = self._allocate, self._release

    @torch.no_grad()
    def begin_gather(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The outputs and the inputs of an all-gather; with one rank the copy is made at once."""
        outputs: list[torch.Tensor] = []
        inputs: list[torch.Tensor] = []
        for extended, local in zip(self._extended, self._locals(), strict=True):
            extended.prepare(local, self._device)
            # Through .data: a full parameter may be what was gathered, and saved for backward.
            outputs += [known.data.view(-1) for known in extended.gathered]
            inputs += [given.view(-1) for given in extended.sent]
        if self.world_size > 1:
            return outputs, inputs
        for output, given in zip(outputs, inputs, strict=True):
            output.copy_(given)
        return [], []

    @torch.no_grad()
    def copy_out(self) -> None:
        for extended, local in zip(self._extended, self._locals(), strict=True):
            extended.finish(local)
        if not self.shown:
            self.views = [extended.full for extended in self._extended]
            self.shown = as_shown(self.views, self._distributions)
        for objects in (self.shown, *self._followers):
            for view, each in zip(self.views, objects, strict=True):
                # Of a tensor-parallel parameter the local part has the attributes.
                own = each._local_tensor if is_distributed(each) else each
                if own is not view and type(own) is type(view):
                    _copy_attributes(own, view)

    def follow(self, tensors: Sequence[torch.Tensor]) -> None:
        self._followers.append(tensors)

    def _allocate(self) -> None:
        self._is_allocated = True

    def _release(self) -> None:
        self._is_allocated = False
        for extended in self._extended:
            extended.release()

    @property
    def is_allocated(self) -> bool:
        return self._is_allocated

    def holds(self, tensor: torch.Tensor) -> bool:
        known = {storage._cdata for extended in self._extended for storage in extended.needed}
        parts = _parts_with_memory(tensor)
        return any(part.untyped_storage()._cdata in known for part in parts)


def _copy_attributes(tensor: Any, source: Any) -> None:
    vars(tensor).update(vars(source))
    for kind in type(source).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(source, name):
                setattr(tensor, name, getattr(source, name))


def _fitting(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """As many of the arguments as the subclass wants: the mesh alone, or all of them."""
    wanted = len(inspect.signature(function).parameters)
    if wanted not in (1, len(arguments)):
        raise AssertionError(
            f"Invalid fsdp_pre_all_gather: {inspect.signature(function)}\n"
            "Expects fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size, "
            "outer_stride: tuple[int, ...], module: nn.Module, mp_policy: MixedPrecisionPolicy)"
        )
    return arguments[:wanted]
