"""A Slurm cluster of two nodes, on the two hosts of ``hosts.py``: slurmctld and two slurmd.

Needs the Debian package ``slurm-wlm`` and what it depends on, and nothing that is configured.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.hosts import Host, TwoHosts, two_hosts

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
_SYSTEM = "/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Slurm:
    """A cluster that runs. Commands are given on the first host."""

    hosts: TwoHosts
    folder: Path
    names: Path

    def command(self, *words: str, check: bool = True, **variables: str) -> str:
        """What a command such as sbatch says."""
        process = self.start(self.hosts.first, *words, **variables)
        said, problems = process.communicate(timeout=180)
        if check and process.returncode != 0:
            raise RuntimeError(f"{words} failed with {process.returncode}: {said}{problems}")
        return said.strip()

    def start(self, host: Host, *words: str, **variables: str) -> subprocess.Popen[str]:
        """Start ``words`` where the hosts' names stand for their addresses."""
        # A rank's own variables, if the tests run under a launcher, are not for the job.
        named = ["sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(self.names)]
        environment = {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{os.environ.get('PATH', '')}:{_SYSTEM}",
            **variables,
        }
        return host.start(
            [*named, *words], environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def state(self, job: str) -> str:
        """The job's state, such as RUNNING; empty when the controller has forgotten it."""
        said = self.command("scontrol", "show", "job", job, check=False)
        found = [word for word in said.split() if word.startswith("JobState=")]
        return found[0].removeprefix("JobState=") if found else ""


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Two nodes that take jobs; ends with the context, and all jobs with it."""
    for name in ("state", "spool/host-a", "spool/host-b", "munge"):
        (folder / name).mkdir(parents=True)
    names = folder / "hosts"
    with two_hosts() as hosts, _credentials(folder / "munge"):
        names.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{h.address} {h.name}\n" for h in hosts)
        )
        (folder / "slurm.conf").write_text(_configuration(hosts, folder))
        # Not looked for by itself, which fails where the hosts' own /sys has no control groups.
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        cluster = Slurm(hosts, folder, names)
        cluster.start(hosts.first, "slurmctld", "-D")
        for host in hosts:
            cluster.start(host, "slurmd", "-D", "-N", host.name)
        _wait_for_nodes(cluster)
        yield cluster
        cluster.command("scancel", "--state=RUNNING", "--full", "-u", "root", check=False)


def _configuration(hosts: TwoHosts, folder: Path) -> str:
    nodes = "\n".join(
        f"NodeName={host.name} NodeAddr={host.address} CPUs={os.cpu_count()} State=UNKNOWN"
        for host in hosts
    )
    names = ",".join(host.name for host in hosts)
    return f"""
ClusterName=two
SlurmctldHost={hosts.first.name}({hosts.first.address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait=30
InactiveLimit=0
SelectType=select/cons_tres
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def _credentials(folder: Path) -> Iterator[None]:
    """munge, with which the daemons know each other, with a key of its own."""
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    folder.chmod(0o755)
    files = ("socket", "pid-file", "log-file", "seed-file", "key-file")
    places = {name: str(folder / name.removesuffix("-file")) for name in files}
    words = [f"--{name}={place}" for name, place in places.items()]
    daemon = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "munged", "--foreground", "--force", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while not (folder / "socket").exists():
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("munged did not start: " + (folder / "log").read_text())
            time.sleep(0.05)
        yield
    finally:
        daemon.terminate()
        daemon.wait()


def _wait_for_nodes(cluster: Slurm) -> None:
    deadline = time.monotonic() + 180
    while True:
        said = cluster.command("sinfo", "--noheader", "--format=%T %D", check=False)
        if said.split() == ["idle", "2"]:
            return
        if time.monotonic() > deadline:
            logs = "\n".join(file.read_text() for file in cluster.folder.glob("slurm*.log"))
            raise RuntimeError(f"the nodes did not come up: {said}\n{logs}")
        time.sleep(0.2)
