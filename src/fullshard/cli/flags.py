"""Command-line flags generated from the fields of ``Options``, so that each is defined once."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .options import COMMAND_LINE, Options, wrong_kind
from .problems import BadInput

__all__ = ["value_of", "with_option_flags"]


def with_option_flags(
    fields: Callable[[dataclasses.Field[Any]], bool],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a flag to a command for each field of :class:`Options` that ``fields`` accepts.

    The command receives the flags that were given in ``values``, and its other parameters as usual.
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


def value_of(option: str, kind: type) -> dict[str, Any]:
    """Arguments for ``typer.Option`` that report a wrong type as an options file does."""

    def parse(word: str) -> Any:
        try:
            return kind(word)
        except ValueError:
            raise BadInput(wrong_kind(COMMAND_LINE, option, kind, word)) from None

    return {"parser": parse, "metavar": f"<{kind.__name__}>"}


def _flag(field: dataclasses.Field[Any]) -> inspect.Parameter:
    shown = str(field.default) if field.default not in ("", 0, False) else None
    help = field.metadata["help"] + (f" [{shown}]" if shown else "")
    kind: Any = type(field.default)
    option = typer.Option(
        help=help,
        show_default=False,
        rich_help_panel=field.metadata["group"],
        **(value_of(field.name, kind) if kind in (int, float) else {}),
    )
    annotation: Any = Annotated[kind | None, option]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )
