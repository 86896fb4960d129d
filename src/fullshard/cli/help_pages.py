"""Help pages as plain text that fits in a terminal of 80 columns.

typer's own boxes cut off long names at that width, and take a default such as [cosine] for markup.
"""

from __future__ import annotations

from typing import Any

import typer.core

__all__ = ["GroupedCommand", "ProgramCommand"]


class GroupedCommand(typer.core.TyperCommand):
    """A command whose options are listed in groups, by their ``rich_help_panel``."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and parameter.param_type_name == "option":
                name = getattr(parameter, "rich_help_panel", None) or "Options"
                groups.setdefault(name, []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


class ProgramCommand(GroupedCommand):
    """A command whose arguments are a program and the program's arguments."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [str(self.options_metavar), "(SCRIPT | -m MODULE)", "[ARGUMENTS]..."]
