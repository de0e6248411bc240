"""The JSON of a center's replies: types that the center writes and its client reads.

OpenAPI shows the docstrings of the types and of their members.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NotRequired, Required, TypeAlias

from typing_extensions import TypedDict, is_typeddict  # pydantic accepts no other ones in Python 3.11

from edgewater.model.json_types import Document, Group, IntervalCell, Json, Key, TotalCell

Spec = TypedDict(
    "Spec",
    {
        "name": Required[str],
        "from": Required[str],
        "where": str,
        "group_by": list[str | dict[str, str]],
        "measures": Required[dict[str, str]],
        "window": Required[dict[str, Json]],
        "budget": dict[str, Json],
        "accuracy": dict[str, Json],
        "lateness": str,
        "lookup": dict[str, Json],
    },
    total=False,
)
"""A query in canonical form. A computed key of a group is a mapping of its name to an expression."""


class Borders(TypedDict, total=False):
    """The windows of a version of a query."""

    begins: str | None
    """The border to the previous version: this one has the windows that start at it or later; null: it has all."""
    until: str | None
    """Its windows start before this time: a later version follows, or the query ends; null: it has no end."""


class EdgeForecast(TypedDict):
    """What a query takes of the link of one edge, as the edge has stated it."""

    edge: str
    in_time: Literal["yes", "no", "unknown"]
    """Whether all values of a window arrive by its deadline; without a staleness budget, before the next window ends.
    `yes`: so they do with what the link carries at least, if the windows of all its queries end together and need up to
    a quarter more than the last ones. `no`: values are omitted for lack of bytes, or the link cannot carry them."""
    since: str | None
    """If it is unknown: since when."""
    bytes_per_window: int | None
    """A mean of the last windows; of windows that slide, what is sent at each step. Null: none has closed."""
    omitted_bytes: int | None
    """Of a window, on average, for lack of bytes."""
    link_share: float | None
    """At most this part of the link. Above 1: the query may need more than the link has."""
    least_bytes_s: float | None
    """What the link carries at least, with 90 %, or the edge's share of it; null until it is known."""
    most_bytes_s: float | None
    stated_at: str | None
    """When the edge stated it. It states numbers again when they have changed by a fifth."""
    age_ms: int | None


class LinkForecast(TypedDict):
    """What a query takes of the links of its edges."""

    in_time: Literal["yes", "no", "unknown"]
    """`no` if an edge is late, `yes` if all edges are in time."""
    since: str | None
    """If it is unknown: since when."""
    bytes_per_window: int | None
    """Over the edges that have stated it."""
    edges: list[EdgeForecast]


class Registered(Borders):
    """A query as it is registered."""

    name: Required[str]
    version: Required[int]
    """Each change makes another version. A number is never used again."""
    spec: Required[Spec]
    """In canonical form, without the seed."""
    registered_at: Required[str]
    ended_at: str | None
    """When all its windows were final, and edges removed it; null: edges answer it."""
    notes: NotRequired[list[str]]
    """Of a registration: what the query does not do, if it may be unexpected."""
    forecast: NotRequired[LinkForecast]
    """Of a registration and of one query: what it takes of the links of its edges. A center of 0.3.0 leaves it out."""


class QueryList(TypedDict):
    queries: list[Registered]


class QueryVersion(Borders):
    """The windows of one version of a query."""

    version: Required[int]
    ended_at: Required[str | None]
    """When all its windows were final; null: edges answer it."""
    tables: Required[dict[str, int]]
    """The versions of the tables that the answers of this version of the query use."""


class TableInfo(TypedDict):
    """The newest version of a table."""

    name: str
    version: int
    """Each change of the rows makes another version."""
    key: str
    columns: list[TableColumn]
    rows: int
    updated_at: str
    queries: list[str]
    """The running queries that use it. After a change: the queries that have new versions."""


class TableDetail(TableInfo):
    """The newest version of a table, with its rows."""

    data: list[Group]


class TableList(TypedDict):
    tables: list[TableInfo]


class WindowSpan(TypedDict):
    """Start and end of a window in RFC 3339."""

    start: str
    end: str


class PartShape(TypedDict):
    """The form of one member of a measure's cell, so that readers need not know the measure's function."""

    name: str
    """The member; empty: the cell itself is the interval."""
    shape: Literal["interval", "number", "keyed", "items", "list"]
    """`interval`: an estimate with bounds. `number`: a number or a text; 0 if a cell lacks
    it. `keyed`: an interval per key. `items`: a list with an interval per requested item, in the same order in every
    row. `list`: a list of any length, whose entries may be intervals with further members."""
    columns: list[str]
    """The member's columns in Arrow, CSV and SELECT, without the columns of bounds (`_lower`, `_upper`)."""


class StatedViolation(TypedDict):
    """A part of the contract that an answer does not keep."""

    code: str
    message: str


class StatedContract(TypedDict):
    """What was requested of an answer, and whether the answer keeps it."""

    requested: dict[str, Json]
    met: bool
    violations: list[StatedViolation]
    uncovered: NotRequired[list[str]]
    """The measures that have a value without a bound. A met contract says nothing about the errors of these."""
    may_change: NotRequired[bool]


class MayChange(TypedDict):
    """The late records that the bounds of an answer allow for."""

    records: int | None
    """At most; null: any number, as of sessions."""
    confidence: float
    """With which no more will come."""


class LostInput(TypedDict):
    """A stated loss of input."""

    edge: str
    source: str
    reason: str
    from_ms: int | None
    to_ms: int | None
    records: int | None
    """At most; null: unknown."""


class Lacks(TypedDict, total=False):
    """What an answer lacks, or has too much. A member that says nothing is left out."""

    lost_state: list[str]
    """Edges that lost their state while the window was open."""
    left: list[str]
    """Edges that left before they had closed the window."""
    only: dict[str, dict[str, Key]]
    """By edge that is missing or has left: the groups that it has, by the values of their columns."""
    delivery: dict[str, list[str]]
    """The edges that do not count each record exactly once."""
    losses: list[LostInput]
    after_final: int
    """Late records that are not in the answer."""
    rejected: int
    guessed: dict[str, int]
    """Records that were counted or left out on a guess, by reason."""
    may_change: MayChange
    unanswered: int
    """Of several windows: how many have no answer."""
    windows: int
    """Of several windows: their number."""


class Completeness(Lacks):
    """The records that an answer has and lacks."""

    ratio: float | None
    expected: int
    reported: int
    missing: list[str]


class Quality(TypedDict):
    """What an answer states about itself."""

    completeness: Completeness
    accuracy: NotRequired[Document]
    """Of a query with an accuracy: its measure, the sampling, the wait and the parts of the error."""
    prediction: NotRequired[Document]
    """Of an early answer without groups, by measure: the interval that contains the final value."""
    records: dict[str, int | dict[str, int] | None]
    staleness_ms: float | None
    """Until `given_at`, without the way to a reader."""
    first_staleness_ms: float | None
    error: dict[str, dict[str, Json]]
    """By cause and measure; null: unknown."""
    session: NotRequired[Document]
    """Of a session: whether it was `cut` at its maximum length, and the number of such sessions (`cuts`)."""
    merged_into: NotRequired[str]
    """Start of the session that this one was merged into; its window is empty and has no data."""


class Members(TypedDict):
    """An answer without its data. (query, window, revision) never changes."""

    query: str
    version: NotRequired[int]
    """The version of the query that has the window."""
    window: WindowSpan
    phase: Literal["early", "complete", "final"]
    revision: int
    data_of: NotRequired[int]
    """Of a correction: the revision of the final answer whose data it has. Records came late, so its quality and its
    bounds differ."""
    given_at: str
    """Wall time at which the center gave it."""
    total: dict[str, TotalCell]
    """Each `count`, `sum`, `min`, `max`, `mean` and `var` over all groups, with what edges withhold of the groups. It
    is exact if every edge has closed the window, whatever the budget. With `group_by` also each `distinct` and each
    quantile over all groups, with a `confidence`. The parameter `group` does not change it. Empty: the session was
    merged into another one."""
    rest: dict[str, float | int | None]
    """The part of the total of each `count` and `sum` that is in no group. Null: unknown."""
    notes: NotRequired[list[str]]
    """If edges withhold values: how much is in no group."""
    shapes: NotRequired[dict[str, list[PartShape]]]
    """By measure: what the members of its cells in `data` are."""
    confidence: float | None
    """Probability that a value of `data` lies in [lower, upper]. 1: the bounds always hold. The bounds of totals always
    hold, or with the confidence of `completeness.may_change`. Null: no bound is known."""
    quality: Quality
    contract: StatedContract
    group_by: NotRequired[list[str]]


Row: TypeAlias = Mapping[str, Document]
"""A row of an answer: its group, and a cell by measure. The name of a measure may be any."""


class WholeAnswer(Members):
    """An answer."""

    data: list[Row]
    base: NotRequired[int]
    removed: NotRequired[list[Group]]


EdgeState = Literal["up", "unreachable", "retired"]


class Watermark(TypedDict):
    """A stream's watermark at an edge."""

    watermark: str | None
    """Event time before which no more records are expected. Null before the first, and once the stream has ended."""
    ended: bool
    """Whether the stream has ended there."""


class EdgeProgress(Watermark):
    """The progress of an edge in the stream of a query."""

    edge: str
    state: EdgeState | Literal["never_connected"]
    last_seen: str | None


class QueryProgress(TypedDict):
    """The progress of a query's expected edges."""

    query: str
    version: int
    edges: list[EdgeProgress]
    first_version: NotRequired[int]
    """The first version that has answers."""


class ProgressData(TypedDict):
    """The data of an event about progress."""

    time: str
    queries: list[QueryProgress]


class TableColumn(TypedDict):
    """A column, such as ``distance`` of type ``int64``."""

    name: str
    type: str


class DescribedColumn(TableColumn):
    """A column of a stream."""

    description: str


class StreamColumns(Watermark):
    """The columns of a stream.

    The watermark is the least of its edges. It is null if an edge has none yet, or if all have ended the stream.
    """

    stream: str
    source: Literal["configuration", "admin", "edges"]
    """Who says so. `edges`: the first edge that had a column has decided its type."""
    columns: list[DescribedColumn]
    differing: list[str]
    """Why edges that are known are refused now, or differ from the others."""
    edges: list[str]
    """Edges that serve it, without retired edges."""
    records: int
    """Accepted by these since their incarnations began."""


class StreamList(TypedDict):
    streams: list[StreamColumns]


class RejectedCount(TypedDict):
    """Records that a source rejected for one reason, such as `wrong-type` or `malformed`."""

    source: str
    reason: str
    records: int


class NullColumn(TypedDict):
    """A column of a source that has no values any more."""

    source: str
    column: str


class Stream(Watermark):
    """A stream at one edge. The watermark is null before the first, and once the stream has ended."""

    name: str
    columns: list[TableColumn]
    speed: float
    """Event ms per wall ms; 1 for a live stream."""
    watermark_ms: int | None
    """The same as unix ms; 2^62 once the stream has ended."""
    delivery: list[str]
    """How often a record counts if processes crash or connections are lost: `exactly-once`, or one or both of
    `at-least-once`: a source may give a record again, which then counts twice; `at-most-once`: a source cannot be read
    again after a crash."""
    constants: Mapping[str, Key]
    """Columns that have one value in all records at this edge."""
    records: int
    """Accepted since the edge's incarnation began."""
    rejected: list[RejectedCount]
    """Records that sources rejected since the edge's incarnation began: the 128 largest numbers."""
    null_columns: list[NullColumn]
    """Columns that had values, and are null in most of the newest records of a source."""


class Edge(TypedDict):
    """An edge, as its last Hello and heartbeat describe it."""

    edge: str
    state: EdgeState
    """`up` even if it has no events."""
    release: NotRequired[str | None]
    """Of its software; null until its first heartbeat, and for 0.3.0. A center of 0.3.0 leaves it out."""
    labels: Mapping[str, str]
    incarnation: str
    incarnations: int
    first_seen: str
    last_seen: str
    """It was heard from then or later: its gateway records that, and the values here, every second, and with more than
    1,000 sessions every second per 1,000. `state` is up to date."""
    streams: list[Stream]
    drops: Mapping[str, int]
    """Records not counted, by reason."""
    backlog_bytes: int
    """Unacknowledged bytes in its journal."""
    bandwidth_bytes_s: float | None
    """Of its link; null until it is known."""
    rtt_ms: float
    clock_offset_ms: float
    """Its wall clock minus the center's."""


class EdgeList(TypedDict):
    edges: list[Edge]


class Shipped(TypedDict):
    """The frames of an edge that the center has applied."""

    frames: int
    wire_bytes: int


class Verdict(TypedDict):
    """Whether an edge accepts a query."""

    accepted: bool | None
    """Null: it has not said so, or has never connected."""
    code: str | None
    """If refused: the error's code."""
    message: str | None
    """If refused: why."""


class DryRunEdge(Verdict):
    """Whether the stream of an edge has the columns that a query needs: `accepted`.

    It is null if the edge has never connected, or if its release may refuse the query.
    """

    edge: str


class QueryEdge(EdgeProgress, Verdict):
    """One edge's status for a query.

    `accepted` is null if the edge has not said so. If it refuses the query, `code` and `message` say why.
    """

    expected: bool
    """Whether windows need its close to be complete."""
    shipped: Shipped
    after_final: dict[str, int]
    """Accepted records that came for final windows, and are in no answer to them, by reason."""
    rejected: dict[str, int]
    """Records that its sources rejected since it runs the query, by reason."""
    guessed: dict[str, int]
    """Records that it counted or left out on a guess since it runs the query, by reason."""


class QueryDetail(Registered):
    """A query with each edge's status."""

    edges: Required[list[QueryEdge]]
    latest_window: Required[str | None]
    """Start of the last window that has an answer."""
    after_final: Required[int]
    """Accepted records that came for final windows, over all edges."""
    rejected: Required[int]
    """Records that sources rejected, over all edges."""
    guessed: Required[int]
    """Records that edges counted or left out on a guess, over all edges."""
    versions: Required[list[QueryVersion]]
    """All versions that have, or may have, answers; ascending."""
    alarms: Required[list[Alarm]]
    """The latest alarms about this query, the latest first."""


EdgeCause = Literal[
    "never_connected", "retired", "unreachable", "unconfirmed", "refused", "no_records", "ended", "open"
]
WaitState = Literal[
    "answered", "waiting", "refused", "no_edges", "no_records", "merging", "paused", "quarantined", "center_not_ready"
]


class WaitedEdge(TypedDict):
    """What a query waits for at an expected edge."""

    edge: str
    cause: EdgeCause
    """`ended`, and `open` (its next window has not ended), hold no answer back."""
    text: str
    since: str | None


class QueryStatus(TypedDict):
    """Whether a query has answers; if not, or no newer ones: why, since when, and what to do."""

    query: str
    version: int
    state: WaitState
    reason: str
    """Empty: nothing holds answers back."""
    remedy: str
    """What to do; empty: nothing."""
    since: str | None
    waits_for: list[str]
    """The expected edges without which no window can be complete."""
    edges: list[WaitedEdge]
    """Every expected edge."""
    budget: str
    """Why the error budget saves nothing; empty: it saves, or there is none."""
    registered_at: str
    latest_window: str | None
    """Start of the last window that has an answer."""


class DryRun(Borders):
    """What a registration would do; nothing is registered."""

    spec: Required[Spec]
    """In canonical form."""
    sql: Required[str]
    """The same query in SQL, without its seed."""
    columns: Required[list[TableColumn]]
    """Of the table of its answers, which SELECT reads."""
    registered: Required[bool]
    """Whether the same query is already registered."""
    refused: Required[str | None]
    """Why the registration would be refused: what an edge serves does not fit."""
    entry_bytes: Required[dict[str, int]]
    """Per measure, about, of a new group in a frame; sparse synopses grow with their values."""
    notes: Required[list[str]]
    forecast: NotRequired[LinkForecast]
    """As far as it is known without values of the query. A center of 0.3.0 leaves it out."""
    edges: Required[list[DryRunEdge]]


class Sides(TypedDict):
    """How far a true value may be above and below an estimate. Null: unknown."""

    above: float | None
    below: float | None


ErrorCause = Literal["sketch", "sampling", "withheld", "straggler", "missing", "measures"]
"""`measures`: of a derived measure, the intervals of those that it reads."""


class ErrorPart(Sides):
    """The part of an interval that one cause makes."""

    cause: ErrorCause
    known: bool
    """Both sides are known."""
    says: str


class EdgeStatement(TypedDict):
    """What an edge had stated about a window and a measure when an answer was given."""

    closed: bool | None
    """Whether it had closed the window with all its records. Null: unknown."""
    closed_until: str | None
    """If it had not: event time before which it had closed everything. Null: unknown."""
    late: int | None
    """Its records that arrived after their slice's close. Null: unknown."""
    withheld: Sides | None
    """What it withholds of a group, at most. Null: unknown."""


class ExplainedEdge(Watermark, EdgeStatement):
    """What an edge had stated when the answer was given, and its state now.

    The watermark of the stream is as far as the center knows by a heartbeat or the answer itself.
    """

    edge: str
    state: EdgeState | Literal["never_connected"]
    """Now."""
    rate: float | None
    """Fraction of records that the accuracy needs processed, now. The edge samples only if it has to. Null: the query
    has no accuracy, or the rate is not known yet."""


class ExplainedRevision(IntervalCell):
    """The same value in one revision; null: the revision has no such group."""

    revision: int
    phase: str
    given_at: str


class ExplainedValue(IntervalCell):
    """A value of an answer, with the causes of its error."""

    value: str
    """Which value of the measure, such as `quantiles 0.5`; empty: it has one value."""
    group: Group
    groups: int
    """Selected groups. The group with the widest interval is explained."""
    confidence: float | None
    shapes: list[PartShape]
    """What the members of the measure's cells are, as in an answer."""
    parts: list[ErrorPart]
    contract: StatedContract
    coverage: float | None
    """Fraction of recent final windows whose first interval contained the true value. Null: unknown."""


class Explanation(ExplainedValue):
    """Why a value is what it is. The parts bound the error by cause; they do not add up to the interval in general."""

    query: str
    window: WindowSpan
    phase: str
    revision: int
    given_at: str
    measure: str
    edges: list[ExplainedEdge]
    revisions: list[ExplainedRevision]
    """The last revisions, ascending."""


class Alarm(TypedDict):
    """A violation of an invariant, such as `frame-conflict`."""

    kind: str
    edge: str
    """The edge that it is about; empty: none."""
    query: str
    """The key of the query that it is about, `name@version`; empty: none."""
    message: str
    first_at: str
    last_at: str
    times: int


class AlarmList(TypedDict):
    alarms: list[Alarm]
    """The latest first."""


class ToldAlert(TypedDict):
    """An alert, or its change."""

    labels: dict[str, str]
    details: Document


class SinkGap(TypedDict):
    """Answers that the retention deleted before the sink had them: ids from `first` to `last`."""

    first: int
    last: int


class SinkQueryState(TypedDict):
    """A query for which a sink lacks answers, or which it cannot write."""

    query: str
    version: int
    answer_id: int
    """Of the newest answer of the query that the sink has."""
    behind_answers: int
    """Answers of the query that the sink has not written."""
    behind_ms: int
    """Age of the oldest of them."""
    problem: str | None
    """Why the last attempt failed: window, target and reason."""
    failing_since: str | None


class ListedSink(TypedDict):
    """A sink and its progress."""

    name: str
    definition: object
    """As it was put here; null: it is in the center's file."""
    state: Literal["running", "failing", "paused", "waiting"]
    """`waiting`: for `edgewater center sink`."""
    problem: str | None
    """Why the last attempt failed."""
    failing_since: str | None
    answer_id: int
    """The sink has all answers up to this one, except those of `queries`."""
    behind_answers: int
    """Answers of any query that it has not read."""
    behind_ms: int
    """Age of the oldest answer that it has not read."""
    queries: list[SinkQueryState]
    """The queries for which the sink lacks answers, or that fail."""
    answers: int
    """Answers that it has written, repetitions included."""
    rows: int
    refused: int
    """Samples or messages that the sink's system has refused and never accepts."""
    refusal: str | None
    """Query, window and reason of the last refusal."""
    gap: SinkGap | None
    """Answers that were deleted before the sink had them."""
    owner: str | None
    """The process that runs it, host:pid."""


for _kind in tuple(globals().values()):
    if is_typeddict(_kind):
        _kind.__pydantic_config__ = {"extra": "allow"}
