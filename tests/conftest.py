"""What all tests share: ranks, how many cases hypothesis generates, and the ranks' coverage."""

import os
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from fullshard.engine.comm.collectives import stuck
from fullshard.testing import shared

pytest_plugins = ["fullshard.testing.pytest_plugin"]

# A case on ranks costs milliseconds, but the first one in a process may have to start them.
settings.register_profile(
    "default", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", settings.get_profile("default"), max_examples=2000)
settings.load_profile("long" if os.environ.get("FULLSHARD_LONG") else "default")


@pytest.fixture(autouse=True, scope="module")
def end_ranks_that_keep_dead_groups() -> Iterator[None]:
    """End ranks after a file in which collectives of many groups failed.

    Such a group is never let go of, and each has threads that wake up a hundred times a second.
    """
    yield
    for pool in list(shared._pools.values()):
        if pool._all_run() and max(pool.run(_count_dead_groups)) > 2:
            pool.close()


def _count_dead_groups() -> int:
    return len(stuck)


@pytest.fixture(autouse=True, scope="module")
def save_coverage_of_ranks(
    request: pytest.FixtureRequest, end_ranks_that_keep_dead_groups: None
) -> Iterator[None]:
    """With ``--cov``, have ranks save after every file what they measured: they end by SIGKILL.

    What ranks measured in a file before a test of it ended them is not in the report. From their
    second file on only the first rank of each pool is measured: the others run the same lines, with
    a few exceptions, and measuring takes a third of the time.
    """
    yield
    if not request.config.pluginmanager.hasplugin("_cov"):
        return
    for pool in list(shared._pools.values()):
        if pool._all_run():
            pool.run(_save_coverage)


def _save_coverage() -> None:
    import coverage

    measuring = coverage.Coverage.current()
    if measuring is not None:
        measuring.save()
        if dist.get_rank() > 0:
            measuring.stop()
