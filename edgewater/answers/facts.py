"""`Facts`: all that is stored about an answer besides its data.

Facts never change. What an answer states (`edgewater.answers.statement`) follows from its facts and its data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from edgewater.answers.causes import RULES, Cause
from edgewater.answers.withheld_bounds import WithheldBound
from edgewater.base.streams import Constant, Delivery
from edgewater.wire import Rest

MAX_LISTED_EDGES = 1_000
"""The most edges in a list of an answer."""


class Phase(StrEnum):
    """Progress of a window's answers. The phase of a window never goes back."""

    EARLY = "early"
    COMPLETE = "complete"
    FINAL = "final"

    @property
    def rank(self) -> int:
        return _RANKS[self]


_RANKS = {phase: rank for rank, phase in enumerate(Phase)}

Constants = Mapping[str, Constant]
"""By column of `group_by`, the value of the column if all records of an edge have the same value."""


class Amount(NamedTuple):
    """A number of records, within bounds. ``most``: None if it is unknown."""

    least: int = 0
    most: int | None = 0

    def __add__(self, other: object) -> Amount:
        assert isinstance(other, Amount)
        most = None if self.most is None or other.most is None else self.most + other.most
        return Amount(self.least + other.least, most)


NONE, UNKNOWN = Amount(), Amount(0, None)


def joint_confidence(confidences: Iterable[float]) -> float:
    """Returns a probability with which several statements are all true, whatever their dependence is (Bonferroni)."""
    return max(1.0 - sum(1.0 - each for each in confidences), 0.0)


@dataclass(frozen=True, slots=True)
class Deviation:
    """What an answer lacks, or has too much, for one cause.

    Attributes:
        edge: the edge that is the reason; empty if it is not known.
        source, reason: of lost input, the edge's source and its reason. Otherwise, `reason` is the reason why records
            are not in the answer.
        records: number of records as counted where they came late, were rejected or were guessed about.
        lacks: number of records that the answer lacks, for certain.
        extra: number of records that the answer has too much, for certain.
        from_ms, to_ms: event times of the records, [from, to); None: unknown.
        only: the records are only in groups with these values; empty: they may be in any group.
        windows: number of windows without an answer.
        amounts: by measure, by how much the records of `lacks` together may move a value. An absent measure is unknown.
        confidence: probability that `lacks` and `amounts` are not exceeded.
    """

    cause: Cause
    edge: str = ""
    source: str = ""
    reason: str = ""
    records: int = 0
    lacks: Amount = NONE
    extra: Amount = NONE
    from_ms: int | None = None
    to_ms: int | None = None
    only: Constants = field(default_factory=dict)
    windows: int = 0
    amounts: Mapping[str, WithheldBound] = field(default_factory=dict)
    confidence: float = 1.0


@dataclass(frozen=True, slots=True)
class EdgeStatements:
    """The statements of each edge about a window at the time of its answer.

    A member is None if it would have more than `MAX_LISTED_EDGES` edges, or if the answer is the union of several.

    Attributes:
        closed: expected edges, sorted, that had closed the window with all their records.
        closed_until_ms: for each missing edge that has closed a slice, the event time before which the edge had closed
            all slices.
        late: number of late records by edge.
        withheld: by edge and measure, the withheld amounts.
        only: constants of the edges in `withheld`.
    """

    closed: tuple[str, ...] | None = ()
    closed_until_ms: Mapping[str, int] | None = field(default_factory=dict)
    late: Mapping[str, int] | None = field(default_factory=dict)
    withheld: Mapping[str, Mapping[str, WithheldBound]] | None = field(default_factory=dict)
    only: Mapping[str, Constants] = field(default_factory=dict)


NOT_LISTED = EdgeStatements(None, None, None, None)


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """The facts of a session.

    Attributes:
        cut: whether the session reached its maximum length and continues in the next session.
        cuts: number of final sessions of the query so far that were cut.
        merged_into_ms: start of the session into which this session was merged. This session then has no data. None if
            it was not merged.
    """

    cut: bool
    cuts: int
    merged_into_ms: int | None = None


Bounds = tuple[float | None, float | None, float | None]
"""Estimate, lower and upper bound; None: unknown."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """An interval that stands for records which have not arrived.

    Attributes:
        measure: the measure whose values are predicted; empty: no measure, as in a union of several windows. Of
            records, there may be several, separated by ", ".
        of_records: the interval is about the number of records of a synopsis, not about values of the measure.
        confidence: probability that the interval contains the value; None: it has no bounds.
        interval: the interval of a query without groups.
        groups: the interval by group (`edgewater.model.accuracy.group_key`).
    """

    measure: str = ""
    of_records: bool = False
    confidence: float | None = None
    interval: Bounds = (None, None, None)
    groups: Mapping[str, Bounds] | None = None

    @property
    def measures(self) -> list[str]:
        return self.measure.split(", ") if self.measure else []


@dataclass(frozen=True, slots=True)
class GroupCounts:
    """Of an early answer with groups: the groups with a prediction, those within the error, and those without one."""

    eligible: int
    met: int
    waiting: int


@dataclass(frozen=True, slots=True)
class AccuracyFacts:
    """The facts of an answer to a query with an accuracy.

    Attributes:
        sampling: whether records were sampled, and the reason.
        waited_ms: event time from the window's end until the arrivals met the error target.
        coverage: among the recent final windows with an early answer, the fraction whose first interval contained the
            true value; None if there is no such window yet.
        covered: for a final answer, whether the first interval of this window contained the value, for all groups.
        is_predicted: a prediction was made.
        straggler_share: the part of the window's records that had not arrived, as predicted.
        silent: the edges that had stopped reporting.
        exceeding: by edge, the number of records of all windows so far that came later than the declared delays; None
            if no delays are declared.
        groups: None if the query has no groups or too many.
        too_many_groups: the query has too many groups for early answers.
        stands_for_missing: a prediction stands for the records of missing edges, or they are the reason of `unmet`.
        unmet: why the answer does not keep the accuracy; empty: it keeps the accuracy.
        expected, sampled: numbers of records, as predicted; None: unknown.
        error: by cause (``sampling``, ``straggler``, ``missing``), the largest error; None: unknown. Empty if the data
            alone determine the values.
    """

    measure: str
    sampling: str
    waited_ms: int | None = None
    coverage: float | None = None
    covered: bool | None = None
    is_predicted: bool = False
    straggler_share: float | None = None
    silent: tuple[str, ...] = ()
    exceeding: Mapping[str, int] | None = None
    groups: GroupCounts | None = None
    too_many_groups: bool = False
    stands_for_missing: bool = False
    unmet: str = ""
    expected: int | None = None
    sampled: int | None = None
    error: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one answer at the time it was given.

    Attributes:
        expected: number of expected edges.
        reported: number of expected edges that have closed the window with all their records.
        ratio: the part of the window's records that the answer has, as far as it is known: of the edges that have
            reported, of the records that are known, and of a union the mean of its windows.
        deviations: what the answer lacks, or has too much.
        observed: number of records in the answer.
        late: number of records in the answer that arrived after their slice's close.
        staleness_ms: time from the window's end to this answer.
        first_staleness_ms: staleness of the window's first answer. Under a combined budget, staleness of the first
            answer that kept the error budget. A staleness budget applies only to this answer.
        withheld: by measure, the withheld amounts, if an edge withholds anything.
        both_signs: sums whose values have both signs, so that a share of the values is no share of the sum.
        rests: by measure whose values edges withhold, the amount that is missing in all groups together; None if it is
            unknown.
        has_data: whether an edge has reported records of the window.
        deliveries: by edge that may have records of the window and does not count each record exactly once, the edge's
            deliveries.
        edges: the statements of each edge.
        session: for session windows.
        accuracy: for a query with an accuracy.
        predicted: the values that stand for records which have not arrived; None: the data determine the values.
        windows: of a union, the number of its windows; 0: it is no union.
    """

    expected: int
    reported: int
    ratio: float
    observed: int = 0
    late: int = 0
    staleness_ms: int = 0
    first_staleness_ms: int = 0
    deviations: tuple[Deviation, ...] = ()
    withheld: Mapping[str, WithheldBound] = field(default_factory=dict)
    both_signs: tuple[str, ...] = ()
    rests: Mapping[str, Rest | None] = field(default_factory=dict)
    has_data: bool = True
    deliveries: Mapping[str, tuple[Delivery, ...]] = field(default_factory=dict)
    edges: EdgeStatements = field(default_factory=EdgeStatements)
    session: SessionFacts | None = None
    accuracy: AccuracyFacts | None = None
    predicted: Predicted | None = None
    windows: int = 0

    def by_cause(self, *causes: Cause) -> tuple[Deviation, ...]:
        """Returns the deviations with one of these causes."""
        return tuple(d for d in self.deviations if d.cause in causes)

    def without(self, *causes: Cause) -> Facts:
        """Returns the facts of an answer that lacks nothing for these causes."""
        return replace(self, deviations=tuple(d for d in self.deviations if d.cause not in causes))

    def edges_by(self, cause: Cause) -> list[str]:
        """Returns the edges of a cause, sorted."""
        return sorted({d.edge for d in self.deviations if d.cause is cause})

    @property
    def lacking(self) -> list[str]:
        """The edges that are missing, then the edges that have left."""
        return [*self.edges_by(Cause.MISSING), *self.edges_by(Cause.LEFT)]

    @property
    def reasons(self) -> list[str]:
        """What has happened, for each cause."""
        return [RULES[cause].what for cause in dict.fromkeys(d.cause for d in self.deviations)]

    @property
    def is_merged_session(self) -> bool:
        """Whether the window's session was merged into another session. The window is then empty."""
        return self.session is not None and self.session.merged_into_ms is not None

    @property
    def is_complete(self) -> bool:
        """Whether every expected edge has closed the window, and every window of a union has an answer."""
        return self.expected > 0 and not self.by_cause(Cause.MISSING, Cause.LEFT, Cause.UNANSWERED)

    @property
    def lacks_records(self) -> bool:
        """Whether the answer may lack records."""
        return not self.is_complete or any(d.lacks != NONE or d.extra != NONE for d in self.deviations)

    @property
    def may_count_twice(self) -> bool:
        """Whether a record may count twice. Then not even a count has a bound."""
        return any(d.extra != NONE for d in self.deviations)

    def records_by(self, cause: Cause) -> Counter[str]:
        """Returns the number of records of a cause, by reason."""
        counts: Counter[str] = Counter()
        for each in self.by_cause(cause):
            counts[each.reason] += each.records
        return counts

    @property
    def late_counts(self) -> tuple[int, ...]:
        """The numbers of records that came late, were rejected, or were guessed about."""
        return tuple(self.records_by(cause).total() for cause in (Cause.AFTER_FINAL, Cause.REJECTED, Cause.GUESSED))
