"""Launchers of several machines: which address and interface they use, and their options."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from fullshard.cli.launcher.launch import launch
from fullshard.cli.launcher.several_machines import _address_towards, _interface_of
from fullshard.cli.problems import BadInput
from fullshard.ports import reserve_port


@pytest.mark.skipif(sys.platform != "linux", reason="interfaces are looked up on Linux alone")
def test_an_address_is_that_of_the_interface_that_has_it() -> None:
    assert _interface_of("127.0.0.1") == "lo"
    assert _interface_of("192.0.2.77") is None
    assert _interface_of(None) is None
    assert _interface_of("no number") is None


def test_no_address_is_chosen_that_other_machines_could_not_use() -> None:
    assert _address_towards("localhost") is None
    assert _address_towards("127.0.0.5") is None
    assert _address_towards("no such name.invalid") is None


def test_this_machine_is_reached_at_the_address_from_which_it_reaches_others() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:
        try:
            towards.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        own = towards.getsockname()[0]
    if own.startswith("127."):
        pytest.skip("this machine has no network")
    assert _address_towards(own) == own


@pytest.mark.parametrize("seconds", ["0", "-1", "soon"])
def test_seconds_after_which_a_host_is_lost_are_checked(tmp_path: Path, seconds: str) -> None:
    program = tmp_path / "program.py"
    program.touch()
    with reserve_port("127.0.0.1") as reserved:
        place = f"127.0.0.1:{reserved.getsockname()[1]}"
        options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", place]
        with pytest.raises(BadInput, match=f"host_timeout expects .* but got '{seconds}'"):
            launch(1, [*options, "--rdzv-conf", f"host_timeout={seconds}"], [str(program)])
