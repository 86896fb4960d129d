"""CUDA graphs of a step, and the memory of their batches and results.

All graphs of a step share one memory pool: only one of them runs at a time, and tensors that
outlast it (results, gradients) are held by objects, so that no other graph gets their memory.

Note: the first steps use the graphs' pool
    A graph's memory is its own: of blocks that eager steps have freed it gets none. What a first
    step makes and keeps, such as an optimizer's state, lies scattered over blocks in which
    activations were; eager steps have their next activations around it, and a graph would leave
    these blocks unused (it reserved up to 18 % more than an eager step). So eager steps before the
    first graph already allocate from the pool, on the stream that computes. Later ones do not: what
    they keep would lie in memory that a graph overwrites.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from ..engine.runtime.pytrees import replace_tensors

_GRADIENT = operator.attrgetter("grad")


class Recorder:
    """Runs a step eagerly, or captures it, on a stream of its own, which captures need."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: Any = None
        #: Ends this object's hold on the pool.
        self._release_pool: weakref.finalize[Any, Any] | None = None
        self._has_captured = False

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """A batch whose tensors are on the device."""
        return [
            leaf.to(self.device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]

    def run(self, call: Callable[[], Any]) -> Any:
        """Run a step eagerly, and return copies of its results that the current stream may use."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), self._allocating():
                result = call()
        finally:
            current.wait_stream(self._stream)
        return copied(result)

    @contextlib.contextmanager
    def _allocating(self) -> Generator[None, None, None]:
        """Allocate from the graphs' pool what is allocated on the current stream."""
        if self._has_captured:
            yield
            return
        if self._pool is None:
            # Blocks of eager steps before, which nobody will need soon.
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()
        where = self.device.index, self._pool
        torch._C._cuda_beginAllocateCurrentStreamToPool(*where)
        try:
            yield
        finally:
            torch._C._cuda_endAllocateToPool(*where)
            if self._release_pool is None:
                # Nobody else has it yet.
                self._release_pool = weakref.finalize(self, torch._C._cuda_releasePool, *where)
                self._release_pool.atexit = False
            else:
                torch._C._cuda_releasePool(*where)

    def close(self) -> None:
        """Let the pool's memory go that nothing is in: there will be no graph."""
        if self._release_pool is not None:
            self._release_pool()
            torch.cuda.empty_cache()

    def capture(
        self,
        call: Callable[[Sequence[Any]], Any],
        leaves: Sequence[Any],
        parameters: Sequence[torch.Tensor],
    ) -> StepGraph:
        """Capture a step; nothing of it has run when this returns.

        If it raises, parameters have the gradients that they had before.
        """
        static = [
            leaf.detach().clone().requires_grad_(leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in leaves
        ]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._has_captured = True
        before = list(map(_GRADIENT, parameters))
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        torch.cuda.synchronize(self.device)
        try:
            # Other threads of the program (loaders that pin memory) may go on meanwhile.
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                result = call(static)
        except BaseException:
            _set_gradients(parameters, before)
            self._clean_up()
            # Torch leaves the stream of a capture that broke the current one.
            torch.cuda.set_stream(current)
            raise
        # The capture's changes to the state of random numbers are ordered before the replay's own.
        current.wait_stream(self._stream)
        made = StepGraph(graph, static, detached(result), parameters, before)
        # Blocks of eager steps that no eager step will need soon.
        torch.cuda.empty_cache()
        return made

    def _clean_up(self) -> None:
        """Take the allocator and the random numbers out of capture mode, where a capture broke.

        Until torch 2.13 a capture that CUDA invalidated leaves them there: the graph's pool keeps
        its memory for good, and memory that ``record_stream`` has marked is never used again.
        """
        with contextlib.suppress(RuntimeError):
            # Raises where torch has done it, which releases the pool with the graph then.
            torch._C._cuda_endAllocateToPool(self.device.index, self._pool)
            torch._C._cuda_releasePool(self.device.index, self._pool)
        # A trivial graph does it for random numbers, if it is captured to its end.
        with (
            contextlib.suppress(RuntimeError),
            torch.cuda.graph(
                torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            torch.zeros(1, device=self.device)


class StepGraph:
    """One graph: a step with batches of one kind."""

    def __init__(
        self,
        graph: Any,
        static: list[Any],
        result: Any,
        parameters: Sequence[torch.Tensor],
        before: list[torch.Tensor | None],
    ) -> None:
        self._graph = graph
        self._static = static
        self._result = result
        self._parameters = list(parameters)
        self._before = before
        self._after: list[torch.Tensor | None] = list(map(_GRADIENT, parameters))
        #: The gradients that exist before and after, to which the graph adds.
        self._added_to = [
            (parameter, old)
            for parameter, old, new in zip(parameters, before, self._after, strict=True)
            if old is not None and old is new
        ]

    def replay(self, leaves: Sequence[Any]) -> Any:
        """Run the step with this batch, and return copies of its results."""
        for mine, given in zip(self._static, leaves, strict=True):
            if isinstance(mine, torch.Tensor):
                mine.detach().copy_(given, non_blocking=True)
        for parameter, mine in self._added_to:
            if parameter.grad is not mine and parameter.grad is not None:
                mine.copy_(parameter.grad)
        self._graph.replay()
        # The device has changed parameters: whoever kept full ones must gather them again.
        torch.autograd.graph.increment_version(self._parameters)
        if any(map(operator.is_not, map(_GRADIENT, self._parameters), self._after)):
            _set_gradients(self._parameters, self._after)
        return copied(self._result)

    def settle(self) -> None:
        """The graph will be used: let go of what was there before it."""
        self._before = []

    def undo(self) -> None:
        """The graph will not be used: have the gradients of before, for it computed none."""
        _set_gradients(self._parameters, self._before)
        self.drop()

    def drop(self) -> None:
        """Give the graph's memory back to the pool."""
        torch.cuda.synchronize()
        self._graph.reset()


def _set_gradients(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def detached(result: Any) -> Any:
    """The results of a step, without the graph that autograd made of them."""
    return replace_tensors(result, torch.Tensor.detach)


def copied(result: Any) -> Any:
    """Copies of a step's results, which the next step will overwrite."""
    return replace_tensors(result, lambda tensor: tensor.detach().clone())
