"""Ways to damage a checkpoint, and a checkpoint to damage."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.original.training import Net, build
from tests.state.models import wrapped
from tests.state.optimizers import adam, trained
from torch import nn

import fullshard
from fullshard import ShardingStrategy

#: Lists inside of each other, as JSON, more than any reader follows.
DEEP = "[" * 100_000 + "]" * 100_000
#: Longer than any reading here takes, on any machine.
SECONDS = 60
EXTRA = {
    "by number": {3: "three", (1, 2): None, "x": [1.5, float("nan")]},
    "noise": torch.arange(5, dtype=torch.int16),
    "raw": b"\x00\xff",
    "dtype": torch.bfloat16,
    "$odd": [True, 1j, ("a", "b")],
}


class Hangs(BaseException):
    """Reading takes too long."""


def save_on_rank(folder: Path, steps: tuple[int, ...]) -> None:
    """Save what every number tells the step of."""
    model = wrapped(build(Net), ShardingStrategy.FULL_SHARD, "blocks", use_orig_params=True)
    optimizer = adam(model)
    trained(model, optimizer, range(1))
    for step in steps:
        fill(model, step)
        fullshard.save(folder, model, optimizer, step=step, extra={**EXTRA, "step": step})


def fill(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)


def values_of(model: nn.Module) -> set[float]:
    return {value for p in model.parameters() for value in p.detach().flatten().tolist()}


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Raise Hangs from whatever is done inside, if it goes on for too long."""

    def give_up(*_: Any) -> None:
        raise Hangs

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def read_body(path: Path) -> Any:
    return json.loads(path.read_text())["body"]


def write_body(path: Path, body: Any) -> None:
    """Write content with a seal that fits."""
    write_text(path, json.dumps(body))


def write_text(path: Path, text: str) -> None:
    """Write what may be JSON with a seal that fits."""
    digest = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(f'{{"fullshard":1,"sha256":"{digest}","body":{text}}}\n')


def turn_a_bit(path: Path) -> None:
    """Leave a file as long as it was, with another content."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def make_socket(path: Path) -> None:
    here = os.getcwd()
    # The paths of sockets are short.
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def make_device(path: Path) -> None:
    """As endless as /dev/zero."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("devices are root's to make")


#: What may stand in the place of a file, which was removed before.
IMPOSTORS: dict[str, Callable[[Path], None]] = {
    "nothing": lambda path: None,
    "an empty file": lambda path: path.touch(),
    "a FIFO": os.mkfifo,
    "a folder": lambda path: path.mkdir(),
    "a device": make_device,
    "a socket": make_socket,
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nowhere": lambda path: path.symlink_to("/nowhere/at/all"),
}
