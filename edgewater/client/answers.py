"""Answers at a client. An answer has an Arrow table, a phase, a quality and a contract."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, cast, overload

from edgewater.base.errors import EdgewaterError, InvalidRequest
from edgewater.base.float_bounds import side_of, to_float
from edgewater.base.timestamps import parse_time
from edgewater.client.interval import Interval, Number
from edgewater.model.json_types import Document, Group, Groups, IntervalCell, Json, TotalCell
from edgewater.model.own_columns import OWN_COLUMNS, contract_codes, own_names, with_own_columns
from edgewater.model.replies import (
    EdgeProgress,
    Members,
    PartShape,
    ProgressData,
    Quality,
    Spec,
    StatedViolation,
    WholeAnswer,
)

if TYPE_CHECKING:  # Arrow takes longer to import than most commands take to run
    import pandas as pd
    import polars as pl
    import pyarrow as pa

ARROW = "application/vnd.apache.arrow.stream"
Phase = str
_INTERVALS = ("interval", "keyed", "items")
"""The shapes whose columns are intervals."""


class PackageMissing(EdgewaterError):
    """A conversion needs a package that is not installed."""


@dataclass(frozen=True, slots=True)
class Column:
    """A measure, or a member of a measure, for each group of an answer.

    Attributes:
        name: name of the measure or the member.
        columns: the names of its columns in the answer's table.

    >>> import pyarrow as pa
    >>> rows = {"shop": ["a", "b"], "sum": [3, 8], "sum_lower": [3, 7], "sum_upper": [3, 9]}
    >>> column = Answer(pa.table(rows), {"confidence": 0.95}, ("shop",))["sum"]
    >>> for group, interval in column:
    ...     print(group["shop"], interval)
    a 3
    b 8 [7, 9]
    """

    name: str
    answer: Answer
    columns: tuple[str, ...]

    @property
    def groups(self) -> list[Group]:
        return self.answer.groups

    @property
    def intervals(self) -> list[Interval]:
        """The interval of each group, in the order of `groups`.

        Raises:
            InvalidRequest: the measure has several members, and is no interval itself.
        """
        table = self.answer.table
        bounds = f"{self.name}_lower", f"{self.name}_upper"
        if self.name not in self.answer.interval_columns:
            raise InvalidRequest(
                "member", self.name, f"one of {', '.join(self.members)}", "it is not an interval itself"
            )
        estimates, lower, upper = (_numbers(table.column(name)) for name in (self.name, *bounds))
        confidence = self.answer.confidence
        return [Interval(*values, confidence) for values in zip(estimates, lower, upper, strict=True)]

    @property
    def interval(self) -> Interval:
        """The interval of the only group. Raises InvalidRequest if the answer has no group or several groups."""
        each = self.intervals
        if len(each) != 1:
            groups = ", ".join(str(g) for g in self.groups[:3])
            accepted = "latest(group={…}), or [group] with one of its groups"
            raise InvalidRequest("group", groups or None, accepted, f"the answer has {len(each)} groups")
        return each[0]

    @property
    def members(self) -> list[str]:
        """The names of the columns that are intervals or values."""
        return [name for name in self.answer.measures if name in self.columns]

    @property
    def values(self) -> list[Any]:
        """The values of the first column, one per group: estimates, or lists such as the items of a `top_k`."""
        return list(self.answer.table.column(self.columns[0]).to_pylist())

    def quantile(self, rank: float) -> Column:
        """Returns the column of a quantile that the answer has.

        Args:
            rank: the rank of the quantile, such as 0.5.
        """
        return self.answer[f"{self.name}_{_key(rank)}"]

    def member(self, name: str) -> Column:
        """Returns the column of a member of the cell, such as `mean` of a sample."""
        return self.answer[f"{self.name}.{name}"]

    def __getitem__(self, group: object) -> Interval:
        """Returns the interval of a group. Raises InvalidRequest.

        Args:
            group: the group as a mapping of column to value; or the value itself if `group_by` has one column.
        """
        wanted = group if isinstance(group, Mapping) else dict.fromkeys(self.answer.group_by[:1], group)
        for found, interval in zip(self.groups, self.intervals, strict=True):
            if found == wanted and len(wanted) == len(self.answer.group_by):
                return interval
        groups = ", ".join(str(g) for g in self.groups[:5])
        raise InvalidRequest("group", group, f"one of {len(self.groups)} groups, such as {groups or '(none)'}")

    def __iter__(self) -> Iterator[tuple[Group, Interval]]:
        return iter(list(zip(self.groups, self.intervals, strict=True)))


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to one window.

    Attributes:
        table: one row per group: the group columns, then the columns of the measures. See the reference of queries.
        members: the answer as JSON without its data: window, phase, revision, quality, contract.
        group_by: names of the group columns.
        explain_with: requests the explanation of a measure from the center. `explain` calls it.

    An answer comes from `Query.latest`, `windows` or `live`. Here it has one group, whose count has bounds:

    >>> import pyarrow as pa
    >>> rows = {"carrier": ["UA"], "flights": [5], "flights_lower": [5], "flights_upper": [7]}
    >>> answer = Answer(pa.table(rows), {"phase": "early", "confidence": 0.95}, ("carrier",))
    >>> answer.phase, answer.groups, answer.measures
    ('early', [{'carrier': 'UA'}], ['flights'])
    >>> answer["flights"]["UA"].upper
    7
    """

    table: pa.Table
    members: Members
    group_by: tuple[str, ...]
    explain_with: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    @property
    def query(self) -> str:
        return str(self.members["query"])

    @property
    def start(self) -> datetime:
        """Start of the window, inclusive."""
        return datetime.fromisoformat(self.members["window"]["start"])

    @property
    def end(self) -> datetime:
        """End of the window, exclusive."""
        return datetime.fromisoformat(self.members["window"]["end"])

    @property
    def phase(self) -> Any:
        """The phase: ``early``, ``complete`` or ``final``."""
        return self.members["phase"]

    @property
    def version(self) -> int | None:
        """The version of the query that has the window; None if the center is of an earlier release."""
        return self.members.get("version")

    @property
    def revision(self) -> int:
        return int(self.members["revision"])

    @property
    def confidence(self) -> float | None:
        """The confidence of the intervals; None if no bound is known."""
        value = self.members["confidence"]
        return None if value is None else float(value)

    @property
    def total(self) -> dict[str, Interval]:
        """The interval of each measure over all groups of the window, even if the answer has only some of them.

        A measure is named as in `table`: the median of ``delay`` is ``delay_0.5``. Lists, buckets and samples have no
        total.

        The total includes values that edges withhold from groups. So under a budget it may differ much from the sum
        over `table`.
        """
        cells = self.members["total"].items()
        return {name: Interval(_number(c), c["lower"], c["upper"], _certain(c)) for name, c in cells}

    @property
    def rest(self) -> dict[str, Number | None]:
        """The part of the total of each `count` and `sum` that is in no group; None if unknown."""
        return dict(self.members["rest"])

    @property
    def quality(self) -> Quality:
        return self.members["quality"]

    @property
    def completeness(self) -> float | None:
        value = self.quality["completeness"]["ratio"]
        return None if value is None else float(value)

    @property
    def missing(self) -> list[str]:
        """The expected edges that have not reported."""
        return list(self.quality["completeness"]["missing"])

    @property
    def guessed(self) -> int:
        """The number of records of the window that edges counted, or left out, on a guess."""
        return sum(self.quality["completeness"].get("guessed", {}).values())

    @property
    def rejected(self) -> int:
        """The number of records that sources rejected and that belong, or may belong, to the window."""
        return int(self.quality["completeness"].get("rejected", 0))

    @property
    def delivery(self) -> dict[str, list[str]]:
        """How edges count records, for each edge that is not exactly-once: ``at-least-once``, ``at-most-once``, or
        both.
        """
        return {edge: list(each) for edge, each in self.quality["completeness"].get("delivery", {}).items()}

    @property
    def limitations(self) -> str:
        """What the completeness alone does not say, as text that follows it; "" if there is nothing."""
        parts = [f"without {', '.join(self.missing)}"] if self.missing else []
        parts += [f"{self.rejected} records rejected"] if self.rejected else []
        parts += [f"{self.guessed} records on a guess"] if self.guessed else []
        parts += [f"{edge} counts {' and '.join(each)}" for edge, each in sorted(self.delivery.items())]
        return "".join(f", {part}" for part in parts)

    @property
    def staleness_ms(self) -> float | None:
        value = self.quality.get("staleness_ms")
        return None if value is None else float(value)

    @property
    def contract_met(self) -> bool:
        return bool(self.members["contract"]["met"])

    @property
    def violations(self) -> list[StatedViolation]:
        """The contract's violations, each with `code` and `message`."""
        return list(self.members["contract"]["violations"])

    @property
    def contract(self) -> str:
        """The codes of the violations as text; ``met`` without any; ``met; may-change`` if late records may follow an
        answer to an exact query.
        """
        return contract_codes(self.members["contract"])

    @property
    def groups(self) -> list[Group]:
        """The group of each row; `{}` for a query without groups."""
        if not self.group_by:
            return [{} for _ in range(self.table.num_rows)]
        return list(self.table.select(list(self.group_by)).to_pylist())

    @property
    def measures(self) -> list[str]:
        """The names of the columns that are estimates or values, without the columns of their bounds."""
        names = [n for n in self.table.column_names if n not in self.group_by]
        bounds = {f"{n}_{end}" for n in self.interval_columns for end in ("lower", "upper")}
        return [n for n in names if n not in bounds]

    @property
    def interval_columns(self) -> list[str]:
        """The names of the columns that are intervals, so that each has columns with its bounds."""
        names = self.table.column_names
        if "shapes" not in self.members:  # the center is of an earlier release
            return [n for n in names if f"{n}_lower" in names and f"{n}_upper" in names]
        parts = (part for parts in self.members["shapes"].values() for part in parts if part["shape"] in _INTERVALS)
        return [n for part in parts for n in part["columns"] if n in names]

    def __getitem__(self, name: str) -> Column:
        """Returns a measure, or a member of a measure, by its column's name. Raises InvalidRequest."""
        names = [n for n in self.table.column_names if n not in self.group_by]
        own = tuple(n for n in names if n in (name, f"{name}_lower", f"{name}_upper"))
        of_it = own if name in own else tuple(n for n in names if n.startswith((f"{name}_", f"{name}.")))
        if not of_it:
            raise InvalidRequest("measure", name, f"one of {', '.join(self.measures)}")
        return Column(name, self, of_it)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def explain(self, measure: str, group: Groups | None = None) -> Any:
        """Returns what the error of a measure consists of."""
        if self.explain_with is None:
            raise InvalidRequest("explain", self.query, "an answer of a query: center.query(name).latest()")
        return self.explain_with(self.members["window"]["start"], group, self.revision, measure=measure)

    def to_arrow(self) -> pa.Table:
        """Returns the columns that describe the answer (window, phase, revision, contract, …), then the columns of
        `table`.
        """
        import pyarrow as pa

        window, given_at = self.members["window"], self.members["given_at"]
        times = {"window_start": window["start"], "window_end": window["end"], "given_at": given_at}
        table = with_own_columns(self.table, self.members, {name: parse_time(time) for name, time in times.items()})
        if self.version is None:
            return table
        version = pa.repeat(pa.scalar(self.version, pa.int64()), len(self))
        return table.add_column(len(OWN_COLUMNS), own_names(self.table.column_names)["version"], version)

    def to_pandas(self) -> pd.DataFrame:
        return to_pandas(self.to_arrow())

    def to_polars(self) -> pl.DataFrame:
        return to_polars(self.to_arrow())

    def __str__(self) -> str:
        return (
            f"{self.query} {self.members['window']['start']} {self.phase} revision {self.revision}, {len(self)} groups"
        )


@dataclass(frozen=True, slots=True)
class Answers(Sequence[Answer]):
    """Answers of one query, the newest revision of each window, ascending.

    Attributes:
        table: the rows of `Answer.to_arrow` of all answers. A column that an answer lacks is null.
        answers: the answers.
    """

    table: pa.Table
    answers: tuple[Answer, ...]

    @overload
    def __getitem__(self, at: int) -> Answer: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Answer]: ...
    def __getitem__(self, at: int | slice) -> Answer | Sequence[Answer]:
        return self.answers[at]

    def __len__(self) -> int:
        return len(self.answers)

    def to_arrow(self) -> pa.Table:
        return self.table

    def to_pandas(self) -> pd.DataFrame:
        return to_pandas(self.table)

    def to_polars(self) -> pl.DataFrame:
        return to_polars(self.table)


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of the edges. It arrives at a fixed interval, also without answers.

    >>> state = {"edge": "jfk", "state": "live", "watermark": None, "last_seen": None}
    >>> Progress({"queries": [{"edges": [state]}]}).edges["jfk"]["state"]
    'live'
    """

    data: ProgressData

    @property
    def edges(self) -> dict[str, EdgeProgress]:
        """The state of each edge of the stream's queries, by the edge's name: state, watermark, last_seen."""
        return {e["edge"]: e for q in self.data["queries"] for e in q["edges"]}


@dataclass(frozen=True, slots=True)
class Gap:
    """Answers that the stream has left out: from the answer after `after` up to `through`."""

    after: int
    through: int
    reason: str


def from_table(table: pa.Table, heads: list[Members], spec: Spec, explain_with: Callable[..., Any] | None) -> Answers:
    """Returns the answers of an Arrow stream.

    Args:
        table: the rows of all answers.
        heads: the metadata of the stream, one entry per answer.
        spec: the spec of the query.
        explain_with: see `Answer.explain_with`.
    """
    if not heads:
        return Answers(table, ())
    import numpy as np

    group_by = group_columns(spec)
    first = _first_value_column(table, {*group_by, *spec["measures"]})
    starts = table.column(0).to_numpy().astype("datetime64[ms]").astype(np.int64)
    bounds = {}
    for head in heads:
        at = parse_time(head["window"]["start"])
        low, high = np.searchsorted(starts, at, "left"), np.searchsorted(starts, at, "right")
        bounds[at] = int(low), int(high - low)
    values = table.select(range(first, table.num_columns))
    answers = tuple(
        Answer(
            values.slice(*bounds[parse_time(h["window"]["start"])]),
            cast(Members, {name: member for name, member in h.items() if name != "group_by"}),
            tuple(h.get("group_by", group_by)),
            explain_with,
        )
        for h in heads
    )
    return Answers(table, answers)


def group_columns(spec: Spec) -> tuple[str, ...]:
    """Returns the names of the group columns. In a spec, a computed key is a mapping of its name to an expression."""
    return tuple(key if isinstance(key, str) else next(iter(key)) for key in spec.get("group_by") or ())


def _first_value_column(table: pa.Table, named: set[str]) -> int:
    """Returns the number of leading columns that describe the answer. The other columns are groups and measures.

    Args:
        named: the names of the groups and measures in the spec.
    """
    describing = (*OWN_COLUMNS, "version")  # a center of an earlier release has no version
    for at, (name, own) in enumerate(zip(table.column_names, describing, strict=False)):
        if name in named or not re.fullmatch(f"(answer_)*{own}", name):
            return at
    return min(len(describing), int(table.num_columns))


def from_json(answer: WholeAnswer, spec: Spec, explain_with: Callable[..., Any] | None) -> Answer:
    """Returns an answer of a live stream, with the columns of the center's Arrow form."""
    import pyarrow as pa

    rows, shapes = answer["data"], answer.get("shapes", {})
    # The answer may be of another version of the query.
    group_by = tuple(rows[0]["group"]) if rows else group_columns(spec)
    columns: dict[str, list[Any]] = {name: [] for name in group_by}
    for at, row in enumerate(rows):
        flat: dict[str, Json] = dict(row["group"])
        for measure, cell in row.items():
            if measure != "group":
                flat.update(_flat(shapes.get(measure) or _unstated(measure, cell), cell))
        for name, value in flat.items():
            columns.setdefault(name, [None] * at).append(value)
        for column in columns.values():
            column.extend([None] * (at + 1 - len(column)))
    members = cast(Members, {k: v for k, v in answer.items() if k != "data"})
    table = pa.table({n: _array(n, v) for n, v in columns.items()})
    return Answer(table, members, group_by, explain_with)


def _array(name: str, values: list[Any]) -> pa.Array:
    """Returns a column of the values. Numbers are int64 if all are integers, otherwise float64; bounds are rounded
    outwards.
    """
    import pyarrow as pa

    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):  # integers mixed with floats, or integers beyond int64
        return pa.array([None if v is None else to_float(v, side_of(name)) for v in values], pa.float64())


def _flat(shapes: Sequence[PartShape], cell: Document) -> dict[str, Json]:
    """Returns the columns of a cell, name -> value.

    Args:
        shapes: the members of the cell, as the answer states them.
    """
    flat: dict[str, Json] = {}
    for part in shapes:
        absent = 0.0 if part["shape"] == "number" else None
        member = cell.get(part["name"], absent) if part["name"] else cell
        if part["shape"] not in _INTERVALS:
            flat.update(dict.fromkeys(part["columns"], member))
            continue
        listed: Any = member
        each: Any = {"interval": [member], "items": member}.get(part["shape"]) or (listed or {}).values()
        for column, interval in zip(part["columns"], each, strict=False):
            flat.update(_bounds(column, interval))
    return flat


def _unstated(measure: str, cell: Document) -> list[PartShape]:
    """Returns the shapes of a cell of a center of an earlier release: an interval, or members as they are."""
    if "estimate" in cell:
        return [{"name": "", "shape": "interval", "columns": [measure]}]
    return [{"name": name, "shape": "number", "columns": [f"{measure}.{name}"]} for name in cell]


def _number(interval: IntervalCell) -> Any:
    """Returns the estimate. JSON states NaN and the infinities by name, in `not_finite`."""
    return float(interval["not_finite"]) if "not_finite" in interval else interval["estimate"]


def _certain(interval: TotalCell) -> float | None:
    """Returns the confidence of a total: 1 if its bounds always hold; None if there are no bounds."""
    has_bounds = interval["lower"] is not None or interval["upper"] is not None
    return interval.get("confidence", 1.0) if has_bounds else None


def _bounds(name: str, interval: IntervalCell) -> dict[str, Number | None]:
    return {name: _number(interval), f"{name}_lower": interval["lower"], f"{name}_upper": interval["upper"]}


def _numbers(column: pa.ChunkedArray) -> list[Any]:
    return [int(v) if isinstance(v, Decimal) else v for v in column.to_pylist()]


def _key(rank: float) -> str:
    return str(int(rank)) if rank == int(rank) else repr(float(rank))


def to_pandas(table: pa.Table) -> pd.DataFrame:
    from edgewater.base.number_columns import rounded_by_pandas

    try:
        frame = table.to_pandas()
        for name, column in zip(table.column_names, table.columns, strict=True):
            if rounded_by_pandas(column):
                frame[name] = column.to_pandas(integer_object_nulls=True).astype("Int64")
        return frame
    except ModuleNotFoundError as exc:
        raise PackageMissing(
            f"to_pandas() needs the package {exc.name}, which is not installed: pip install pandas"
        ) from exc


def to_polars(table: pa.Table) -> pl.DataFrame:
    try:
        import polars as pl
    except ModuleNotFoundError as exc:
        raise PackageMissing(
            "to_polars() needs the package polars, which is not installed: pip install polars"
        ) from exc
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame
