"""Command-line flags made of the options' fields, so that none is written down twice."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .options import Options

__all__ = ["with_option_flags"]


def with_option_flags(
    fields: Callable[[dataclasses.Field[Any]], bool],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, for each chosen field of :class:`Options`, a flag.

    The command receives in ``values`` those that were given; its other parameters stay its own.
    """
    chosen = [field for field in dataclasses.fields(Options) if fields(field)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "values"
        ]

        def with_flags(**given: Any) -> None:
            flags = {field.name: given.pop(field.name) for field in chosen}
            command(values={n: v for n, v in flags.items() if v is not None}, **given)

        parameters = [*own, *map(_flag, chosen)]
        with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_flags

    return decorate


def _flag(field: dataclasses.Field[Any]) -> inspect.Parameter:
    shown = str(field.default) if field.default not in ("", 0, False) else None
    help = field.metadata["help"] + (f" [{shown}]" if shown else "")
    option = typer.Option(help=help, show_default=False, rich_help_panel=field.metadata["group"])
    kind: Any = type(field.default)
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )
