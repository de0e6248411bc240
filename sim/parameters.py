"""Types of command line options: durations and shares, with the messages of `InvalidConfig`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from edgewater.base.errors import InvalidConfig
from edgewater.base.quantities import duration_ms, fraction


class Duration(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else duration_ms(value, flag(param), InvalidConfig)


class Fraction(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    """A percentage, or a fraction from 0 to 1, validated by `check`."""

    name = "percentage"

    def __init__(self, check: Callable[[object, str, type[InvalidConfig]], float]) -> None:
        self._check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        share = fraction(value)
        if share is None:
            try:
                share = float(value)
            except ValueError as exc:
                raise InvalidConfig(flag(param), value, "a percentage such as 5%, or 0.05") from exc
        return self._check(share, flag(param), InvalidConfig)


def flag(param: click.Parameter | None) -> str:
    """The option as the user writes it, for messages."""
    return param.opts[0] if param else ""


def chosen_names(texts: Iterable[str], flag: str, known: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
    """Returns the names that a repeatable flag selects; also accepts `all` and lists with commas.

    Raises:
        InvalidConfig: an unknown name.
    """
    chosen: list[str] = []
    for name in [part.strip() for text in texts for part in text.split(",")]:
        if name != "all" and name not in known:
            raise InvalidConfig(flag, name, f"one of {', '.join(known)}, or all")
        chosen += known if name == "all" else [name]
    return tuple(dict.fromkeys(chosen or default))
