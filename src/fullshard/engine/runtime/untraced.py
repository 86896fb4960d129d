"""Keeping ``torch.compile`` out of what shards, so that it compiles what the user wrote.

Dynamo looks at every frame that runs below a compiled function. All wrappers share one ``forward``:
were it traced, its guards on the wrapped module and its inputs would soon use up the recompilations
that Dynamo allows a code object, and units would be left uncompiled. A mark on the code object has
the interpreter pass over its frames; where there is nothing to compile it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

_REASON = "fullshard unshards, reshards and reduces outside compiled graphs"


def untraced(function: _Function) -> _Function:
    """Have Dynamo trace neither ``function`` nor anything that it calls."""
    return _mark(function, recursive=True)


def untraced_itself(function: _Function) -> _Function:
    """Have Dynamo not trace ``function``; what it calls is traced."""
    return _mark(function, recursive=False)


def _mark(function: Any, recursive: bool) -> Any:
    # Not torch._dynamo, which would say the same: to import it takes a second.
    frames = torch._C._dynamo.eval_frame
    try:
        skip, trace = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, skip if recursive else trace)
        frames.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:
        # Another release of torch. This does the same by a function around each call.
        return torch._disable_dynamo(function, recursive=recursive)
    # For callers that are being traced: their graph ends at the call.
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = _REASON
    function._torchdynamo_disable_recursive = recursive
    return function
