"""Marks that files share."""

import os

import pytest

#: Whether ``make test-long`` runs, which takes hours.
IS_LONG = bool(os.environ.get("FULLSHARD_LONG"))
#: For tests that take long and rarely fail alone: others nearly always fail with them.
in_long_runs = pytest.mark.skipif(not IS_LONG, reason="takes long: set FULLSHARD_LONG=1")
