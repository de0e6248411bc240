"""Why edges sampled, from their reports, and the phrase for it in an answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edgewater.wire import SamplingReason

MAX_SPANS = 64
"""Per edge. A reason changes with heartbeats, and a window spans many of them."""
MAX_NAMED_EDGES = 3
"""Edges that a phrase names."""
UNREPORTED = "an edge or its link cannot keep up"
"""The phrase for an edge without a reported reason."""


class SamplingReasonHistory:
    """Per edge, the reasons that its reports gave. Times are arrival slots, from one report to the next."""

    def __init__(self) -> None:
        self._spans: dict[str, list[list[int]]] = {}  # [from, to, reason], ascending
        self._reported_through: dict[str, int] = {}

    def add(self, edge: str, through: int, reason: SamplingReason) -> None:
        """Adds a report about the time up to slot `through`."""
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
        """Per edge, the reasons reported during a window, or since its end if there are none (late records)."""
        return {edge: self._of(edge, began, ended) for edge in edges}

    def _of(self, edge: str, began: int, ended: int) -> frozenset[SamplingReason]:
        since = [s for s in self._spans.get(edge, ()) if s[1] > began]
        during = [s for s in since if s[0] < ended]
        return frozenset(SamplingReason.from_number(reason) for _, _, reason in during or since)

    def forget_before(self, slot: int) -> None:
        """Drops what only windows that begin before `slot` need."""
        spans = {edge: [s for s in spans if s[1] > slot] for edge, spans in self._spans.items()}
        self._spans = {edge: kept for edge, kept in spans.items() if kept}

    def keep(self, edges: Iterable[str]) -> None:
        """Drops all edges but these."""
        kept = set(edges)
        self._spans = {e: s for e, s in self._spans.items() if e in kept}
        self._reported_through = {e: s for e, s in self._reported_through.items() if e in kept}

    def to_state(self) -> dict[str, Any]:
        """The state as JSON types."""
        return {"spans": self._spans, "reported_through": self._reported_through}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `to_state` returned. Raises what damaged JSON raises."""
        self._spans = {edge: [list(s) for s in spans] for edge, spans in state["spans"].items()}
        self._reported_through = dict(state["reported_through"])


def describe_reasons(reasons: Mapping[str, frozenset[SamplingReason]]) -> str:
    """A phrase that says why an answer is sampled.

    Args:
        reasons: by edge that sampled; an empty set: the edge reported none.
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
