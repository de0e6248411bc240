"""Functions of a record that users' packages bring, found through the entry-point group `edgewater.functions`.

An entry point names a `RecordFunction`, or a tuple of them. Any expression of a query may call one:
``sum(score(text))``, ``where: is_bot(agent)``. They are looked for when an expression calls what the house does not
have: an edge whose queries call none never imports one.

A function must be pure. An edge that recovers calls it again on the records of its journal, and has to build the same
frames; a sampled record may be asked for or not. What it does wrong costs its own values and nothing else: they are
null, and `Failures` says how often and why.
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

from edgewater.plugins import NAME, Discovery, Origin, Unfit
from edgewater.streams import COLUMN_TYPES
from edgewater.synopses import plugins, registry

GROUP = "edgewater.functions"
MAX_DETAIL = 500
"""Characters of an exception's message that are kept: some have the whole batch in it."""


class RecordFunctionWarning(UserWarning):
    """An entry point of `edgewater.functions` cannot be used. Queries that call it are refused."""


class FunctionFailure(Exception):
    """A call gave no values.

    Attributes:
        reason: one of few words, the same for failures of one kind: ``ValueError``, ``wrong type``, ``wrong length``.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RecordFunction:
    """A function of a record's values. Pure: equal values in, equal values out, whenever and wherever it is called.

    Attributes:
        name: as queries call it, in lower case. Not a name that SQL or a measure has.
        arguments: their types, one or more names of `COLUMN_TYPES`. An int64 is widened where float64 is wanted.
        result: the name of the result's type.
        evaluate: gets an Arrow array per argument, of one length that is at least 1, without nulls, and returns
            an Arrow array of that length and of the result's type. NaN and infinities count as null.
        expensive: a record costs so much (some 10 µs or more) that a query with an accuracy should have a sample
            of records processed rather than all.
    """

    name: str
    arguments: tuple[str, ...]
    result: str
    evaluate: Callable[..., Any]
    expensive: bool = True

    def __call__(self, columns: Sequence[pa.Array]) -> pa.Array:
        """The value per record; null where an argument is, without a call for such records.

        Args:
            columns: of the types that `arguments` names, of one length.

        Raises:
            FunctionFailure: it raised, or gave something else than one value of the right type per record.
        """
        known = None
        for column in columns:
            if column.null_count:
                valid = column.is_valid()
                known = valid if known is None else pc.and_(known, valid)
        if known is None:
            return self._checked(columns)
        good = self._checked([column.filter(known) for column in columns])
        # Each record's place among those that it was called for; null takes null.
        return good.take(pc.if_else(known, pc.subtract(pc.cumulative_sum(known.cast(pa.int64())), 1), None))

    def _checked(self, columns: Sequence[pa.Array]) -> pa.Array:
        count, expected = len(columns[0]), COLUMN_TYPES[self.result]
        if not count:
            return pa.array([], expected)
        values = self._called(columns)
        given = values.type if isinstance(values, pa.Array) else f"a {type(values).__name__}"
        if given != expected:
            raise FunctionFailure("wrong type", f"it gave {given}; expected an Arrow array of {expected}")
        if len(values) != count:
            raise FunctionFailure("wrong length", f"it gave {len(values)} values for {count} records")
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
        # Also what is no Exception: a panic in a library's Rust code, sys.exit in a script. It must not stop an agent.
        except BaseException as exc:
            raise FunctionFailure(type(exc).__name__, f"{type(exc).__name__}: {_message(exc)}") from exc
        return values


def _message(exc: BaseException) -> str:
    """What an exception of a stranger's code says, however much it is, and whether or not it can say it."""
    try:
        text = str(exc)
    except Exception:
        return "(its message cannot be read)"
    return text if len(text) <= MAX_DETAIL else text[:MAX_DETAIL] + "…"


@dataclass(frozen=True, slots=True)
class Failed:
    """Calls of one function that failed for one reason.

    Attributes:
        detail: of the first of them.
    """

    function: str
    reason: str
    detail: str
    calls: int


class Failures:
    """Calls that failed since somebody asked. Their records have null."""

    def __init__(self) -> None:
        self._failed: dict[tuple[str, str], tuple[str, int]] = {}

    def note(self, function: str, failure: FunctionFailure) -> None:
        """Counts one."""
        key = function, failure.reason
        detail, calls = self._failed.get(key, (str(failure), 0))
        self._failed[key] = detail, calls + 1

    def take(self) -> list[Failed]:
        """What was counted since the last time, in the order of the first of each."""
        failed, self._failed = self._failed, {}
        return [Failed(name, reason, detail, calls) for (name, reason), (detail, calls) in failed.items()]


def values_or_null(function: RecordFunction, columns: Sequence[pa.Array], failures: Failures) -> pa.Array:
    """The value per record, as an expression has it. A call that fails is noted and gives null to all its records."""
    try:
        return function(columns)
    except FunctionFailure as failure:
        failures.note(function.name, failure)
        return pa.nulls(len(columns[0]), COLUMN_TYPES[function.result])


class RecordFunctions(Discovery):
    """The functions of the entry points `edgewater.functions`.

    Attributes:
        functions: by name, as far as they are loaded.
    """

    group, brings, warning = GROUP, "functions", RecordFunctionWarning

    def __init__(self, find: Callable[[], Sequence[EntryPoint]] | None = None) -> None:
        super().__init__(find)
        self.functions: dict[str, RecordFunction] = {}

    def _take(self, brought: object, origin: Origin) -> None:
        things = brought if isinstance(brought, tuple | list) else (brought,)
        for function in things:
            if not isinstance(function, RecordFunction):
                raise Unfit(f"{function!r} is no RecordFunction")
            _check(function)
            self._check_free(function.name, function.name in self.functions, "function")
        names = [f.name for f in things]
        if len(set(names)) < len(names):
            raise Unfit("it brings two functions of one name")
        self.functions.update(zip(names, things, strict=True))
        self.origins.update(dict.fromkeys(names, origin))


def _check(function: RecordFunction) -> None:
    """Raises Unfit unless queries can call it, and as what it says it is."""
    name, types = function.name, ", ".join(COLUMN_TYPES)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Unfit(f"function {name!r}: a name is lower-case letters, digits and _")
    if not isinstance(function.arguments, tuple) or not function.arguments:
        raise Unfit(f"function {name}: arguments is {function.arguments!r}; expected a tuple of one or more of {types}")
    unknown = [t for t in (*function.arguments, function.result) if t not in COLUMN_TYPES]
    if unknown:
        raise Unfit(f"function {name}: {unknown} are no column types; expected of {types}")
    if not callable(function.evaluate):
        raise Unfit(f"function {name}: evaluate is {function.evaluate!r}; expected a function of Arrow arrays")
    if not isinstance(function.expensive, bool):
        raise Unfit(f"function {name}: expensive is {function.expensive!r}; expected True or False")
    if not _is_free(name, len(function.arguments)):
        raise Unfit(f"function {name}: SQL means something else by {name}(…); choose another name")
    if registry.is_function(name) and name not in plugins.INSTALLED.origins:
        raise Unfit(f"function {name}: a measure's function has this name; choose another")


def _is_free(name: str, arguments: int) -> bool:
    """Whether the parser takes a call for that of a function it does not know, which is what expressions look up."""
    try:
        tree = sqlglot.parse_one(f"{name}({', '.join(['x'] * arguments)})")
    except sqlglot.errors.SqlglotError:
        return False
    plain = isinstance(tree, exp.Anonymous) and all(isinstance(a, exp.Column) for a in tree.expressions)
    return plain and tree.name == name and len(tree.expressions) == arguments


def named(name: str) -> RecordFunction | None:
    """The function that expressions call by this name, in whatever case."""
    INSTALLED.load()
    return INSTALLED.functions.get(name.lower())


def installed() -> Mapping[str, RecordFunction]:
    """All functions that expressions may call here besides those of SQL, by name."""
    INSTALLED.load()
    return INSTALLED.functions


INSTALLED = RecordFunctions()
"""Those of this process."""
