"""The command as ranks that ``launch.py`` started call it: bad input is the launcher's to tell."""

from __future__ import annotations

from fullshard.cli.command_line import run_command
from fullshard.cli.main import app

if __name__ == "__main__":
    raise SystemExit(run_command(app))
