"""Decides when an edge samples and at which rate, and estimates the edge's clock offset. This module has no I/O.

Counting, adding and averaging take less time than sampling would save. So a query with an accuracy is not sampled while
edges and links keep up. An edge that does not keep up processes only the records that the accuracy needs. If the
measure is expensive, an edge always processes only these records.

Edges report why they sampled, and an answer states the reasons (`SamplingReasonHistory`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from edgewater.arrivals.targets import COUNTS
from edgewater.base.streams import EdgeId
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef, SamplingReason
from edgewater.wire import uplink_pb2 as pb

LINK_OVERLOADED_S, LINK_RELIEVED_S = 2.0, 0.5
"""Seconds that the link needs to send the backlog. A link becomes overloaded above `LINK_OVERLOADED_S`, and stays
overloaded until it is below `LINK_RELIEVED_S`."""
BUSY_UTILIZATION, CALM_UTILIZATION = 0.9, 0.6
"""Busy fraction of the processor's time. A processor becomes overloaded above `BUSY_UTILIZATION`, and stays overloaded
until it is below `CALM_UTILIZATION`."""
AGREEING_HEARTBEATS = 3
"""Consecutive heartbeats on one side of the bound after which the state of the processor changes."""
RELAPSE_HEARTBEATS = 30
"""Number of heartbeats after a relief. If an overload follows within this number, sampling was the cause of the
relief."""
MAX_AGREEING_HEARTBEATS = AGREEING_HEARTBEATS << 6
RATE_MARGIN = 1.1
"""Factor by which the planned rate is increased. Not all samples are topped up, and an edge cannot top up the sample of
another edge, whose part of the records has risen. Measured in `docs/decisions/0008-intervals-from-samples.md`."""
RATES_EVERY_MS = 5_000  # limit: writes to the catalog
"""The least time between two writes of needed rates to the catalog."""
MIN_RATE_CHANGE = 0.1
"""Relative change of a rate below which no new message is sent."""
CLOCK_OFFSET_NOISE_MS = 20.0
"""The offset in ms that a session may measure between equal clocks on a busy link. Smaller offsets count as 0."""
OFFSET_HEARTBEATS = 5

MAX_SPANS = 64
"""The most spans per edge. The reason may change with each heartbeat, and a window contains many heartbeats."""
MAX_NAMED_EDGES = 3
"""The most edges that a phrase names."""
UNREPORTED = "an edge or its link cannot keep up"
"""The phrase for an edge without a reported reason."""


class SamplingPlan(NamedTuple):
    """The sample of a window on one edge that a query with an accuracy needs.

    Attributes:
        rate: the least fraction of the edge's records that must be processed, in (0, 1].
        records: the number of records that are expected; if fewer come, the edge tops the sample up. 0: it does not.
    """

    rate: float = 1.0
    records: float = 0.0


@dataclass(frozen=True, slots=True)
class SamplingRequirement:
    """The sample that a query with an accuracy needs on one edge.

    Attributes:
        needed_rate: as in `SamplingPlan.rate`.
        always: whether the measure is expensive, so that the edge samples even if it keeps up.
        records: as in `SamplingPlan`.
    """

    query: QueryRef
    needed_rate: float
    always: bool = False
    records: float = 0.0


def needed_plan(spec: QuerySpec, planned: SamplingPlan) -> SamplingPlan:
    """Returns the sample below which the accuracy would not be met.

    The rate is 1 if a sample would distort other measures of the answer, or would save nothing. A sample saves nothing
    for a count, because a count needs every record.

    Args:
        planned: what the early trigger plans.
    """
    if spec.accuracy is None or spec.accuracy.kind in COUNTS or len(spec.measures) > 1:
        return SamplingPlan()
    return SamplingPlan(min(1.0, RATE_MARGIN * planned.rate), planned.records if spec.tops_up_samples else 0.0)


def is_expensive(spec: QuerySpec) -> bool:
    """Returns whether sampling saves time even if edges and links keep up.

    This is so if the measure of the accuracy is expensive.
    """
    return spec.accuracy is not None and any(m.is_expensive for m in spec.measures if m.name == spec.accuracy.measure)


class ProcessorLoadDetector:
    """Detects from heartbeats whether an edge's processor keeps up.

    A relief is the end of an overload. Sampling lowers the utilization, so a relief may be only an effect of sampling.
    If a relief does not last, the next relief needs twice as many calm heartbeats. So an edge that is overloaded for
    long processes all records only once in some minutes.
    """

    def __init__(self) -> None:
        self.overloaded = False
        self._agreeing = 0
        self._since_relief: int | None = None
        self._calm_needed = AGREEING_HEARTBEATS

    def on_heartbeat(self, utilization: float) -> None:
        """Updates the state.

        Args:
            utilization: busy fraction of the time since the last heartbeat; 0 if the edge does not report it.
        """
        if self._since_relief is not None:
            self._since_relief += 1
        agrees = utilization < CALM_UTILIZATION if self.overloaded else utilization > BUSY_UTILIZATION
        self._agreeing = self._agreeing + 1 if agrees else 0
        if self._agreeing < (self._calm_needed if self.overloaded else AGREEING_HEARTBEATS):
            return
        self._agreeing, self.overloaded = 0, not self.overloaded
        if not self.overloaded:
            self._since_relief = 0
            return
        relapse = self._since_relief is not None and self._since_relief <= RELAPSE_HEARTBEATS
        self._calm_needed = min(2 * self._calm_needed, MAX_AGREEING_HEARTBEATS) if relapse else AGREEING_HEARTBEATS


class EdgeSamplingController:
    """Decides the sampling rates of one edge, for one session."""

    def __init__(self) -> None:
        self._link_overloaded = False
        self._processor = ProcessorLoadDetector()
        self._offsets: deque[float] = deque(maxlen=OFFSET_HEARTBEATS)
        self._sent: dict[QueryRef, tuple[SamplingPlan, float, SamplingReason]] = {}

    def on_heartbeat(
        self,
        backlog_bytes: int,
        bandwidth_bytes_s: float,
        clock_offset_ms: float,
        requirements: tuple[SamplingRequirement, ...],
        utilization: float = 0.0,
    ) -> list[pb.Sampling]:
        """Returns the sampling messages that differ from the last messages. The first message of a query is always
        returned.

        Args:
            backlog_bytes: bytes that the edge has not sent yet.
            bandwidth_bytes_s: bandwidth of the edge's link in bytes per second.
            clock_offset_ms: the measured offset of the edge's clock in ms.
            requirements: the rates that the queries need on this edge.
            utilization: busy fraction of the processor's time since the last heartbeat; 0 if the edge does not report
                it.
        """
        behind_s = backlog_bytes / max(bandwidth_bytes_s, 1.0)
        self._link_overloaded = behind_s > (LINK_RELIEVED_S if self._link_overloaded else LINK_OVERLOADED_S)
        self._processor.on_heartbeat(utilization)
        self._offsets.append(clock_offset_ms)
        offset_ms = median(self._offsets)
        messages = []
        for requirement in requirements:
            reason = self._reason(requirement)
            records = requirement.records if reason is SamplingReason.MEASURE and not self._is_overloaded else 0.0
            plan = SamplingPlan(requirement.needed_rate if reason else 1.0, records)
            sent = self._sent.get(requirement.query)
            if sent is not None and sent[2] is reason and not _differs(sent[:2], plan, offset_ms):
                continue
            sent_offset_ms = offset_ms if abs(offset_ms) > CLOCK_OFFSET_NOISE_MS else 0.0
            self._sent[requirement.query] = (plan, sent_offset_ms, reason)
            messages.append(
                pb.Sampling(
                    query=requirement.query.name,
                    query_version=requirement.query.version,
                    rate=plan.rate,
                    expected_records=round(plan.records),
                    clock_offset_ms=sent_offset_ms,
                    reason=pb.Sampling.Reason.ValueType(reason),
                )
            )
        live = {requirement.query for requirement in requirements}
        self._sent = {ref: sent for ref, sent in self._sent.items() if ref in live}
        return messages

    @property
    def _is_overloaded(self) -> bool:
        return self._processor.overloaded or self._link_overloaded

    def _reason(self, requirement: SamplingRequirement) -> SamplingReason:
        if requirement.needed_rate >= 1.0:
            return SamplingReason.NONE
        if requirement.always:
            return SamplingReason.MEASURE
        if self._processor.overloaded:
            return SamplingReason.PROCESSOR
        return SamplingReason.LINK if self._link_overloaded else SamplingReason.NONE


def _differs(sent: tuple[SamplingPlan, float], plan: SamplingPlan, offset_ms: float) -> bool:
    sent_plan, sent_offset_ms = sent
    changed = any(abs(a - b) > MIN_RATE_CHANGE * a for a, b in zip(sent_plan, plan, strict=True))
    is_other = changed or (plan.rate == 1.0) != (sent_plan.rate == 1.0)
    return is_other or abs(offset_ms - sent_offset_ms) > CLOCK_OFFSET_NOISE_MS


def plans_differ(stored: Mapping[EdgeId, SamplingPlan], now: Mapping[EdgeId, SamplingPlan]) -> bool:
    """Returns whether plans have changed so much that they should be stored again."""
    return stored.keys() != now.keys() or any(
        abs(now[e].rate - stored[e].rate) > MIN_RATE_CHANGE * max(stored[e].rate, 0.01)
        or abs(now[e].records - stored[e].records) > MIN_RATE_CHANGE * stored[e].records
        for e in now
    )


class SamplingReasonHistory:
    """Stores the reasons for sampling that each edge reported. Times are arrival slots, from one report to the next."""

    def __init__(self) -> None:
        self._spans: dict[str, list[list[int]]] = {}  # [from, to, reason], ascending
        self._reported_through: dict[str, int] = {}

    def add(self, edge: str, through: int, reason: SamplingReason) -> None:
        """Adds an edge's report about the time since the edge's last report.

        Args:
            through: the slot up to which the edge reports.
        """
        since = min(self._reported_through.get(edge, through), through)
        self._reported_through[edge] = max(self._reported_through.get(edge, through), through)
        if reason is SamplingReason.NONE:
            return
        spans = self._spans.setdefault(edge, [])
        if spans and spans[-1][1:] == [since, reason]:
            spans[-1][1] = through
        else:
            spans.append([since, through, int(reason)])
            del spans[:-MAX_SPANS]

    def in_window(self, edges: Iterable[str], began: int, ended: int) -> dict[str, frozenset[SamplingReason]]:
        """Returns per edge the reasons that the edge reported during a window.

        If the edge reported no reason during the window, the result has the edge's reasons since the window's end.
        These reasons concern late records.

        Args:
            began, ended: the first slot of the window and the first slot after the window.
        """
        return {edge: self._of(edge, began, ended) for edge in edges}

    def _of(self, edge: str, began: int, ended: int) -> frozenset[SamplingReason]:
        since = [s for s in self._spans.get(edge, ()) if s[1] > began]
        during = [s for s in since if s[0] < ended]
        return frozenset(SamplingReason.from_number(reason) for _, _, reason in during or since)

    def forget_before(self, slot: int) -> None:
        """Drops the reasons that are needed only for windows that begin before `slot`."""
        spans = {edge: [s for s in spans if s[1] > slot] for edge, spans in self._spans.items()}
        self._spans = {edge: later for edge, later in spans.items() if later}

    def keep(self, edges: Iterable[str]) -> None:
        """Drops the reasons of all edges except `edges`."""
        named = set(edges)
        self._spans = {e: s for e, s in self._spans.items() if e in named}
        self._reported_through = {e: s for e, s in self._reported_through.items() if e in named}

    def to_state(self) -> dict[str, Any]:
        """Returns the state as JSON."""
        return {"spans": self._spans, "reported_through": self._reported_through}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Sets the state from the result of `to_state`. Damaged JSON may raise any exception."""
        self._spans = {edge: [list(s) for s in spans] for edge, spans in state["spans"].items()}
        self._reported_through = dict(state["reported_through"])


def describe_reasons(reasons: Mapping[str, frozenset[SamplingReason]]) -> str:
    """Returns a phrase that says why an answer is sampled.

    Args:
        reasons: the reasons of each edge that sampled. The set is empty if the edge reported no reason.
    """
    edges_of: dict[SamplingReason, list[str]] = {reason: [] for reason in SamplingReason}
    for edge, reported in sorted(reasons.items()):
        for reason in reported or (SamplingReason.NONE,):
            edges_of[reason].append(edge)
    phrases = []
    if edges_of[SamplingReason.MEASURE]:
        phrases.append("the measure is expensive")
    for reason, resource in ((SamplingReason.PROCESSOR, "processor"), (SamplingReason.LINK, "link")):
        if edges := edges_of[reason]:
            phrases.append(f"the {resource}{'s' * (len(edges) > 1)} of {_listed(edges)} cannot keep up")
    if edges_of[SamplingReason.NONE] or not phrases:
        phrases.append(UNREPORTED)
    return "sampled: " + "; ".join(phrases)


def _listed(edges: list[str]) -> str:
    more = f" and {len(edges) - MAX_NAMED_EDGES} more" if len(edges) > MAX_NAMED_EDGES else ""
    return ", ".join(edges[:MAX_NAMED_EDGES]) + more
