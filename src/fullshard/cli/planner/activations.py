"""The memory of an unwrapped model's tensors during a step, found by running it on the meta device.

There, operations compute shapes only. Every storage that an operation returns is counted until it
is released, so the count includes saved tensors, temporaries, gradients, and the activations that
activation checkpointing recomputes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullshard.engine.runtime.pytrees import list_tensors

from .memory import Event, Moment
from .usual_values import UsualValues

#: Estimates the seconds of a call: ``seconds_of(function, args, kwargs, result)``.
Cost = Callable[[Any, Any, Any, Any], float]

__all__ = ["Cost", "record_step", "scratch_bytes"]


def record_step(
    model: nn.Module,
    unit_paths: Sequence[str],
    loss: Callable[[], torch.Tensor],
    device: torch.device,
    seconds_of: Cost | None = None,
) -> list[Moment]:
    """Run ``loss`` and its backward; return the events of all units, with the memory at each.

    ``seconds_of`` estimates how long an operation takes.

    ``model`` is on the meta device, in compute precision; ``unit_paths`` are the modules that will
    become units, including the root (""). ``device`` is the device that training will use.
    """
    parameters = [p.untyped_storage() for p in model.parameters()]
    recorder = _Recorder(parameters, device, seconds_of)
    handles = _watch_units(model, unit_paths, recorder)
    try:
        with recorder, _AttentionOf(device), UsualValues():
            value = loss()
            _backward(value)
            del value
        recorder.mark(Event.END, "")
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return recorder.moments()


class _Recorder(TorchDispatchMode):
    """Counts the bytes of live storages, and records them at every event, with peaks between."""

    def __init__(
        self,
        parameters: Sequence[torch.UntypedStorage],
        device: torch.device,
        seconds_of: Cost | None,
    ) -> None:
        super().__init__()
        self._seconds_of = seconds_of
        self._seconds = 0.0
        self._operations = 0
        self._has_scratch = device.type == "cuda"
        # Parameters are counted elsewhere. Held here, so that no other storage gets their address.
        self._parameters = list(parameters)
        self._sizes = {storage._cdata: 0 for storage in parameters}
        self._gradients: set[int] = set()
        self.tensors = self.gradients = 0
        self._marks: list[tuple[Event, str, int, int, float, int]] = []
        self._peaks: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._seconds_of is not None:
            self._seconds += self._seconds_of(function, args, kwargs or {}, result)
        self._operations += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        if self._peaks:
            scratch = scratch_bytes(function, args) if self._has_scratch else 0
            now = (self.tensors + scratch, self.gradients)
            self._peaks[-1] = max(self._peaks[-1], now, key=sum)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.tensors += storage.nbytes()
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        size = self._sizes.pop(key)
        if key in self._gradients:
            self._gradients.discard(key)
            self.gradients -= size
        else:
            self.tensors -= size

    def count_as_gradient(self, gradient: torch.Tensor) -> None:
        """Count ``gradient`` as a parameter's gradient from now on, not as an activation."""
        key = gradient.untyped_storage()._cdata
        if key in self._sizes and key not in self._gradients:
            self._gradients.add(key)
            self.tensors -= self._sizes[key]
            self.gradients += self._sizes[key]

    def mark(self, event: Event, unit: str) -> None:
        counted = (self.tensors, self.gradients, self._seconds, self._operations)
        self._marks.append((event, unit, *counted))
        self._peaks.append((self.tensors, self.gradients))

    def restart_peak(self) -> None:
        """Restart the current peak, because memory was freed at the last event."""
        self._peaks[-1] = (self.tensors, self.gradients)

    def moments(self) -> list[Moment]:
        return [
            Moment(event, unit, tensors, gradients, *peak, seconds, operations)
            for (event, unit, tensors, gradients, seconds, operations), peak in zip(
                self._marks, self._peaks, strict=True
            )
        ]


def _watch_units(model: nn.Module, paths: Sequence[str], recorder: _Recorder) -> list[Any]:
    """Register hooks that record the units' events; returns their handles."""
    modules = {path: model.get_submodule(path) for path in paths}
    path_of_parameter: dict[nn.Parameter, str] = {}
    # Inner units have longer paths and come last, so a parameter ends up in its innermost unit.
    for path in sorted(paths, key=len):
        for parameter in modules[path].parameters():
            path_of_parameter[parameter] = path
    handles: list[Any] = []
    for path, module in modules.items():
        own = [p for p, o in path_of_parameter.items() if o == path and p.requires_grad]
        handles += _watch_module(path, module, recorder)
        handles += _watch_gradients(path, own, recorder)
    return handles


def _watch_module(path: str, module: nn.Module, recorder: _Recorder) -> list[Any]:
    def before(*_: Any) -> None:
        if not _in_backward():
            recorder.mark(Event.FORWARD, path)

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        if _in_backward():
            return
        recorder.mark(Event.FORWARD_END, path)
        reached: list[bool] = []

        def backward(_: torch.Tensor) -> None:
            if not reached:
                reached.append(True)
                recorder.mark(Event.BACKWARD, path)

        for tensor in list_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(backward)

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def _watch_gradients(path: str, own: Sequence[nn.Parameter], recorder: _Recorder) -> list[Any]:
    def arrived(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        recorder.count_as_gradient(parameter.grad)
        if all(p.grad is not None for p in own):
            recorder.mark(Event.GRADIENTS, path)
            for other in own:
                other.grad = None
            recorder.restart_peak()

    return [p.register_post_accumulate_grad_hook(arrived) for p in own]


def _backward(value: torch.Tensor) -> None:
    """Run ``value.backward()`` inside the active modes, which that method itself would leave."""
    torch.autograd.graph._engine_run_backward(
        (value,),
        (torch.ones_like(value),),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


class _AttentionOf(TorchFunctionMode):
    """Uses the attention kernel of ``device``; that of the meta device keeps all scores."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is nn.functional.scaled_dot_product_attention:
            return _attention(self._device.type, *args, **kwargs)
        return function(*args, **kwargs)


def _attention(
    device: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    operations = torch.ops.aten
    # Without a fused kernel, attention is computed operation by operation, also on devices.
    fits_kernels = query.dim() == 4 and query.shape[-3] == key.shape[-3]
    if attn_mask is not None or dropout_p or not fits_kernels:
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )
    if device == "cpu":
        return operations._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal
        )[0]
    if query.dtype is torch.float32:
        return operations._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, is_causal
        )[0]
    return operations._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]


# -- scratch memory -------------------------------------------------------------------------------
#
# The memory that an operation takes on a GPU while it runs, in addition to its result. Only
# operations whose scratch is as large as their inputs are listed; they were found by watching
# torch's allocator around every operation of a training step on an H200.

_SUM = torch.ops.aten.sum.dim_IntList
#: Constants of torch's kernel for column sums: columns and rows per block, the fewest rows that a
#: thread adds up, the most before several blocks share a column, and the number of blocks that a
#: GPU with 132 multiprocessors runs at a time.
_COLUMNS, _ROWS, _LEAST, _MOST, _BLOCKS = 128, 4, 16, 256, 2112
_FLOAT = 4


def scratch_bytes(function: Any, arguments: Sequence[Any]) -> int:
    """The bytes of scratch memory that a call of ``function`` takes on a GPU while it runs."""
    if function is _SUM:
        given, dimensions = arguments[:2]
        return _of_column_sums(*given.shape) if given.dim() == 2 and dimensions == [0] else 0
    if function.__name__.startswith("_scaled_dot_product_") and "_backward" in function.__name__:
        # The query's gradient in float32, and one number for each of its rows.
        query = arguments[1]
        return _FLOAT * (query.numel() + query.numel() // query.shape[-1])
    return 0


def _of_column_sums(rows: int, columns: int) -> int:
    """The scratch of a sum over rows, such as a bias gradient, if several blocks share a column."""
    each = -(-rows // _ROWS)
    beside = -(-columns // _COLUMNS)
    if each < _MOST or beside > _BLOCKS:
        return 0
    blocks = max(min(-(-_BLOCKS // beside), -(-each // _LEAST)), -(-each // _MOST))
    # Every block writes one value for each of its columns, for each of the matrix's columns.
    return _FLOAT * columns * _COLUMNS * blocks if blocks > 1 else 0
