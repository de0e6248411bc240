"""The functions that a measure may name, and the stacks they build.

A function ties a name in a query to a kind of `Stack`. Reading bytes goes by the stack's `kind`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from edgewater.errors import InvalidQuery, UnsupportedVersion
from edgewater.streams import type_name
from edgewater.synopses.base import Stack
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

Parameters = tuple[tuple[str, Any], ...]
"""Parameters of a measure, all of them, defaults filled in, in the function's order."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a function: its default, and how a value is checked.

    Attributes:
        read: returns the value in its canonical type, or raises ValueError.
        accepted: what is right, for the error message.
    """

    default: Any
    read: Callable[[Any], Any]
    accepted: str


@dataclass(frozen=True, slots=True)
class Function:
    """A measure function.

    Attributes:
        make: builds an empty stack for the parameters and the argument's type.
        argument: whether an expression is needed, possible or forbidden.
        types: names of the argument types it takes.
        error: how an error budget divides among edges — shares of a "sum", the whole for an
            "extremum" — or None if the function has no error function.
    """

    name: str
    make: Callable[[Parameters, pa.DataType | None], Stack]
    argument: Literal["none", "optional", "required"] = "required"
    types: tuple[str, ...] = ("int64", "float64")
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    error: Literal["sum", "extremum"] | None = None

    def read_parameters(self, positional: Sequence[Any], named: Mapping[str, Any], at: str) -> Parameters:
        """All parameters with defaults filled in. Raises InvalidQuery."""
        names = list(self.parameters)
        listed = ", ".join(f"{n}={p.default!r}" for n, p in self.parameters.items()) or "no parameters"
        accepted = f"{self.name} with {listed}"
        if len(positional) > len(names):
            raise InvalidQuery(at, list(positional), accepted, "too many parameters")
        given = dict(zip(names, positional, strict=False))
        for name, value in named.items():
            if name not in self.parameters or name in given:
                raise InvalidQuery(f"{at}.{name}", value, accepted, "unknown or repeated parameter")
            given[name] = value
        result = []
        for name, parameter in self.parameters.items():
            try:
                value = parameter.read(given[name]) if name in given else parameter.default
            except (ValueError, TypeError) as exc:
                raise InvalidQuery(f"{at}.{name}", given[name], parameter.accepted) from exc
            result.append((name, value))
        return tuple(result)

    def check_argument(self, data_type: pa.DataType | None, at: str) -> None:
        """Raises InvalidQuery unless the function takes an argument of this type."""
        if data_type is not None and type_name(data_type) not in self.types:
            raise InvalidQuery(
                at,
                type_name(data_type),
                f"an argument of type {' or '.join(self.types)}",
                f"{self.name} does not take this type",
            )


_FUNCTIONS: dict[str, Function] = {}
_ALIASES: dict[str, str] = {}
_KINDS: dict[str, type[Stack]] = {}


def register_function(function: Function, *aliases: str) -> None:
    """Makes a function known to queries. A name is registered once."""
    for name in (function.name, *aliases):
        if name in _FUNCTIONS or name in _ALIASES:
            raise ValueError(f"function {name} is registered already")
    _FUNCTIONS[function.name] = function
    _ALIASES.update(dict.fromkeys(aliases, function.name))


def register_kind(stack: type[Stack]) -> None:
    """Makes a kind of stack readable from bytes."""
    if stack.kind in _KINDS:
        raise ValueError(f"kind {stack.kind} is registered already")
    _KINDS[stack.kind] = stack


def function_named(name: str) -> Function | None:
    return _FUNCTIONS.get(_ALIASES.get(name, name))


def function_names() -> list[str]:
    return sorted(_FUNCTIONS)


def stack_from_message(message: SynopsisMessage) -> Stack:
    """Raises UnsupportedVersion for an unknown kind, CorruptSynopsis for bad contents."""
    kind = _KINDS.get(message.kind)
    if kind is None:
        known = ", ".join(sorted(_KINDS))
        raise UnsupportedVersion(f"synopsis kind {message.kind!r} is not known to this release (it knows {known})")
    return kind.from_message(message)


from edgewater.synopses import (  # noqa: E402, F401  (they register themselves)
    aggregates,
    bernoulli,
    biased_reservoir,
    bloom,
    count_min,
    cuckoo,
    ddsketch,
    equi_depth,
    equi_width,
    fast_agms,
    fifo,
    hyperloglog,
    kll,
    reservoir,
    top_k,
)
