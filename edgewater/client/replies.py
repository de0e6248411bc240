"""The JSON of a center's replies, as far as the client reads it."""

from __future__ import annotations

from typing import Any, NotRequired, Required, TypeAlias, TypedDict

from edgewater.model.json_types import Group, IntervalCell, Json

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
    },
    total=False,
)
"""A query in canonical form. A computed key of a group is a mapping of its name to an expression."""


class Registered(TypedDict):
    """A query as it is registered."""

    name: str
    version: int
    spec: Spec
    registered_at: str
    notes: NotRequired[list[str] | None]


class Window(TypedDict):
    """Start and end of a window in RFC 3339."""

    start: str
    end: str


class PartShape(TypedDict):
    """The form of one member of a measure's cell, as an answer states it."""

    name: str
    shape: str
    columns: list[str]


class Violation(TypedDict):
    """A part of the contract that an answer does not keep."""

    code: str
    message: str


class Contract(TypedDict):
    """What was requested of an answer, and whether the answer keeps it."""

    requested: dict[str, Json]
    met: bool
    violations: list[Violation]
    uncovered: NotRequired[list[str]]


class Completeness(TypedDict, total=False):
    """The records that an answer has and lacks."""

    ratio: Required[float | None]
    expected: Required[int]
    reported: Required[int]
    missing: Required[list[str]]
    guessed: dict[str, int]
    rejected: int
    delivery: dict[str, list[str]]


class Quality(TypedDict):
    """What an answer states about itself."""

    completeness: Completeness
    records: dict[str, int | None]
    staleness_ms: float | None
    first_staleness_ms: float | None
    error: dict[str, dict[str, Json]]


class Members(TypedDict):
    """An answer without its data."""

    query: str
    version: NotRequired[int]
    window: Window
    phase: str
    revision: int
    given_at: str
    total: dict[str, IntervalCell]
    rest: dict[str, float | int | None]
    shapes: NotRequired[dict[str, list[PartShape]]]
    confidence: float | None
    quality: Quality
    contract: Contract
    group_by: NotRequired[list[str]]


Row: TypeAlias = dict[str, Any]
"""A row of an answer: its group, and a cell by measure. The name of a measure may be any."""


class WholeAnswer(Members):
    """An answer."""

    data: list[Row]
    base: NotRequired[int]
    removed: NotRequired[list[Group]]


class EdgeProgress(TypedDict):
    """The progress of an edge in the stream of a query."""

    edge: str
    state: str
    watermark: str | None
    ended: bool
    last_seen: str | None


class QueryProgress(TypedDict):
    """The progress of the edges of a query."""

    query: str
    version: int
    first_version: NotRequired[int]
    edges: list[EdgeProgress]


class ProgressData(TypedDict):
    """The data of an event about progress."""

    time: str
    queries: list[QueryProgress]
