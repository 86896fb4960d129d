"""The example for Kubernetes: valid, consistent, and its command does what the manifest says."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.hosts import two_hosts, why_not

import fullshard

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "cluster"


@pytest.fixture
def documents() -> dict[str, dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="the manifest is YAML")
    text = (EXAMPLES / "kubernetes.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def option(command: list[str], name: str) -> str:
    (found,) = [word.partition("=")[2] for word in command if word.startswith(f"{name}=")]
    return found


def test_the_manifest_keeps_to_the_schema_of_kubernetes(
    documents: dict[str, dict[str, Any]],
) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="it holds the schemas")
    newest = schemas.latest_version()
    for document in documents.values():
        schemas.validate(document, newest, strict=True)
    wrong = {**documents["Job"], "spec": {**documents["Job"]["spec"], "completions": "two"}}
    with pytest.raises(schemas.ValidationError):
        schemas.validate(wrong, newest, strict=True)


def test_the_names_and_times_in_the_manifest_fit_together(
    documents: dict[str, dict[str, Any]],
) -> None:
    service, job = documents["Service"], documents["Job"]
    pod = job["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    command = container["command"]
    meeting = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    assert option(command, "--rdzv-endpoint") == f"{meeting}:{port['port']}"
    assert int(option(command, "--nnodes")) == job["spec"]["completions"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert int(option(command, "--shutdown-timeout")) + 10 <= grace
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert any(option(command, "--folder").startswith(mount) for mount in mounts)
    codes = [rule["onExitCodes"] for rule in job["spec"]["podFailurePolicy"]["rules"][1:]]
    assert [(code["containerName"], code["values"]) for code in codes] == [("train", [143])]


def test_its_command_on_two_hosts_with_the_names_of_its_pods(
    documents: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    (container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
    places = {
        "fullshard": [sys.executable, "-m", "fullshard.cli.launcher.run"],
        "run": ["--ranks=1"],
        "examples/cluster/train.py": [str(EXAMPLES / "train.py")],
        "--folder=/checkpoints/run": [f"--folder={tmp_path / 'run'}"],
        "--steps=1000": ["--steps=5"],
    }
    command = [w for word in container["command"] for w in places.get(word, [word])]
    names = tmp_path / "hosts"
    with two_hosts() as hosts:
        pods = [(host, f"fullshard-{number}") for number, host in enumerate(hosts)]
        names.write_text("".join(f"{h.address} {n}.fullshard {n}\n" for h, n in pods))
        within = ["sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(names)]
        launchers = [
            host.start([*within, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for host in hosts
        ]
        deadline = time.monotonic() + 300
        said = [p.communicate(timeout=max(1, deadline - time.monotonic()))[0] for p in launchers]
        assert [launcher.returncode for launcher in launchers] == [0, 0], said
    saved = fullshard.latest(tmp_path / "run")
    assert saved is not None
    assert saved.step == 5
