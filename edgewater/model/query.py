"""A query as a user writes it (`QuerySpec`), its validation, and its binding to a stream's columns.

A spec is validated in two steps. `QuerySpec.from_mapping` checks everything that does not depend on the stream's
columns. `QuerySpec.bind` checks columns and types against a stream. The center calls `bind` at the registration if it
knows the stream. Each edge calls it again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import pyarrow as pa
import yaml
from sqlglot import exp

from edgewater.arrivals.targets import NOT_PREDICTED
from edgewater.base.errors import InvalidInput, InvalidQuery, did_you_mean
from edgewater.base.plain_yaml import load_yaml
from edgewater.base.quantities import (
    duration_ms,
    format_duration,
    fraction,
    require_keys,
    require_serialisable,
    require_uncut,
    size_bytes,
)
from edgewater.base.streams import COLUMN_TYPES, MIN_TIME_MS, TIME_COLUMN
from edgewater.base.timestamps import TIME_ACCEPTED, parse_time, rfc3339
from edgewater.model import algebra
from edgewater.model.accuracy import Accuracy
from edgewater.model.binding import BoundExpression
from edgewater.model.byte_budget import COUNTED_BYTES, ByteBudget
from edgewater.model.caching import CacheSpec, format_fraction
from edgewater.model.computed import ComputedValue
from edgewater.model.derived import NO_ACCURACY, NO_BUDGET, derived_text, read_measures
from edgewater.model.expressions import bind, bind_condition, bind_row
from edgewater.model.lookups import TableLookup, read_lookups
from edgewater.model.measure import NAME, NAME_ACCEPTED, Measure
from edgewater.model.record_functions import CallFailures
from edgewater.model.syntax import MAX_EXPRESSIONS_LENGTH, check_calls, column_names, parse_sql
from edgewater.model.windows import ACCEPTED_IN_QUERIES, SessionWindow, SlicedWindow, SlidingWindow, Window
from edgewater.synopses import DEFAULT_SEED, EncodedKeys
from edgewater.synopses.missing_records import has_bounds

KEYS = dict.fromkeys("name from measures window".split(), True) | dict.fromkeys(
    "where group_by budget cache accuracy lateness edges since until seed priority lookup".split(), False
)
"""The keys of a query, and whether each is required."""
MAX_MEASURES = 32  # limit: CPU and bytes of a query
MAX_GROUP_COLUMNS = 16  # limit: CPU and bytes of a query
DEFAULT_LATENESS_MS = 0
DEFAULT_PRIORITY, MOST_PRIORITY = 10, 100  # default: priority
BEGINNING = "beginning"
_MARKS_OF_EXPRESSIONS = ("(", "||", '"')
"""If an entry of `group_by` contains one of these texts, it is an expression. Otherwise it is the name of a column."""
_HEXADECIMAL = re.compile(r"0x[0-9a-f]{1,16}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ErrorBudget:
    """The error that the center's answer may have per measure, over all edges together.

    Attributes:
        limits: absolute limits in the measure's unit. For a measure without an error function, the limit is the number
            of records that the answer may lack.
        relative: limits as a fraction of the group's true value, or of 1 if the true value is smaller than 1.
    """

    limits: tuple[tuple[str, float], ...]
    relative: tuple[tuple[str, float], ...] = ()

    @property
    def measures(self) -> frozenset[str]:
        """The names of the measures that have a limit."""
        return frozenset(name for name, _ in (*self.limits, *self.relative))

    def to_mapping(self) -> dict[str, float | str]:
        """Returns the limits as a user writes them."""
        return {**dict(self.limits), **{name: format_fraction(share) for name, share in self.relative}}


WITHHOLDS_GROUPS = (
    "edges withhold values below their shares of {limits}. So `data` may lack groups, or have none. `total` has all"
    " values, and `rest` says how much of them is in no group"
)
RELATIVE_SAVES_REPEATS = (
    "of a group's own value withholds no group: each edge sends every group at least once per window, unless its "
    "value is 0, as without a budget. It saves only updates that would be sent again; "
    "an absolute budget also saves small groups"
)


WITHOUT_BOUND = (
    "while edges withhold records, some values of this function have no bounds, so their intervals are null and the "
    "contract is not met; name the measure in budget.error to limit the records that it may lack, or leave it out"
)
WITHOUT_BOUND_LIMITED = (
    "the limit counts the records that the answer may lack; their effect on the value has no bound, so its intervals "
    "are null while edges withhold records"
)


@dataclass(frozen=True, slots=True)
class StalenessBudget:
    """The time after a window's end within which the center has an answer."""

    staleness_ms: int


@dataclass(frozen=True, slots=True)
class CombinedBudget:
    """An error budget and a staleness budget. Edges send the fewest bytes with which a timely answer is within the
    error.
    """

    error: ErrorBudget
    staleness: StalenessBudget


Budget = ErrorBudget | StalenessBudget | CombinedBudget | None


@dataclass(frozen=True, slots=True)
class BoundMeasure:
    measure: Measure
    argument: BoundExpression | None


@dataclass(frozen=True, slots=True)
class BoundQuery:
    """A spec bound to a stream's columns, whose expressions can be evaluated on batches.

    Attributes:
        keys: the columns of `group_by`.
        failures: counts failed calls of plugin functions in the expressions. The caller that evaluates the expressions
            reads and resets it.
    """

    spec: QuerySpec
    where: BoundExpression | None
    measures: tuple[BoundMeasure, ...]
    keys: tuple[BoundExpression, ...]
    failures: CallFailures = field(default_factory=CallFailures)

    @property
    def group_types(self) -> tuple[pa.DataType, ...]:
        return tuple(key.type for key in self.keys)

    def joined(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the stream's records with the columns of the query's lookups, which the other methods need."""
        for lookup in self.spec.lookups:
            batch = lookup.joined(batch)
        return batch

    def key_arrays(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Returns the key of each record, with one array per column of `group_by`."""
        return [key.array(batch) for key in self.keys]

    def encoded_keys(self, batch: pa.RecordBatch) -> EncodedKeys:
        """Returns the keys of the records in encoded form: each distinct value is stored once."""
        return EncodedKeys.of([key.encoded(batch) for key in self.keys], batch.num_rows)


@dataclass(frozen=True, slots=True)
class QuerySpec:
    """A query as a user writes it (`docs/reference/query.md`).

    Attributes:
        stream: the stream that the query reads (``from``).
        measures: those that edges ship.
        derived: measures that the center derives from these.
        where: SQL condition, or None.
        group_by: names of the columns of a group's key in answers.
        lateness_ms: event time after a window's end during which the window may be revised.
        edges: the expected edges, sorted; None for every edge that has the stream.
        since_ms: event time from which earlier records count, if edges have read them before the registration and can
            read them again; `MIN_TIME_MS` if all of them count; None if none of them counts.
        until_ms: event time at which the query ends. It has the windows that start before this time. None if it has no
            end.
        computed: by name, the SQL expressions of the columns of `group_by` that are not columns of the stream.
        byte_budget: the bytes of the query, beside `budget` or alone.
        priority: its weight where queries of an edge compete for the link, 1 to `MOST_PRIORITY`.
        lookups: the tables whose columns are added to the records.
        seed: seed of the hashes and random choices of the query's synopses and samples, 0 to 2^64 - 1; None for the
            default seed, which is public. A center draws a seed when it registers the query.
    """

    name: str
    stream: str
    measures: tuple[Measure, ...]
    window: SlicedWindow
    where: str | None = None
    group_by: tuple[str, ...] = ()
    budget: Budget = None
    accuracy: Accuracy | None = None
    cache: CacheSpec = field(default_factory=CacheSpec)
    lateness_ms: int = DEFAULT_LATENESS_MS
    edges: tuple[str, ...] | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    computed: tuple[tuple[str, str], ...] = ()
    priority: int = DEFAULT_PRIORITY
    byte_budget: ByteBudget | None = None
    derived: tuple[ComputedValue, ...] = ()
    lookups: tuple[TableLookup, ...] = ()

    @classmethod
    def from_yaml(cls, text: str) -> QuerySpec:
        """Reads a query that a user has written in YAML. Raises InvalidQuery, as for a query that is registered."""
        try:
            mapping = load_yaml(text)
        except yaml.YAMLError as exc:
            raise InvalidQuery("", text, "YAML", str(exc)) from exc
        spec = cls.from_mapping(mapping)
        for measure in spec.measures:
            measure.require_no_condition()
        return spec

    @classmethod
    def from_mapping(cls, mapping: object) -> QuerySpec:
        """Reads a query from a mapping with the keys of `docs/reference/query.md`.

        Raises:
            InvalidQuery: names the field, its value and what is accepted.
        """
        require_serialisable(mapping, InvalidQuery)
        require_uncut(mapping, InvalidQuery)
        q = require_keys(mapping, "", KEYS, InvalidQuery)
        name = _name(q["name"], "name")
        stream = _name(q["from"], "from")
        if not isinstance(q["measures"], Mapping) or not q["measures"]:
            raise InvalidQuery("measures", q["measures"], "at least one measure, such as {flights: count()}")
        group_by, computed = _group_by(q.get("group_by"))
        _check_length([q.get("where"), *q["measures"].values(), *(text for _, text in computed)])
        seed = _seed(q.get("seed"))
        measures, derived = read_measures({str(k): v for k, v in q["measures"].items()}, group_by)
        measures = tuple(replace(measure, seed=seed) for measure in measures)
        if (many := len(measures) + len(derived)) > MAX_MEASURES:
            raise InvalidQuery("measures", many, f"at most {MAX_MEASURES} measures")
        where = q.get("where")
        if where is not None:
            if not isinstance(where, str):
                raise InvalidQuery("where", where, "a SQL condition, such as status < 400")
            condition = parse_sql(where, "where")
            check_calls(condition, "where")
            where = condition.sql()
        lateness = q.get("lateness")
        shown = tuple(measure for measure in measures if not measure.part_of)
        _check_names([*(measure.name for measure in shown), *(value.name for value in derived)], group_by)
        window = algebra.require_sliced(Window.from_mapping(q["window"], ACCEPTED_IN_QUERIES))
        _require_shipped(q, measures, derived)
        accuracy = Accuracy.from_mapping(q.get("accuracy"), shown, window, group_by)
        budget, byte_budget = _budget(q.get("budget"), shown, accuracy)
        spec = cls(
            name=name,
            stream=stream,
            measures=measures,
            window=window,
            where=where,
            group_by=group_by,
            budget=budget,
            accuracy=accuracy,
            cache=CacheSpec.from_mapping(q.get("cache")),
            lateness_ms=DEFAULT_LATENESS_MS if lateness is None else duration_ms(lateness, "lateness", InvalidQuery),
            edges=_edges(q.get("edges")),
            since_ms=_since(q.get("since"), accuracy),
            until_ms=_time(q.get("until"), "until", TIME_ACCEPTED),
            computed=computed,
            priority=_priority(q.get("priority")),
            byte_budget=byte_budget,
            derived=derived,
            lookups=read_lookups(q.get("lookup")),
        )
        spec._check_byte_budget()
        algebra.check_algebra(spec)
        return spec

    @property
    def shown(self) -> tuple[str, ...]:
        """The names of the measures that answers show."""
        return (*(m.name for m in self.measures if not m.part_of), *(value.name for value in self.derived))

    @property
    def values(self) -> tuple[Measure | ComputedValue, ...]:
        """The measures that edges ship, then the derived ones."""
        return (*self.measures, *self.derived)

    @property
    def shipped(self) -> QuerySpec:
        """The query as edges get it: they need not know derived measures."""
        return replace(self, measures=tuple(replace(m, part_of="") for m in self.measures), derived=())

    @property
    def error_budget(self) -> ErrorBudget | None:
        """The error budget, alone or combined with a staleness budget."""
        budget = self.budget.error if isinstance(self.budget, CombinedBudget) else self.budget
        return budget if isinstance(budget, ErrorBudget) else None

    @property
    def staleness_budget(self) -> StalenessBudget | None:
        """The staleness budget, alone or combined with an error budget."""
        budget = self.budget.staleness if isinstance(self.budget, CombinedBudget) else self.budget
        return budget if isinstance(budget, StalenessBudget) else None

    def _check_byte_budget(self) -> None:
        budget = self.byte_budget
        if budget is None:
            return
        if self.accuracy is not None or isinstance(self.window, SessionWindow):
            accepted = "a query without an accuracy and without session windows"
            reason = "the bytes of reports of arrivals and of open sessions are not known in advance"
            raise InvalidQuery("budget.bytes", budget.to_value(), accepted, reason)
        budget.require_enough(self.name, [m.name for m in self.measures], self.window.slice_ms, self.edges)

    @property
    def saves_bytes(self) -> bool:
        """Whether edges send the fewest bytes that a combined budget permits, instead of sending as early as possible.

        With an accuracy, the staleness budget limits early answers, and the error budget limits later answers.
        """
        return isinstance(self.budget, CombinedBudget) and self.accuracy is None

    @property
    def may_withhold(self) -> bool:
        """Whether edges may withhold values. With an accuracy, edges withhold values only under an error budget."""
        has_budget = self.budget is not None or self.byte_budget is not None
        return has_budget and (self.accuracy is None or self.error_budget is not None)

    @property
    def tops_up_samples(self) -> bool:
        """Whether edges enlarge the samples of windows at their ends (`edge.arrivals.top_up`).

        The measure has to be expensive: other samples are drawn under overload. A window has to be one slice, so that
        one rate holds for all its records. Under a byte budget, a window's values may not be sent when it ends.
        """
        window, accuracy = self.window, self.accuracy
        if accuracy is None or accuracy.kind not in ("sum", "mean") or len(self.measures) != 1:
            return False
        is_tumbling = isinstance(window, SlidingWindow) and window.size_ms == window.every_ms
        return is_tumbling and self.measures[0].is_expensive and self.byte_budget is None

    @property
    def omits_values(self) -> bool:
        """Whether the query has a budget and no limit of the error: the bounds state what edges omit."""
        return self.error_budget is None and (self.staleness_budget is not None or self.byte_budget is not None)

    @property
    def early_accuracy(self) -> Accuracy | None:
        """The accuracy that early answers wait for.

        If the user's accuracy is for a synopsis or an extreme, the returned accuracy is for the number of records.
        """
        accuracy = self.accuracy
        if accuracy is None or accuracy.kind not in NOT_PREDICTED:
            return accuracy
        measures = [m for m in self.measures if m.name in accuracy.measures]
        budget = self.error_budget
        return accuracy.of_records(measures, 0.0 if budget is None else dict(budget.relative)[accuracy.measure])

    @property
    def notes(self) -> list[str]:
        """Notes about a valid query: limits of its budget that its writer may not expect."""
        budget = self.error_budget
        notes = [] if self.byte_budget is None else [f"budget.bytes: {COUNTED_BYTES}"]
        if budget is None:
            return notes
        notes += [
            f"budget.error.{name}: {format_fraction(share)} {RELATIVE_SAVES_REPEATS}" for name, share in budget.relative
        ]
        if limits := ", ".join(f"{name} {limit:,.15g}" for name, limit in budget.limits if limit):
            notes.insert(0, f"budget.error: {WITHHOLDS_GROUPS.format(limits=limits)}")
        named = budget.measures
        for measure in self.measures:
            if not has_bounds(measure.function.name, measure.parameters):
                at = (
                    f"budget.error.{measure.name}"
                    if measure.name in named
                    else f"measures.{measure.part_of or measure.name}"
                )
                notes.append(f"{at}: {WITHOUT_BOUND_LIMITED if measure.name in named else WITHOUT_BOUND}")
        return notes

    @property
    def seed(self) -> int | None:
        return self.measures[0].seed

    @property
    def sampling_seed(self) -> int:
        """The seed that decides which records a sampling edge processes."""
        return DEFAULT_SEED if self.seed is None else self.seed

    def with_seed(self, seed: int | None) -> QuerySpec:
        return replace(self, measures=tuple(replace(m, seed=seed) for m in self.measures))

    def asks_for(self, registered: QuerySpec) -> bool:
        """Returns whether registering this spec requests a registered query: both are equal, or this spec only lacks
        the seed.
        """
        return self == (registered if self.seed is not None else registered.with_seed(None))

    def to_mapping(self, *, seed: bool = True) -> dict[str, object]:
        """Returns the canonical mapping: ``QuerySpec.from_mapping(spec.to_mapping()) == spec``.

        Args:
            seed: whether to include the seed. Readers must not get it, because with the seed they could choose records
                that distort the answers.
        """
        result: dict[str, object] = {"name": self.name, "from": self.stream}
        if self.where is not None:
            result["where"] = self.where
        if self.group_by:
            computed = dict(self.computed)
            result["group_by"] = [{n: computed[n]} if n in computed else column_text(n) for n in self.group_by]
        shown = {m.name: m.to_text() for m in self.measures if not m.part_of}
        result["measures"] = shown | {value.name: derived_text(value, self.measures) for value in self.derived}
        result["window"] = self.window.to_mapping()
        budget: dict[str, object] = {}
        if (error := self.error_budget) is not None:
            budget["error"] = error.to_mapping()
        if (staleness := self.staleness_budget) is not None:
            budget["staleness"] = format_duration(staleness.staleness_ms)
        if self.byte_budget is not None:
            budget["bytes"] = self.byte_budget.to_value()
        if budget:
            result["budget"] = budget
        if self.accuracy is not None:
            result["accuracy"] = self.accuracy.to_mapping()
        if self.cache != CacheSpec():
            result["cache"] = self.cache.to_mapping()
        if self.lateness_ms:
            result["lateness"] = format_duration(self.lateness_ms)
        if self.edges is not None:
            result["edges"] = list(self.edges)
        if self.since_ms is not None:
            result["since"] = BEGINNING if self.since_ms == MIN_TIME_MS else rfc3339(self.since_ms)
        if self.until_ms is not None:
            result["until"] = rfc3339(self.until_ms)
        if self.priority != DEFAULT_PRIORITY:
            result["priority"] = self.priority
        if self.lookups:
            result["lookup"] = {lookup.table: lookup.to_mapping() for lookup in self.lookups}
        if seed and self.seed is not None:
            result["seed"] = f"{self.seed:#018x}"  # a text, because JSON readers round numbers beyond 2^53
        return result

    @property
    def newer_keys(self) -> list[str]:
        """The keys of the query that edges of release 0.3.0 refuse."""
        given = {
            "lookup": bool(self.lookups),
            "priority": self.priority != DEFAULT_PRIORITY,
            "budget.bytes": self.byte_budget is not None,
            "accuracy": self.accuracy is not None and self.accuracy.kind is not None,
        }
        return [name for name, is_given in given.items() if is_given]

    @property
    def columns(self) -> list[str]:
        """The columns of the stream that the query reads."""
        texts = [self.where] if self.where else []
        texts += [m.argument for m in self.measures if m.argument is not None]
        names = list(self.plain_keys)
        for text in [*dict(self.computed).values(), *texts]:
            names += column_names(parse_sql(text, ""))
        for lookup in reversed(self.lookups):
            added = {name for name, _ in lookup.columns or ()}
            names = [name for name in names if name not in added] + [lookup.key]
        return list(dict.fromkeys(names))

    @property
    def key_sources(self) -> tuple[tuple[str, bool], ...]:
        """For each column of `group_by`, its SQL expression and True, or its column of the stream and False."""
        computed = dict(self.computed)
        return tuple((computed[name], True) if name in computed else (name, False) for name in self.group_by)

    @property
    def plain_keys(self) -> tuple[str, ...]:
        """The columns of `group_by` that are columns of the stream."""
        computed = dict(self.computed)
        return tuple(name for name in self.group_by if name not in computed)

    def bind(self, columns: Mapping[str, pa.DataType]) -> BoundQuery:
        """Checks the query against a stream's columns and compiles its expressions.

        Raises:
            InvalidQuery: a column is unknown, or an operand or argument has the wrong type.
        """
        columns = {**columns, TIME_COLUMN: COLUMN_TYPES["int64"]}
        for lookup in self.lookups:
            columns.update(lookup.bind(columns))
        failures = CallFailures()
        keys = tuple(
            _bound_key(text, is_computed, columns, f"group_by.{number}", failures)
            for number, (text, is_computed) in enumerate(self.key_sources)
        )
        where = bind_condition(parse_sql(self.where, "where"), columns, "where", failures) if self.where else None
        bound = []
        for measure in self.measures:
            at = f"measures.{measure.part_of or measure.name}"
            bind_argument = bind if measure.function.sample is None else bind_row
            tree = parse_sql(measure.argument, at) if measure.argument is not None else None
            argument = bind_argument(tree, columns, at, failures) if tree is not None else None
            measure.function.check_argument(argument.type if argument else None, at)
            bound.append(BoundMeasure(measure, argument))
        return BoundQuery(self, where, tuple(bound), keys, failures)


def _bound_key(
    text: str, is_computed: bool, columns: Mapping[str, pa.DataType], at: str, failures: CallFailures
) -> BoundExpression:
    """Binds a column of `group_by` (`QuerySpec.key_sources`)."""
    if is_computed:
        key = bind(parse_sql(text, at), columns, at, failures)
        if pa.types.is_null(key.type):
            raise InvalidQuery(at, text, "an expression with a type", "it is always null")
        return key
    if text not in columns:
        known, reason = ", ".join(columns), f"unknown column{did_you_mean(text, columns)}"
        raise InvalidQuery(at, text, f"one of the columns {known}, or an expression of them", reason)
    return BoundExpression(columns[text], lambda batch: batch.column(text))


def _check_length(expressions: list[object]) -> None:
    length = sum(len(e) for e in expressions if isinstance(e, str))
    if length > MAX_EXPRESSIONS_LENGTH:
        accepted = f"expressions of at most {MAX_EXPRESSIONS_LENGTH} characters together"
        raise InvalidQuery("", f"expressions of {length} characters", accepted)


def _name(value: object, at: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise InvalidQuery(at, value, NAME_ACCEPTED)
    return value


def _group_by(value: object) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Returns the names of the key columns, and the expression of each computed key column by its name."""
    if value is None:
        return (), ()
    if not isinstance(value, list):
        value = [value]
    if len(value) > MAX_GROUP_COLUMNS:
        raise InvalidQuery("group_by", value, f"at most {MAX_GROUP_COLUMNS} columns")
    keys = [_key(item, f"group_by.{number}") for number, item in enumerate(value)]
    names = [name for name, _ in keys]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InvalidQuery(f"group_by.{number}", name, "each name once", "it is the name of another key")
    return tuple(names), tuple((name, text) for name, text in keys if text is not None)


def _key(item: object, at: str) -> tuple[str, str | None]:
    """Returns the name of a key column and its expression; None as the expression of a column of the stream."""
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, text),) = item.items()
        if not isinstance(text, str):
            raise InvalidQuery(f"{at}.{name}", text, "an expression, such as lower(host)")
        name, at = _name(name, at), f"{at}.{name}"
    elif isinstance(item, str) and item:
        name, text = "", item
        if not any(mark in text for mark in _MARKS_OF_EXPRESSIONS):
            return text, None
    else:
        raise InvalidQuery(at, item, "a column, an expression such as hour(event_time_ms), or {name: expression}")
    tree = parse_sql(text, at)
    check_calls(tree, at)
    if isinstance(tree, exp.Column) and not tree.table and name in ("", tree.name):
        return tree.name, None
    if not name:
        name = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
        if not NAME.fullmatch(name):
            raise InvalidQuery(at, text, "a name for the expression, such as {route: " + text + "}")
    return name, tree.sql()


def column_text(name: str) -> str:
    """Returns an entry of `group_by` for a column. The name is in quotes if it looks like an expression."""
    is_plain = not any(mark in name for mark in _MARKS_OF_EXPRESSIONS)
    return name if is_plain else str(exp.to_identifier(name, quoted=True).sql())


def _check_names(measures: Iterable[str], group_by: tuple[str, ...]) -> None:
    """Raises InvalidQuery if two columns of an answer's table have the same name.

    The columns are ``group``, the columns of the group, and for each measure its value and both bounds.
    """
    taken = {"group": "the key of the group in an answer", **dict.fromkeys(group_by, "a column of group_by")}
    for measure in measures:
        for name in (measure, f"{measure}_lower", f"{measure}_upper"):
            if name in taken:
                raise InvalidQuery(f"measures.{measure}", name, "another name", f"it is {taken[name]}")
            taken[name] = f"a column of the measure {measure}"


def _require_shipped(q: Mapping[str, Any], measures: Iterable[Measure], derived: Iterable[ComputedValue]) -> None:
    """Raises InvalidQuery if a budget or an accuracy is about a derived measure."""
    budget, accuracy = q.get("budget"), q.get("accuracy")
    limits = budget.get("error") if isinstance(budget, Mapping) else None
    for value in derived:
        read = [m.to_text() if m.part_of else m.name for m in measures if m.name in value.reads()]
        accepted = f"a measure with a name that is not derived, such as one for {' and one for '.join(read)}"
        if isinstance(limits, Mapping) and value.name in limits:
            raise InvalidQuery(f"budget.error.{value.name}", limits[value.name], accepted, NO_BUDGET)
        if isinstance(accuracy, Mapping) and accuracy.get("measure") == value.name:
            raise InvalidQuery("accuracy.measure", value.name, accepted, NO_ACCURACY)


def _budget(
    value: object, measures: tuple[Measure, ...], accuracy: Accuracy | None
) -> tuple[Budget, ByteBudget | None]:
    if value is None:
        return None, None
    b = require_keys(value, "budget", {"error": False, "staleness": False, "bytes": False}, InvalidQuery)
    if not b:
        accepted = "{error: {measure: amount}}, {staleness: 2s}, {bytes: 50MB per day}, or several of them"
        raise InvalidQuery("budget", value, accepted, "it is empty")
    staleness = error = None
    if "staleness" in b:
        staleness = StalenessBudget(duration_ms(b["staleness"], "budget.staleness", InvalidQuery, minimum_ms=1))
    if "error" in b:
        error = _error_budget(b["error"], measures, accuracy)
    both = CombinedBudget(error, staleness) if error is not None and staleness is not None else error or staleness
    return both, ByteBudget.parse(b["bytes"]) if "bytes" in b else None


def _error_budget(value: object, measures: tuple[Measure, ...], accuracy: Accuracy | None) -> ErrorBudget:
    if not isinstance(value, Mapping) or not value:
        raise InvalidQuery("budget.error", value, "an amount per measure, such as {bytes: 1MB}")
    names = [m.name for m in measures]
    limits, relative = [], []
    for name, amount in value.items():
        at = f"budget.error.{name}"
        if name not in names:
            reason = f"unknown measure{did_you_mean(name, names)}"
            raise InvalidQuery(at, amount, f"one of the measures {', '.join(names)}", reason)
        share = fraction(amount)
        if share is None:
            limits.append((str(name), _amount(amount, at)))
        elif 0.0 <= share < 1.0:
            relative.append((str(name), share))
        else:
            raise InvalidQuery(at, amount, "a percentage from 0% to below 100%")
    budget = ErrorBudget(tuple(sorted(limits)), tuple(sorted(relative)))
    if accuracy is not None:
        _check_beside(accuracy, budget, measures)
    return budget


def _check_beside(accuracy: Accuracy, budget: ErrorBudget, measures: tuple[Measure, ...]) -> None:
    """Raises InvalidQuery if complete answers within the error budget would not meet the accuracy."""
    name, limits = accuracy.measure, budget.to_mapping()
    if accuracy.kind is None or accuracy.kind == "mean":
        accepted = f"no error budget, or an accuracy about another measure than {name}"
        reason = "nothing bounds how much withheld records would change its value"
        raise InvalidQuery("budget.error", limits, accepted, reason)
    share = dict(budget.relative).get(name)
    if share is None or share > accuracy.error:
        accepted = f"a percentage of at most {format_fraction(accuracy.error)}, which is accuracy.error"
        reason = "edges withhold a record from all measures, and complete answers have to keep the accuracy, too"
        raise InvalidQuery(f"budget.error.{name}", limits.get(name), accepted, reason)
    promised = [m for m in measures if m.name in accuracy.measures]
    if accuracy.kind == "records" and (left := accuracy.of_records(promised, share).error) <= 0:
        accepted = f"a percentage below {100 * (share + left):.6g}%"
        reason = "the withheld records, the records that are out and the synopsis' own error share accuracy.error"
        raise InvalidQuery(f"budget.error.{name}", limits[name], accepted, reason)


def _amount(value: object, at: str) -> float:
    accepted = "an amount in the measure's own unit, at least 0, such as 1000 or 1MB, or a percentage such as 1%"
    if isinstance(value, float):
        if not 0 <= value < float("inf"):
            raise InvalidQuery(at, value, accepted)
        return value
    try:
        return float(size_bytes(value, at))
    except InvalidInput as exc:
        raise InvalidQuery(at, value, accepted) from exc
    except OverflowError as exc:
        raise InvalidQuery(at, value, accepted, "it is too large") from exc


def _since(value: object, accuracy: Accuracy | None) -> int | None:
    if value is not None and accuracy is not None:
        reason = (
            "an accuracy needs the times at which records arrived, and these are known only for records that are read"
            " while the query runs"
        )
        raise InvalidQuery("since", str(value), "a query without accuracy", reason)
    return MIN_TIME_MS if value == BEGINNING else _time(value, "since", f"{BEGINNING}, or {TIME_ACCEPTED}")


def _time(value: object, at: str, accepted: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, date):  # YAML reads a time without quotes as a date
        value = value.isoformat()
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InvalidQuery(at, value, accepted)
    try:
        return parse_time(str(value))
    except ValueError as exc:
        raise InvalidQuery(at, value, accepted) from exc


def _seed(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, str) and _HEXADECIMAL.fullmatch(value):
        return int(value, 16)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        # The value is a secret.
        raise InvalidQuery("seed", "…", "a whole number from 0 to 2^64 - 1, or up to 16 hexadecimal digits after 0x")
    return value


def _priority(value: object) -> int:
    if value is None:
        return DEFAULT_PRIORITY
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_PRIORITY:
        raise InvalidQuery("priority", value, f"an integer from 1 to {MOST_PRIORITY}; without it {DEFAULT_PRIORITY}")
    return value


def _edges(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(isinstance(e, str) and e for e in value):
        raise InvalidQuery("edges", value, "a list of the ids of the expected edges")
    return tuple(sorted(set(value)))
