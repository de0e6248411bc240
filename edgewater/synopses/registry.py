"""The registry of query functions and of kinds of stack.

A `Function` maps a name in a query to the `Stack` that it builds. `stack_from_message` reads a stack by the `kind` in
its message. Every module of stacks registers its own functions and kinds when it is imported; the registry itself
imports no kind. Plugins are registered when an unknown name or kind is looked up (`add_plugins`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import pyarrow as pa

from edgewater.base.errors import (
    CorruptSynopsis,
    InvalidInput,
    InvalidQuery,
    SynopsisError,
    UnsupportedVersion,
    did_you_mean,
)
from edgewater.base.streams import type_name
from edgewater.synopses.base import NUMBER_TYPES, Question, SampleFunction, Stack
from edgewater.synopses.checks import check_power_of_two, check_whole
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

Parameters = tuple[tuple[str, Any], ...]
"""All parameters of a measure as (name, value), with defaults filled in, in the function's order."""

MAX_STATE_BYTES = 3 << 20
"""Maximum memory of one group of a measure of fixed size: one group must fit into a frame."""
MAX_SAMPLE_SIZE = 1 << 16
"""Maximum records of a group's sample, for the same reason."""
MAX_ENTRY_BYTES = (4 << 20) - (128 << 10)
"""Maximum bytes of all measures of one group: a center's default `max_frame`, less room for the other parts of the
frame."""


class Required:
    """Stands in place of a default: the parameter has none."""

    def __repr__(self) -> str:
        return "(needed)"


REQUIRED = Required()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a function: its default, and the check of a value.

    Attributes:
        read: returns the value in its canonical type, or raises ValueError.
        accepted: describes accepted values, for the error message.
    """

    default: Any
    read: Callable[[Any], Any]
    accepted: str

    @classmethod
    def whole(cls, default: Any, low: int, high: int) -> Parameter:
        read = partial(check_whole, "", low=low, high=high)
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
        read = partial(check_power_of_two, "", low=low, high=high)
        return cls(default, read, f"a power of two from {low} to {high}")

    @classmethod
    def fraction(cls, default: Any) -> Parameter:
        """A number between 0 and 1, both excluded."""
        return cls.number(default, math.ulp(0.0), math.nextafter(1, 0), "a number between 0 and 1, such as 0.01")


Sizing = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Computes parameters from goals, such as ``{"epsilon": 0.01}``. Raises InvalidInput with the goal's field."""


_ROWS_BEYOND_ROOM = 4096  # derived: more than the room of an empty stack


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a query's measure may name.

    Attributes:
        make: builds an empty stack for the parameters and the argument's type; with `seeded`, also for the seed.
        argument: whether an expression is required, optional or forbidden; or "rows": one or several expressions, which
            together are a row.
        types: names of the accepted argument types.
        error: how an error budget divides among edges: a "sum" in shares, an "extremum" whole; None: the stack has no
            error function.
        goals: accuracy goals that a query may give in place of parameters, such as ``epsilon``, each with its default;
            the first goal is required.
        size_for: computes parameters from goals. They replace the goals when a query is read, so that all edges use the
            same parameters.
        unavailable: the reason why no query may name it, and where it can be used instead; empty: queries may name it.
        sample: the function that the center evaluates on the sampled rows; None: the stack answers.
        exact: its values are exact, except for a stated rounding.
        seeded: its state depends on a seed, of a hash or of random choices.
        question: returns the question that a measure's value answers, from its parameters; None: the stack's default.
    """

    name: str
    make: Callable[..., Stack]
    argument: Literal["none", "optional", "required", "rows"] = "required"
    types: tuple[str, ...] = NUMBER_TYPES
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    error: Literal["sum", "extremum"] | None = None
    goals: Mapping[str, Parameter] = field(default_factory=dict)
    size_for: Sizing | None = None
    unavailable: str = ""
    sample: SampleFunction | None = None
    exact: bool = False
    seeded: bool = False
    question: Callable[[Parameters], Question] | None = None

    def stack(self, parameters: Parameters, data_type: pa.DataType | None, seed: int | None = None) -> Stack:
        """Builds an empty stack.

        Args:
            data_type: the argument's type; None: not known yet, or no argument.
            seed: None: the default, which is public.
        """
        if self.seeded and seed is not None:
            return self.make(parameters, data_type, seed)
        return self.make(parameters, data_type)

    def read_parameters(self, positional: Sequence[Any], named: Mapping[str, Any], at: str) -> Parameters:
        """Returns all parameters, with defaults filled in. Raises InvalidQuery."""
        if self.unavailable:
            raise InvalidQuery(at, self.name, f"one of {', '.join(function_names())}", self.unavailable)
        names = list(self.parameters)
        accepted = f"{self.name} with {self._listed()}"
        if len(positional) > len(names):
            raise InvalidQuery(at, list(positional), accepted, "too many parameters")
        values = dict(zip(names, positional, strict=False))
        for name, value in named.items():
            if (name not in self.parameters and name not in self.goals) or name in values:
                near = did_you_mean(name, {**self.parameters, **self.goals}) if name not in values else ""
                raise InvalidQuery(f"{at}.{name}", value, accepted, f"unknown or repeated parameter{near}")
            values[name] = value
        known = {**self.parameters, **self.goals}
        read = {name: _read(known[name], value, f"{at}.{name}") for name, value in values.items()}
        read = self._with_goals_resolved(read, at)
        for name, parameter in self.parameters.items():
            if parameter.default is REQUIRED and name not in read:
                raise InvalidQuery(f"{at}.{name}", None, parameter.accepted, f"{self.name} requires it")
        result = tuple((name, read.get(name, parameter.default)) for name, parameter in self.parameters.items())
        self._check_state_size(result, at)
        return result

    def _listed(self) -> str:
        listed = ", ".join(f"{n}={p.default!r}" for n, p in self.parameters.items()) or "no parameters"
        return f"{listed}, or with {', '.join(self.goals)}" if self.goals else listed

    def _with_goals_resolved(self, read: dict[str, Any], at: str) -> dict[str, Any]:
        """Replaces goals by the parameters that reach them."""
        goals = {name: read.pop(name) for name in self.goals if name in read}
        if not goals or self.size_for is None:
            return read
        first = next(iter(self.goals))
        if first not in goals:
            raise InvalidQuery(f"{at}.{first}", None, self.goals[first].accepted, f"{', '.join(goals)} requires it")
        try:
            sized = self.size_for({**{n: p.default for n, p in self.goals.items()}, **goals, **read})
        except InvalidInput as exc:
            raise InvalidQuery(f"{at}.{exc.field}", exc.value, exc.accepted, exc.reason) from exc
        for name in sized:
            if name in read:
                raise InvalidQuery(f"{at}.{name}", read[name], f"either {name} or {first}", f"{first} determines it")
        return {**read, **sized}

    def _check_state_size(self, parameters: Parameters, at: str) -> None:
        """Raises InvalidQuery for parameters that contradict each other, or a state too large for a frame."""
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
        """Estimates the maximum size of one group's state in a frame, for rows of this many columns.

        Counters are written in 32 bits or fewer, since an edge's slice has fewer than 2^32 records.
        """
        stack = self.make(parameters, None)
        empty, rows = stack.nbytes, 1
        stack.grow(rows)
        if stack.nbytes == empty:
            # A small state fits into what an empty stack has room for.
            rows = _ROWS_BEYOND_ROOM
            stack.grow(rows)
        values = dict(parameters)
        # A sampled number takes its keys and its value. Strings take more; their lengths are not known in advance.
        record = 8 * (columns + len(getattr(stack, "key_types", ())))
        records = int(values.get("size", values.get("limit", 0)))
        return -(-(stack.nbytes - empty) // (rows * (2 if stack.properties.linear else 1))) + records * record

    def check_argument(self, data_type: pa.DataType | None, at: str) -> None:
        """Raises InvalidQuery unless the function takes an argument of this type."""
        if self.argument == "rows":
            return  # binding has checked that all are numbers (`edgewater.model.expressions.bind_row`)
        if data_type is not None and type_name(data_type) not in self.types:
            accepted = f"an argument of type {' or '.join(self.types)}"
            if type_name(data_type) == "bool":
                accepted = f"{self.name}(if(condition, 1, 0)), or {accepted}"
            raise InvalidQuery(at, type_name(data_type), accepted, f"{self.name} does not take this type")


def require_fit(sizes: Mapping[str, int]) -> None:
    """Raises InvalidQuery, with the largest sizes, unless one group of all measures fits into a frame.

    Called only for new queries: a registered query is served whatever its size.

    Args:
        sizes: `entry_bytes` per measure.
    """
    if sum(sizes.values()) > MAX_ENTRY_BYTES:
        largest = sorted(sizes.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {size / (1 << 20):.1f} MiB" for name, size in largest[:8])
        accepted = f"measures of at most {MAX_ENTRY_BYTES / (1 << 20):.1f} MiB together, or some in another query"
        reason = "a group must fit into a frame"
        raise InvalidQuery("measures", shown, accepted, reason)


def _read(parameter: Parameter, value: Any, at: str) -> Any:
    try:
        return parameter.read(value)
    except (ValueError, TypeError, OverflowError, InvalidInput) as exc:
        raise InvalidQuery(at, value, parameter.accepted) from exc


_FUNCTIONS: dict[str, Function] = {}
_ALIASES: dict[str, str] = {}
_KINDS: dict[str, type[Stack]] = {}


class PluginLookup(Protocol):
    """Third-party functions and kinds, which register themselves when they are loaded."""

    def load(self) -> None:
        """Loads all functions and kinds; later calls do nothing."""

    def hint(self) -> str:
        """Returns the packages that were loaded or failed, for the end of an error message."""


_plugins: list[Callable[[], PluginLookup]] = []


def add_plugins(installed: Callable[[], PluginLookup]) -> None:
    """Adds a source of plugins. `installed` is called when a name or kind is not registered."""
    _plugins.append(installed)


def _load_plugins() -> None:
    for installed in _plugins:
        installed().load()


def register_function(function: Function, *aliases: str) -> None:
    """Registers a function under its name and aliases. Raises ValueError if a name is registered already."""
    for name in (function.name, *aliases):
        if name in _FUNCTIONS or name in _ALIASES:
            raise ValueError(f"function {name} is registered already")
    _FUNCTIONS[function.name] = function
    _ALIASES.update(dict.fromkeys(aliases, function.name))


def register_kind(stack: type[Stack]) -> None:
    """Registers a kind of stack, so that its messages can be read. Raises ValueError if the kind is taken."""
    if stack.kind in _KINDS:
        raise ValueError(f"kind {stack.kind} is registered already")
    _KINDS[stack.kind] = stack


def is_function(name: str) -> bool:
    """Whether a function or an alias is registered; does not load plugins."""
    return name in _FUNCTIONS or name in _ALIASES


def is_kind(name: str) -> bool:
    """Whether a kind is registered; does not load plugins."""
    return name in _KINDS


def function_named(name: str) -> Function | None:
    """Returns the function of this name or alias, including plugins; None: there is none."""
    if not is_function(name):
        _load_plugins()
    return _FUNCTIONS.get(_ALIASES.get(name, name))


def function_names() -> list[str]:
    """Returns the sorted names of the functions that queries may use, including plugins."""
    _load_plugins()
    return sorted(name for name, function in _FUNCTIONS.items() if not function.unavailable)


_QUANTILES = "quantile(x, 0.99), or quantiles, which answers any quantile"
_MEANT = {
    "approx_count_distinct approx_distinct count_distinct nunique uniq hll": "distinct",
    "percentile percentile_approx approx_percentile approx_quantile percentile_cont median": _QUANTILES,
    "stddev stddev_samp stddev_pop stdev std": "var, the square of it",
    "count_if countif count_where": "sum(if(condition, 1, 0))",
    "sum_if sumif": "sum(if(condition, x, 0))",
    "avg_if avgif mean_if": "mean(if(condition, x, null))",
    "ratio share proportion rate": "mean(if(condition, 1, 0))",
    "topk approx_top_k most_frequent mode": "top_k",
}
"""By names that other systems give to functions, what to write instead."""


def meant_function(name: str) -> str:
    """Returns ``, did you mean distinct?`` for a name that is no function; empty if no function has a similar name."""
    if re.fullmatch(r"p\d{1,2}(_?\d+)?", name):
        return f", did you mean {_QUANTILES}?"
    if (meant := next((meant for names, meant in _MEANT.items() if name in names.split()), None)) is not None:
        return f", did you mean {meant}?"
    return did_you_mean(name, [*function_names(), *_ALIASES])


def kind_named(name: str) -> type[Stack] | None:
    """Returns the kind of stack of this name; does not load plugins."""
    return _KINDS.get(name)


def stack_from_message(message: SynopsisMessage) -> Stack:
    """Reads a stack of any kind. Raises UnsupportedVersion for an unknown kind, CorruptSynopsis for bad contents."""
    if not is_kind(message.kind):
        _load_plugins()
    kind = _KINDS.get(message.kind)
    if kind is None:
        known = ", ".join(sorted(_KINDS))
        hint = "; ".join(installed().hint() for installed in _plugins)
        raise UnsupportedVersion(
            f"synopsis kind {message.kind!r} is not known to this release (it knows {known}); {hint}"
        )
    try:
        return kind.from_message(message)
    except SynopsisError:
        raise
    except Exception as exc:
        if kind.__module__.startswith("edgewater."):
            raise
        # A third-party library may raise any exception for foreign bytes.
        raise CorruptSynopsis(f"{message.kind}: {type(exc).__name__}: {exc}") from exc
