"""What a run does, drawn from its seed before anything starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.e2e.soak.records import Profile

FILE_FAULTS = ("rename", "goes-on", "copytruncate", "delete", "compress", "same-inode")
EDGE_FAULTS = (
    "kill-edge",
    "stop-edge",
    "pause-edge",
    "lost-state",
    "old-state",
    "copied-state",
    "clock",
    "disk-full",
    "retire",
    "join",
)
LINK_FAULTS = ("cut", "duplicate")
BROKER_FAULTS = ("broker-away", "broker-restart")
CENTER_FAULTS = ("kill-gateway", "kill-api", "kill-job", "kill-sink", "checkpoints")
INPUT_FAULTS = ("late", "ahead", "nan", "big", "overflow", "bad", "drift")
QUERY_FAULTS = ("late-query", "put")
FAULTS = (
    *FILE_FAULTS, *EDGE_FAULTS, *LINK_FAULTS, *BROKER_FAULTS, *CENTER_FAULTS, *INPUT_FAULTS, *QUERY_FAULTS,
)  # fmt: skip

PROFILES = {
    "late": Profile(late=0.1),
    "ahead": Profile(ahead=0.05),
    "nan": Profile(not_a_number=0.02),
    "big": Profile(big=0.02),
    "overflow": Profile(overflow=0.03),
}

SOURCES = {"file": 0.35, "http": 0.25, "stdin": 0.1, "kafka": 0.15, "mqtt": 0.15}
"""Kinds of sources with their probabilities. A further kind, such as OTLP, also needs an `Input`, an entry in the
configuration of the edge, and its delivery in `DELIVERIES`."""
DELIVERIES = {"stdin": "at-most-once", "mqtt": "at-least-once"}
"""Of the kinds that do not count each record exactly once."""
IDLE_MS = 3000
INPUT_S = 12.0
QUERIES = ("logs", "budget", "budget_logs", "stale", "early", "sliding", "session", "sketch")


@dataclass(frozen=True, slots=True)
class SourcePlan:
    kind: str
    records_per_s: float
    profile: Profile


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """An edge; `joins_at_s` after the input began, 0: before."""

    name: str
    sources: tuple[SourcePlan, ...]
    joins_at_s: float = 0.0

    @property
    def delivery(self) -> list[str]:
        """What answers state of the edge; empty: each record counts exactly once."""
        return sorted({DELIVERIES[source.kind] for source in self.sources if source.kind in DELIVERIES})

    def without_mqtt(self) -> EdgePlan:
        """The same edge with Kafka sources instead, for machines without mosquitto."""
        sources = (replace(source, kind="kafka") if source.kind == "mqtt" else source for source in self.sources)
        return replace(self, sources=tuple(sources))


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: when it begins, counted from the begin of the input, how long it lasts, and at which edge."""

    kind: str
    at_s: float
    lasts_s: float
    edge: int


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode.

    Attributes:
        kinds: the faults' kinds and those of its input, sorted.
        queries: names among `QUERIES`, besides the exact query that every episode has.
        listed: whether the queries name the expected edges.
    """

    number: int
    kinds: tuple[str, ...]
    edges: tuple[EdgePlan, ...]
    queries: tuple[str, ...]
    faults: tuple[Fault, ...]
    window_ms: int
    lateness_ms: int
    disorder_ms: int
    listed: bool
    seed: int

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "kinds": list(self.kinds),
            "edges": {e.name: [s.kind for s in e.sources] for e in self.edges},
            "queries": list(self.queries),
            "faults": [f"{f.kind} at {f.at_s:.1f} s for {f.lasts_s:.1f} s" for f in self.faults],
            "listed": self.listed,
        }


def draw_episode(seed: int, number: int, kinds: Sequence[str] = FAULTS, at_once: int = 2) -> Episode:
    """Draws an episode. Equal arguments give equal episodes.

    Every kind of fault comes in turn, in an order that the seed draws; up to `at_once` − 1 others are drawn to it.
    """
    turn = np.random.default_rng((seed, number // len(kinds))).permutation(len(kinds))
    rng = np.random.default_rng((seed, number, 1))
    chosen = {kinds[turn[number % len(kinds)]]}
    chosen |= {kinds[i] for i in rng.choice(len(kinds), size=int(rng.integers(0, at_once)))}
    profile = _merge(PROFILES[k] for k in chosen if k in PROFILES)
    edges = _draw_edges(number, chosen, profile, rng)
    faults = tuple(sorted((_draw_fault(k, edges, rng) for k in sorted(chosen) if _happens(k)), key=lambda f: f.at_s))
    wanted = {"logs", "budget_logs"} if "nan" in chosen else set()
    drawn = {QUERIES[i] for i in rng.choice(len(QUERIES), size=3, replace=False)}
    return Episode(
        number=number,
        kinds=tuple(sorted(chosen)),
        edges=edges,
        queries=tuple(q for q in QUERIES if q in wanted | drawn),
        faults=faults,
        window_ms=int(rng.choice([1000, 2000])),
        lateness_ms=int(rng.choice([0, 1000, 2000])),
        disorder_ms=int(rng.choice([0, 0, 500])),
        listed=bool(rng.random() < 0.5) and "retire" not in chosen,
        seed=int(rng.integers(1 << 31)),
    )


def _happens(kind: str) -> bool:
    return kind not in PROFILES and kind not in ("join", "bad")


def _merge(profiles: Any) -> Profile:
    merged: Mapping[str, float] = {}
    for profile in profiles:
        values = {name: getattr(profile, name) for name in Profile.__slots__}
        merged = {name: max(value, merged.get(name, 0.0)) for name, value in values.items()}
    return Profile(**merged)


def _draw_edges(number: int, chosen: set[str], profile: Profile, rng: np.random.Generator) -> tuple[EdgePlan, ...]:
    edges = []
    for i in range(int(rng.integers(2, 4))):
        kinds = [str(k) for k in rng.choice(list(SOURCES), size=1, p=list(SOURCES.values()))]
        if i == 0 and chosen & set(FILE_FAULTS):
            kinds = ["file"]  # the edge that file faults happen at
        elif i == 0 and chosen & set(BROKER_FAULTS):
            kinds = ["mqtt" if "broker-restart" in chosen else str(rng.choice(["kafka", "mqtt"]))]
        if rng.random() < 0.4 and "http" not in kinds:
            kinds.append("http")
        sources = tuple(SourcePlan(k, float(rng.uniform(10, 40)), profile) for k in kinds)
        joins = 0.0
        if "join" in chosen and i == 1:
            joins = float(rng.uniform(2, 10))
        edges.append(EdgePlan(f"e{number}-{'xyz'[i]}", sources, joins))
    return tuple(edges)


def _draw_fault(kind: str, edges: Sequence[EdgePlan], rng: np.random.Generator) -> Fault:
    edge = (
        0
        if kind in (*FILE_FAULTS, *BROKER_FAULTS)
        else int(rng.choice([i for i, e in enumerate(edges) if not e.joins_at_s]))
    )
    return Fault(kind, float(rng.uniform(2.0, 7.0)), float(rng.uniform(1.0, 4.0)), edge)
