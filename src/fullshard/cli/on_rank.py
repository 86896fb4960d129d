"""The command on ranks that ``launch.py`` started. Raises bad input, which the launcher prints."""

from __future__ import annotations

from fullshard.cli.command_line import run_command
from fullshard.cli.main import app

if __name__ == "__main__":
    raise SystemExit(run_command(app))
