"""How long deciding, describing and wrapping take on a model of many modules.

    python benchmarks/wrap_many_modules.py [--modules 10000]

Needs no process group: an object with a rank and a size stands in for one. "decide" and
"describe" run on the meta device; "wrap" is the whole constructor, which decides, wraps, flattens
and shards a real model.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard import FullyShardedDataParallel
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    decide,
    describe,
    size_based_auto_wrap_policy,
)


class Block(nn.Module):
    """Ten modules, itself included."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


class OneOfEight:
    """What the constructor asks of a process group."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 8


def build(modules: int) -> nn.Module:
    return nn.Sequential(*(Block(16) for _ in range(modules // 10)))


def seconds(action: Callable[[], object]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", type=int, default=10_000)
    count = parser.parse_args().modules
    policies: dict[str, Any] = {
        "ModuleWrapPolicy({Block})": ModuleWrapPolicy({Block}),
        "CustomPolicy(is Linear)": CustomPolicy(lambda module: isinstance(module, nn.Linear)),
        "size_based (1,000)": functools.partial(size_based_auto_wrap_policy, min_num_params=1000),
        "always_wrap_policy": always_wrap_policy,
    }
    print(f"{'policy':28}{'modules':>9}{'units':>8}{'decide':>10}{'describe':>10}{'wrap':>10}")
    for name, policy in policies.items():
        with torch.device("meta"):
            model = build(count)
        deciding, plan = seconds(functools.partial(decide, model, policy))
        describing, _ = seconds(functools.partial(describe, model, policy))
        construct = functools.partial(
            FullyShardedDataParallel,
            build(count),
            process_group=OneOfEight(),
            auto_wrap_policy=policy,
            use_orig_params=True,
        )
        wrapping, _ = seconds(construct)
        times = "".join(f"{time * 1e3:>7.0f} ms" for time in (deciding, describing, wrapping))
        print(f"{name:28}{len(plan.graph.modules):>9,}{len(plan.decisions) + 1:>8,}{times}")


if __name__ == "__main__":
    main()
