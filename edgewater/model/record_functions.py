"""Scalar functions that plugins provide through the entry-point group `edgewater.functions`.

An entry point names a `RecordFunction`, or a tuple of them. Any expression of a query may call one:
``sum(score(text))``, ``where: is_bot(agent)``. Plugins are loaded when an expression calls a function that is not built
in. So an edge imports no plugin if its queries call no such function.

A function must be pure, because an edge that recovers calls it again on the journaled records, and must build the same
frames. A failed call affects only its own values. They become null, and `CallFailures` counts them by reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import sqlglot
from sqlglot import exp

from edgewater.base.plugins import NAME, InvalidPlugin, PluginLoader, PluginOrigin
from edgewater.base.streams import COLUMN_TYPES
from edgewater.synopses import plugins, registry

GROUP = "edgewater.functions"
MAX_DETAIL = 500
"""The largest length of an exception's message, in characters. Longer messages are cut, because some contain a whole
batch.
"""


class RecordFunctionWarning(UserWarning):
    """An entry point of `edgewater.functions` was not loaded. Queries that call its functions are refused."""


class FunctionCallError(Exception):
    """A call raised an exception or returned an invalid result.

    Attributes:
        reason: a label of low cardinality: the exception's class, ``wrong type`` or ``wrong length``.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RecordFunction:
    """A deterministic function of a record's values, without side effects.

    Attributes:
        name: the name in queries, in lower case. It must not be a name in SQL or the name of a measure's function.
        arguments: the argument types, one or more names of `COLUMN_TYPES`. int64 arguments are widened to float64.
        result: the name of the result's type.
        evaluate: takes one Arrow array per argument, all of the same length of at least 1 and without nulls. Returns an
            Arrow array of this length and of the result's type. NaN and infinities become null.
        expensive: whether a call takes so long per record (10 µs or more) that a query with an accuracy should process
            only a sample of the records.
    """

    name: str
    arguments: tuple[str, ...]
    result: str
    evaluate: Callable[..., Any]
    expensive: bool = True

    def __call__(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Returns the value of each record; null for a record with a null argument, which is not passed to `evaluate`.

        Args:
            columns: one array per argument, in the types of `arguments`, all of the same length.

        Raises:
            FunctionCallError: `evaluate` raised an exception, or did not return one value of the right type per record.
        """
        known = None
        for column in columns:
            if column.null_count:
                valid = column.is_valid()
                known = valid if known is None else pc.and_(known, valid)
        if known is None:
            return self._checked(columns)
        good = self._checked([column.filter(known) for column in columns])
        # The index of each record among the evaluated records. A null index gives null.
        return good.take(pc.if_else(known, pc.subtract(pc.cumulative_sum(known.cast(pa.int64())), 1), None))

    def _checked(self, columns: Sequence[pa.Array]) -> pa.Array:
        count, expected = len(columns[0]), COLUMN_TYPES[self.result]
        if not count:
            return pa.array([], expected)
        values = self._called(columns)
        returned = values.type if isinstance(values, pa.Array) else f"a {type(values).__name__}"
        if returned != expected:
            raise FunctionCallError("wrong type", f"it returned {returned}; expected an Arrow array of {expected}")
        if len(values) != count:
            raise FunctionCallError("wrong length", f"it returned {len(values)} values for {count} records")
        if self.result == "float64":
            return pc.if_else(pc.is_finite(values), values, None)
        return values

    def _called(self, columns: Sequence[pa.Array]) -> Any:
        try:
            values = self.evaluate(*columns)
            if isinstance(values, pa.ChunkedArray):
                values = values.combine_chunks()
            if isinstance(values, pa.Array):
                values.validate()
        except KeyboardInterrupt:
            raise
        # BaseException: a panic in Rust code or sys.exit in third-party code must not stop an agent.
        except BaseException as exc:
            raise FunctionCallError(type(exc).__name__, f"{type(exc).__name__}: {_message(exc)}") from exc
        return values


def _message(exc: BaseException) -> str:
    """Returns the truncated message of an exception of third-party code, whose `__str__` may fail."""
    try:
        text = str(exc)
    except Exception:
        return "(its message cannot be read)"
    return text if len(text) <= MAX_DETAIL else text[:MAX_DETAIL] + "…"


@dataclass(frozen=True, slots=True)
class FailedCalls:
    """Failed calls of one function for one reason.

    Attributes:
        detail: message of the first failure.
    """

    function: str
    reason: str
    detail: str
    calls: int


class CallFailures:
    """Counts failed calls by function and reason."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, str], tuple[str, int]] = {}

    def note(self, function: str, failure: FunctionCallError) -> None:
        """Counts a failed call."""
        key = function, failure.reason
        detail, calls = self._failed.get(key, (str(failure), 0))
        self._failed[key] = detail, calls + 1

    def take(self) -> list[FailedCalls]:
        """Returns and resets the counts since the last call, in the order of their first occurrence."""
        failed, self._failed = self._failed, {}
        return [FailedCalls(name, reason, detail, calls) for (name, reason), (detail, calls) in failed.items()]


def values_or_null(function: RecordFunction, columns: Sequence[pa.Array], failures: CallFailures) -> pa.Array:
    """Returns the value of each record. A failed call is counted in `failures` and gives null for all its records."""
    try:
        return function(columns)
    except FunctionCallError as failure:
        failures.note(function.name, failure)
        return pa.nulls(len(columns[0]), COLUMN_TYPES[function.result])


class RecordFunctions(PluginLoader):
    """The functions of the entry points `edgewater.functions`.

    Attributes:
        functions: loaded functions by name.
    """

    group, provides, warning = GROUP, "functions", RecordFunctionWarning

    def __init__(self, find: Callable[[], Sequence[EntryPoint]] | None = None) -> None:
        super().__init__(find)
        self.functions: dict[str, RecordFunction] = {}

    def _register(self, provided: object, origin: PluginOrigin) -> None:
        functions = provided if isinstance(provided, tuple | list) else (provided,)
        for function in functions:
            if not isinstance(function, RecordFunction):
                raise InvalidPlugin(f"{function!r} is not a RecordFunction")
            _check(function)
            self._check_free(function.name, function.name in self.functions, "function")
        names = [f.name for f in functions]
        if len(set(names)) < len(names):
            raise InvalidPlugin("it provides two functions with the same name")
        self.functions.update(zip(names, functions, strict=True))
        self.origins.update(dict.fromkeys(names, origin))


def _check(function: RecordFunction) -> None:
    """Raises InvalidPlugin if the declaration is not complete, or if queries cannot call the function by its name."""
    name, types = function.name, ", ".join(COLUMN_TYPES)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidPlugin(f"function {name!r}: a name consists of lower-case letters, digits and _")
    if not isinstance(function.arguments, tuple) or not function.arguments:
        raise InvalidPlugin(
            f"function {name}: arguments is {function.arguments!r}; expected a tuple of one or more of {types}"
        )
    unknown = [t for t in (*function.arguments, function.result) if t not in COLUMN_TYPES]
    if unknown:
        raise InvalidPlugin(f"function {name}: {unknown} are not column types; expected {types}")
    if not callable(function.evaluate):
        raise InvalidPlugin(f"function {name}: evaluate is {function.evaluate!r}; expected a function of Arrow arrays")
    if not isinstance(function.expensive, bool):
        raise InvalidPlugin(f"function {name}: expensive is {function.expensive!r}; expected True or False")
    if not _is_free(name, len(function.arguments)):
        raise InvalidPlugin(f"function {name}: {name}(…) has another meaning in SQL; choose another name")
    if registry.is_function(name) and name not in plugins.INSTALLED.origins:
        raise InvalidPlugin(f"function {name}: a measure's function has this name; choose another one")


def _is_free(name: str, arguments: int) -> bool:
    """Returns whether the SQL parser treats a call of this name as the call of an unknown function."""
    try:
        tree = sqlglot.parse_one(f"{name}({', '.join(['x'] * arguments)})")
    except sqlglot.errors.SqlglotError:
        return False
    plain = isinstance(tree, exp.Anonymous) and all(isinstance(a, exp.Column) for a in tree.expressions)
    return plain and tree.name == name and len(tree.expressions) == arguments


def find(name: str) -> RecordFunction | None:
    """Returns the function that expressions call by this name, in any case; None if there is no such function."""
    INSTALLED.load()
    return INSTALLED.functions.get(name.lower())


def installed() -> Mapping[str, RecordFunction]:
    """Returns the functions that expressions may call in this process, by name, without the functions of SQL."""
    INSTALLED.load()
    return INSTALLED.functions


INSTALLED = RecordFunctions()
"""The functions installed in this process."""
