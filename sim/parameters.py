"""Types of command line options: durations, sizes and shares, with the messages of `InvalidConfig`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from edgewater.model.errors import InvalidConfig
from edgewater.model.quantities import duration_ms, fraction, size_bytes


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


class Size(click.ParamType):  # type: ignore[type-arg,unused-ignore]
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return value if isinstance(value, int) else size_bytes(value, flag(param), InvalidConfig)
