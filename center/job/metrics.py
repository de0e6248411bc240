"""What the job shows of itself: a registry of its own, served as ``/metrics`` beside ``/livez``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from center.ledger import Emission, FrameSummary, Phase
from edgewater.wire.frames import QueryRef

logger = logging.getLogger(__name__)

WAIT_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)
STAGE_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0, 10.0, 60.0)
DELAY_BUCKETS_S = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)


class JobMetrics:
    def note_accuracy(self, emission: Emission) -> None:
        """What an answer to a query with an accuracy says of its wait, its stragglers and its interval's record."""
        said, query = emission.quality.accuracy, emission.query.name
        if said is None:
            return
        if said.coverage is not None:
            self.coverage.labels(query).set(said.coverage)
        if said.covered is not None:
            self.shadowed.labels(query, "yes" if said.covered else "no").inc()
        if said.prediction is not None and emission.phase is Phase.EARLY:
            self.straggler_share.labels(query).set(said.prediction.straggler_share)
            if emission.revision == 1 and said.waited_ms is not None:
                self.chosen_wait.labels(query).observe(said.waited_ms / 1000)

    def note_batch(
        self,
        facts: Sequence[FrameSummary],
        emissions: Iterable[Emission],
        began_ms: int,
        merged_ms: int,
        applied_ms: int,
    ) -> None:
        """How long a batch's frames have taken, and of the first answers that it brought, where their time went.

        Wall clocks of three machines meet here; what they disagree by moves from one part to the next.
        """
        arrived_ms: dict[QueryRef, int] = {}
        for fact in facts:
            self.frame_delay.observe(max(0, applied_ms - fact.received_at_ms) / 1000)
            arrived_ms[fact.query] = max(fact.received_at_ms, arrived_ms.get(fact.query, 0))
        for emission in emissions:
            last_ms = arrived_ms.get(emission.query)
            if emission.revision != 1 or last_ms is None:
                continue
            parts = {
                "arrive": last_ms - (emission.answered_at_ms - emission.quality.staleness_ms),
                "wait": began_ms - last_ms,
                "merge": merged_ms - began_ms,
                "apply": applied_ms - merged_ms,
            }
            for part, ms in parts.items():
                self.first_answer.labels(emission.query.name, part).observe(max(0, ms) / 1000)
            logger.debug(
                "%s: window to %d %s, ms after its end by part: %s",
                emission.query.name, emission.window_end_ms, emission.phase, parts,
            )  # fmt: skip

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "edgewater_job"
        self.batches = Counter(f"{name}_batches", "Micro-batches applied.", registry=self.registry)
        self.rows = Counter(f"{name}_rows", "Rows that came out of merging.", registry=self.registry)
        self.frames = Counter(f"{name}_frames", "Frames applied.", registry=self.registry)
        self.answers = Counter(f"{name}_answers", "Answers given.", ["cause"], registry=self.registry)
        self.missed = Counter(
            f"{name}_missed_deadlines",
            "Windows whose first answer stood later than the staleness budget.",
            ["query"],
            registry=self.registry,
        )
        self.batch_seconds = Histogram(f"{name}_batch_seconds", "Merging and applying a batch.", registry=self.registry)
        self.frame_delay = Histogram(
            f"{name}_frame_delay_seconds",
            "From the arrival of a frame at the gateway until it counts.",
            buckets=DELAY_BUCKETS_S,
            registry=self.registry,
        )
        self.told = Histogram(
            f"{name}_told_seconds",
            "From the moment of which an edge tells what has arrived until its frame is at the gateway.",
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self.first_answer = Histogram(
            f"{name}_first_answer_seconds",
            "From a window's end until its first answer is in the store, by part: until the last frame that it took "
            "was at the gateway (arrive), until its batch began (wait), its merging (merge), its transaction (apply).",
            ["query", "part"],
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self.last_batch = Gauge(f"{name}_last_batch_timestamp_seconds", "When it was applied.", registry=self.registry)
        self.start_seconds = Gauge(
            f"{name}_start_seconds", "From the job's start until its stream ran.", registry=self.registry
        )
        self.passed_over = Counter(
            f"{name}_passed_over", "Frames and partials that cannot be counted.", ["kind"], registry=self.registry
        )
        self.stuck = Gauge(f"{name}_stuck_queries", "Queries whose frames cannot be applied.", registry=self.registry)
        self.coverage = Gauge(
            f"{name}_interval_coverage_ratio",
            "Of the query's last windows that are final and were answered early, the part whose first interval held.",
            ["query"],
            registry=self.registry,
        )
        self.shadowed = Counter(
            f"{name}_shadowed_windows",
            "Early answers that were compared with the final one, by whether their interval held it.",
            ["query", "held"],
            registry=self.registry,
        )
        self.chosen_wait = Histogram(
            f"{name}_chosen_wait_seconds",
            "Event time from a window's end until the arrivals that its first early answer is made of.",
            ["query"],
            buckets=WAIT_BUCKETS_S,
            registry=self.registry,
        )
        self.straggler_share = Gauge(
            f"{name}_straggler_share",
            "The part of the last early answer's records that had not come.",
            ["query"],
            registry=self.registry,
        )
        self.needed_rate = Gauge(
            f"{name}_needed_sampling_rate",
            "The part of an edge's records that the accuracy needs processed.",
            ["query", "edge"],
            registry=self.registry,
        )
        self.failures = Counter(f"{name}_failures", "Failures that are tried again.", ["where"], registry=self.registry)
