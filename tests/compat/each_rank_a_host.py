"""Runs a program on ranks that share one GPU, each of which takes itself for a host of its own.

NCCL refuses two ranks of one host on the same GPU. It goes by what it is told of hosts.
"""

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["NCCL_HOSTID"] = f"host{os.environ['RANK']}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["LOCAL_RANK"] = "0"
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
