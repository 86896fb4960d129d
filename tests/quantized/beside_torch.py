"""Trains adapters beside quantised weights under fullshard and under torch, and prints a table.

    PYTHONPATH=src:. python tests/quantized/beside_torch.py

Every row is one kind of weight, sharded in one way over two ranks: whether losses are those of one
process, also where mixed precision casts adapters to bfloat16, and whether the state dict has the
scales that the bare model's has. torch's wrapper needs an accelerator.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from tests.quantized.models import LINEARS, batch, build, train

import fullshard
from fullshard.testing import run_on_ranks

LIBRARIES = {"fullshard": "fullshard", "torch": "torch.distributed.fsdp"}


def sharded(kind: str, library: str, way: str, low: torch.dtype | None) -> Any:
    """The model, its blocks sharded by one of a library's two ways."""
    names, model = importlib.import_module(LIBRARIES[library]), build(kind)
    if way == "fully_shard":
        policy = names.MixedPrecisionPolicy(param_dtype=low)
        for block in model.children():
            names.fully_shard(block, mp_policy=policy)
        return names.fully_shard(model, mp_policy=policy)
    wrap: Any = importlib.import_module(f"{LIBRARIES[library]}.wrap")
    return names.FullyShardedDataParallel(
        model,
        auto_wrap_policy=wrap.ModuleWrapPolicy({type(model[0])}),
        mixed_precision=names.MixedPrecision(param_dtype=low),
        use_orig_params=True,
    )


def losses(kind: str, library: str, way: str) -> str:
    expected, found = train(build(kind)), train(sharded(kind, library, way, None))
    return "as one process" if found == expected else f"{found[-1]:.3f}, not {expected[-1]:.3f}"


def mixed(kind: str, library: str, way: str) -> str:
    low, bare = torch.bfloat16, build(kind)
    for name, parameter in bare.named_parameters():
        if "base" not in name:
            parameter.data = parameter.data.to(low)
    found = sharded(kind, library, way, low)(batch(0))
    if torch.equal(found, bare(batch(0).to(low))):
        return "as one process"
    return f"differs by {(found - bare(batch(0).to(low))).abs().max().item():.2g}"


def state(kind: str, library: str, way: str) -> str:
    expected = set(build(kind).state_dict())
    lacking = expected - set(sharded(kind, library, way, None).state_dict())
    return f"lacks {len(lacking)} of {len(expected)}" if lacking else "complete"


def row(kind: str, library: str, way: str) -> None:
    """Print one row of the table on the first rank."""
    warnings.filterwarnings("ignore")
    cells = []
    for column in (losses, mixed, state):
        try:
            cells.append(column(kind, library, way))
        except Exception as error:
            cells.append(f"{type(error).__name__}: {str(error).splitlines()[0][:60]}")
    if dist.get_rank() == 0:
        print(f"| {kind} | {library} | {way} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    print(f"torch {torch.__version__}, fullshard {fullshard.__version__}")
    print("| weight | library | way | losses | mixed precision | state dict |")
    print("|---|---|---|---|---|---|")
    for kind in LINEARS:
        for library in LIBRARIES:
            for way in ("wrapper", "fully_shard"):
                if (library, way) != ("torch", "wrapper") or torch.accelerator.is_available():
                    run_on_ranks(2, row, kind, library, way)


if __name__ == "__main__":
    main()
