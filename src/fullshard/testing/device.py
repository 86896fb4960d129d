"""Choosing device and backend for tests. Uses torch only, and CUDA only if it was chosen."""

from __future__ import annotations

import os

import torch

from .errors import RankSetupError

DEVICE_VARIABLE = "FULLSHARD_TEST_DEVICE"
DEVICE_TYPES = ("cpu", "cuda")
BACKEND_VARIABLE = "FULLSHARD_TEST_BACKEND"
BACKENDS = ("gloo", "nccl")


def chosen_device_type() -> str:
    """The device type in FULLSHARD_TEST_DEVICE; "cpu" if the variable is not set."""
    chosen = os.environ.get(DEVICE_VARIABLE) or "cpu"
    if chosen not in DEVICE_TYPES:
        raise RankSetupError(
            f"the test device is {chosen!r}, expected 'cpu' or 'cuda': "
            f"correct --device or the environment variable {DEVICE_VARIABLE}"
        )
    return chosen


def backend() -> str:
    """The backend that runs the ranks' collectives on tensors of ``device()``: "gloo" or "nccl".

    This is gloo unless NCCL was chosen with ``--backend nccl`` or FULLSHARD_TEST_BACKEND.
    """
    chosen = os.environ.get(BACKEND_VARIABLE) or "gloo"
    if chosen not in BACKENDS:
        raise RankSetupError(
            f"the test backend is {chosen!r}, expected 'gloo' or 'nccl': "
            f"correct --backend or the environment variable {BACKEND_VARIABLE}"
        )
    if chosen == "nccl" and chosen_device_type() != "cuda":
        raise RankSetupError(
            "the test backend is 'nccl', which communicates between GPUs, but the test device is "
            f"'cpu': add --device cuda, or set {DEVICE_VARIABLE}=cuda"
        )
    return chosen


def require_device(device_type: str) -> None:
    """Raise RankSetupError unless this machine has a device of that type."""
    if device_type == "cuda" and not torch.cuda.is_available():
        raise RankSetupError(
            "the test device is 'cuda', but torch finds no usable GPU on this machine "
            f"(torch {torch.__version__}): choose --device cpu, or {DEVICE_VARIABLE}=cpu"
        )


def device() -> torch.device:
    """The device for the tensors of the calling rank.

    This is the CPU unless CUDA was chosen with ``--device cuda`` or FULLSHARD_TEST_DEVICE. Ranks
    share the available GPUs: rank r uses GPU r modulo their number. Outside a rank, this is the
    device of rank 0.

    Example::

        @ranks(2)
        def test_output_is_finite() -> None:
            model = nn.Linear(4, 4).to(device())
    """
    device_type = chosen_device_type()
    if device_type == "cpu":
        return torch.device("cpu")
    require_device(device_type)
    rank = int(os.environ.get("RANK", "0"))
    return torch.device("cuda", rank % torch.cuda.device_count())
