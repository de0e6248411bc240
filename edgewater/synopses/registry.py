"""The functions that a measure may name, and the stacks they build.

A function ties a name in a query to a kind of `Stack`. Reading bytes goes by the stack's `kind`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa

from edgewater.errors import InvalidInput, InvalidQuery, UnsupportedVersion
from edgewater.streams import type_name
from edgewater.synopses.base import Stack
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

if TYPE_CHECKING:
    from edgewater.synopses.sampling.sample_functions import SampleFunction

Parameters = tuple[tuple[str, Any], ...]
"""Parameters of a measure, all of them, defaults filled in, in the function's order."""

ITEM_TYPES = ("string", "int64", "float64", "bool")
"""Argument types of functions whose values are things that are equal or not."""

MAX_STATE_BYTES = 3 << 20
"""Memory of one group of a measure of fixed size: an entry must fit a frame."""
MAX_SAMPLE_SIZE = 1 << 16
"""Records of a group's sample, for the same reason."""
MAX_ENTRY_BYTES = (4 << 20) - (128 << 10)
"""What all measures of one group may take together: a center's default `max_frame`, less room for the rest."""


class Required:
    """The default of a parameter that must be given."""

    def __repr__(self) -> str:
        return "(needed)"


REQUIRED = Required()


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

    @classmethod
    def whole(cls, default: Any, low: int, high: int) -> Parameter:
        """A whole number from `low` to `high`."""

        def read(value: Any) -> int:
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError
            return value

        return cls(default, read, f"a whole number from {low} to {high}")

    @classmethod
    def number(cls, default: Any, low: float = -math.inf, high: float = math.inf, accepted: str = "") -> Parameter:
        """A finite number from `low` to `high`, both included."""

        def read(value: Any) -> float:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError
            if not math.isfinite(value) or not low <= value <= high:
                raise ValueError
            return float(value)

        bounded = math.isfinite(low) and math.isfinite(high)
        return cls(default, read, accepted or (f"a number from {low:g} to {high:g}" if bounded else "a finite number"))

    @classmethod
    def power_of_two(cls, default: Any, low: int, high: int) -> Parameter:
        """A power of two from `low` to `high`."""
        whole = cls.whole(default, low, high)

        def read(value: Any) -> int:
            if whole.read(value) & (value - 1):
                raise ValueError
            return int(value)

        return cls(default, read, f"a power of two from {low} to {high}")

    @classmethod
    def share(cls, default: Any) -> Parameter:
        """A number between 0 and 1, ends excluded."""
        return cls.number(default, math.ulp(0.0), math.nextafter(1, 0), "a number between 0 and 1, such as 0.01")


Sizing = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Turns a goal, such as ``{"epsilon": 0.01}``, into parameters. Raises InvalidInput naming the goal's field."""


@dataclass(frozen=True, slots=True)
class Function:
    """A measure function.

    Attributes:
        make: builds an empty stack for the parameters and the argument's type.
        goals: names by which the parameters can be asked for by what they shall achieve, such as
            ``epsilon``; each with its default, of which the first must be given.
        size_for: the parameters that reach goals. They take the goals' place when a query is read, so
            that all edges use the same ones.
        unavailable: why no query may name it, and where it can be used instead; empty: queries may.
        argument: whether an expression is needed, possible or forbidden; or "rows": one or several, together a row.
        types: names of the argument types it takes.
        error: how an error budget divides among edges — shares of a "sum", the whole for an
            "extremum" — or None if the function has no error function.
        sample: what the center runs on the rows that have come (`sample_functions`); None: the stack has the answer.
    """

    name: str
    make: Callable[[Parameters, pa.DataType | None], Stack]
    argument: Literal["none", "optional", "required", "rows"] = "required"
    types: tuple[str, ...] = ("int64", "float64")
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    error: Literal["sum", "extremum"] | None = None
    goals: Mapping[str, Parameter] = field(default_factory=dict)
    size_for: Sizing | None = None
    unavailable: str = ""
    sample: SampleFunction | None = None

    def read_parameters(self, positional: Sequence[Any], named: Mapping[str, Any], at: str) -> Parameters:
        """All parameters with defaults filled in. Raises InvalidQuery."""
        if self.unavailable:
            raise InvalidQuery(at, self.name, f"one of {', '.join(function_names())}", self.unavailable)
        names = list(self.parameters)
        accepted = f"{self.name} with {self._listed()}"
        if len(positional) > len(names):
            raise InvalidQuery(at, list(positional), accepted, "too many parameters")
        given = dict(zip(names, positional, strict=False))
        for name, value in named.items():
            if (name not in self.parameters and name not in self.goals) or name in given:
                raise InvalidQuery(f"{at}.{name}", value, accepted, "unknown or repeated parameter")
            given[name] = value
        known = {**self.parameters, **self.goals}
        read = {name: _read(known[name], value, f"{at}.{name}") for name, value in given.items()}
        read = self._sized(read, at)
        for name, parameter in self.parameters.items():
            if parameter.default is REQUIRED and name not in read:
                raise InvalidQuery(f"{at}.{name}", None, parameter.accepted, f"{self.name} needs it")
        result = tuple((name, read.get(name, parameter.default)) for name, parameter in self.parameters.items())
        self._try(result, at)
        return result

    def _listed(self) -> str:
        listed = ", ".join(f"{n}={p.default!r}" for n, p in self.parameters.items()) or "no parameters"
        return f"{listed}, or with {', '.join(self.goals)}" if self.goals else listed

    def _sized(self, read: dict[str, Any], at: str) -> dict[str, Any]:
        """With the parameters that reach the goals in the goals' place."""
        goals = {name: read.pop(name) for name in self.goals if name in read}
        if not goals or self.size_for is None:
            return read
        first = next(iter(self.goals))
        if first not in goals:
            raise InvalidQuery(f"{at}.{first}", None, self.goals[first].accepted, f"{', '.join(goals)} goes with it")
        try:
            sized = self.size_for({**{n: p.default for n, p in self.goals.items()}, **goals, **read})
        except InvalidInput as exc:
            raise InvalidQuery(f"{at}.{exc.field}", exc.value, exc.accepted, exc.reason) from exc
        for name in sized:
            if name in read:
                raise InvalidQuery(f"{at}.{name}", read[name], f"either {name} or {first}", f"{first} decides it")
        return {**read, **sized}

    def _try(self, parameters: Parameters, at: str) -> None:
        """Raises InvalidQuery for parameters that do not go together, or a state that no frame could carry."""
        try:
            stack = self.make(parameters, None)
        except InvalidInput as exc:
            raise InvalidQuery(f"{at}.{exc.field}", exc.value, exc.accepted, exc.reason) from exc
        empty = stack.nbytes
        stack.grow(1)
        if stack.nbytes - empty > MAX_STATE_BYTES:
            shown = f"{(stack.nbytes - empty) / (1 << 20):.1f} MiB per group"
            text = ", ".join(f"{n}={v}" for n, v in parameters)
            raise InvalidQuery(at, text, f"parameters of at most {MAX_STATE_BYTES >> 20} MiB per group", shown)

    def entry_bytes(self, parameters: Parameters, columns: int = 1) -> int:
        """About the most that one group's state takes in a frame, of rows with so many columns.

        Counters are written in 32 bits or fewer: an edge's slice has fewer than 2^32 records.
        """
        stack = self.make(parameters, None)
        empty = stack.nbytes
        stack.grow(1)
        given = dict(parameters)
        # Of a sampled number its keys and its value; a text takes more, which nobody knows before it is there.
        record = 8 * (columns + len(getattr(stack, "key_types", ())))
        records = int(given.get("size", given.get("limit", 0)))
        return (stack.nbytes - empty) // (2 if stack.properties.linear else 1) + records * record

    def check_argument(self, data_type: pa.DataType | None, at: str) -> None:
        """Raises InvalidQuery unless the function takes an argument of this type."""
        if self.argument == "rows":
            return  # which are numbers, or they would not have been bound (`edgewater.expressions.bind_row`)
        if data_type is not None and type_name(data_type) not in self.types:
            raise InvalidQuery(
                at,
                type_name(data_type),
                f"an argument of type {' or '.join(self.types)}",
                f"{self.name} does not take this type",
            )


def require_fit(sizes: Mapping[str, int]) -> None:
    """Raises InvalidQuery, with the size of each, unless one group of all measures together fits a frame.

    For new queries: one that is registered is served however large it is.

    Args:
        sizes: about the most bytes that each measure's state takes of one group.
    """
    if sum(sizes.values()) > MAX_ENTRY_BYTES:
        largest = sorted(sizes.items(), key=lambda one: -one[1])
        shown = ", ".join(f"{name} {size / (1 << 20):.1f} MiB" for name, size in largest[:8])
        raise InvalidQuery(
            "measures",
            shown,
            f"measures of at most {MAX_ENTRY_BYTES / (1 << 20):.1f} MiB together, or some in another query",
            "a group's entry must fit a frame",
        )


def _read(parameter: Parameter, value: Any, at: str) -> Any:
    try:
        return parameter.read(value)
    except (ValueError, TypeError, OverflowError) as exc:
        raise InvalidQuery(at, value, parameter.accepted) from exc


_FUNCTIONS: dict[str, Function] = {}
_ALIASES: dict[str, str] = {}
_KINDS: dict[str, type[Stack]] = {}


class Extensions(Protocol):
    """Packages of users that bring functions and kinds. They register them when they are loaded."""

    def load(self) -> None:
        """Loads all of them, once; later calls do nothing."""

    def hint(self) -> str:
        """Which packages were loaded or failed, for the end of an error message."""


_extensions: list[Callable[[], Extensions]] = []


def add_extensions(current: Callable[[], Extensions]) -> None:
    """Asks the extensions that `current` returns for every name and kind that is not registered."""
    _extensions.append(current)


def _load_extensions() -> None:
    for current in _extensions:
        current().load()


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


def is_function(name: str) -> bool:
    """Whether a function or an alias is registered, plugins' only once they are loaded."""
    return name in _FUNCTIONS or name in _ALIASES


def is_kind(name: str) -> bool:
    """Whether a kind is registered, plugins' only once they are loaded."""
    return name in _KINDS


def function_named(name: str) -> Function | None:
    """The function of this name or alias, also one that a user's package brings (`plugins`)."""
    if not is_function(name):
        _load_extensions()
    return _FUNCTIONS.get(_ALIASES.get(name, name))


def function_names() -> list[str]:
    """The functions that queries may name, plugins' included."""
    _load_extensions()
    return sorted(name for name, function in _FUNCTIONS.items() if not function.unavailable)


def item_type(data_type: pa.DataType | None) -> str | None:
    """The name of an argument's type, as item stacks take it; None while it is not known."""
    return None if data_type is None else type_name(data_type)


def stack_from_message(message: SynopsisMessage) -> Stack:
    """Raises UnsupportedVersion for an unknown kind, CorruptSynopsis for bad contents."""
    if not is_kind(message.kind):
        _load_extensions()
    kind = _KINDS.get(message.kind)
    if kind is None:
        known = ", ".join(sorted(_KINDS))
        hint = "; ".join(current().hint() for current in _extensions)
        raise UnsupportedVersion(
            f"synopsis kind {message.kind!r} is not known to this release (it knows {known}); {hint}"
        )
    return kind.from_message(message)
