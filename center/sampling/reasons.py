"""Why edges have been sampling, as their reports said, and the words for it in an answer. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edgewater.wire.frames import SamplingReason

MAX_SPANS = 64
"""Of one edge: a reason changes with heartbeats, of which many go into a window."""
NAMED = 3
"""Edges that a reason names."""
UNREPORTED = "an edge or its link cannot keep up"
"""Of an edge of an older release."""


class SamplingReasonHistory:
    """By edge, what its reports gave as the reason. Times are slots of arrival, from one report to the next."""

    def __init__(self) -> None:
        self._spans: dict[str, list[list[int]]] = {}  # [from, to, reason], ascending
        self._told: dict[str, int] = {}

    def note(self, edge: str, through: int, reason: SamplingReason) -> None:
        """A report of what came up to slot `through`."""
        since = min(self._told.get(edge, through), through)
        self._told[edge] = max(self._told.get(edge, through), through)
        if reason is SamplingReason.NONE:
            return
        spans = self._spans.setdefault(edge, [])
        if spans and spans[-1][1:] == [since, reason]:
            spans[-1][1] = through
        else:
            spans.append([since, through, int(reason)])
            del spans[:-MAX_SPANS]

    def of_window(self, edges: Iterable[str], began: int, ended: int) -> dict[str, frozenset[SamplingReason]]:
        """Why these edges sampled a window's records: what they said while it lasted, or, of what came late, since."""
        return {edge: self._of(edge, began, ended) for edge in edges}

    def _of(self, edge: str, began: int, ended: int) -> frozenset[SamplingReason]:
        since = [s for s in self._spans.get(edge, ()) if s[1] > began]
        during = [s for s in since if s[0] < ended]
        return frozenset(SamplingReason.from_number(reason) for _, _, reason in during or since)

    def forget_before(self, slot: int) -> None:
        """Nothing is asked any more of windows that begin earlier."""
        spans = {edge: [s for s in spans if s[1] > slot] for edge, spans in self._spans.items()}
        self._spans = {edge: kept for edge, kept in spans.items() if kept}

    def keep(self, edges: Iterable[str]) -> None:
        """Other edges are gone."""
        kept = set(edges)
        self._spans = {e: s for e, s in self._spans.items() if e in kept}
        self._told = {e: s for e, s in self._told.items() if e in kept}

    def to_state(self) -> dict[str, Any]:
        """JSON."""
        return {"spans": self._spans, "told": self._told}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What `to_state` gave; of an older release, nothing. Raises what damaged JSON raises."""
        self._spans = {edge: [list(s) for s in spans] for edge, spans in state.get("spans", {}).items()}
        self._told = dict(state.get("told", {}))


def describe_reasons(reasons: Mapping[str, frozenset[SamplingReason]]) -> str:
    """Why an answer is sampled.

    Args:
        reasons: by edge that sampled; none: it did not say.
    """
    said: dict[SamplingReason, list[str]] = {reason: [] for reason in SamplingReason}
    for edge, given in sorted(reasons.items()):
        for reason in given or (SamplingReason.NONE,):
            said[reason].append(edge)
    words = []
    if said[SamplingReason.MEASURE]:
        words.append("the measure is expensive")
    for reason, what in ((SamplingReason.PROCESSOR, "processor"), (SamplingReason.LINK, "link")):
        if edges := said[reason]:
            words.append(f"the {what}{'s' * (len(edges) > 1)} of {_listed(edges)} cannot keep up")
    if said[SamplingReason.NONE] or not words:
        words.append(UNREPORTED)
    return "sampled: " + "; ".join(words)


def _listed(edges: list[str]) -> str:
    more = f" and {len(edges) - NAMED} more" if len(edges) > NAMED else ""
    return ", ".join(edges[:NAMED]) + more
