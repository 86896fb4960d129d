"""What all tests share: ranks, and how many cases hypothesis generates."""

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["fullshard.testing.pytest_plugin"]

# A case on ranks costs milliseconds, but the first one in a process may have to start them.
settings.register_profile(
    "default", deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", settings.get_profile("default"), max_examples=2000)
settings.load_profile("long" if os.environ.get("FULLSHARD_LONG") else "default")
