"""Where a first answer's time went, as the job's histograms say it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from center.job.ledger_writer import LedgerWriter
from center.job.metrics import JobMetrics
from center.ledger import FrameSummary
from edgewater.answers import UNKNOWN, Cause, Deviation, Phase
from edgewater.wire import Arrivals, QueryRef, SliceClose

ENDED_MS = 1_001_000
FIRST = "edgewater_job_first_answer"
STAGES = ("arrive", "wait", "merge", "queue", "apply")


def parts_ms(metrics: JobMetrics, query: str) -> dict[str, float]:
    name = f"{FIRST}_seconds_sum"
    values = {p: metrics.registry.get_sample_value(name, {"query": query, "stage": p}) for p in STAGES}
    return {part: round(1000 * value) for part, value in values.items() if value is not None}


def closing_frames(world: Any, ref: Any, **more: Any) -> list[FrameSummary]:
    """Each edge closes the window that ends at `ENDED_MS`; their frames come 10, 20 and 30 ms later."""
    close = SliceClose(ENDED_MS - 1000, 8, 0)
    return [
        FrameSummary(ref, i, edge, ENDED_MS, (close,), (ENDED_MS - 1000,), 100, ENDED_MS + 10 * i, "i1", None, **more)
        for i, edge in enumerate(world.edges, start=1)
    ]


def test_the_parts_of_a_first_answers_age_add_up_and_later_answers_are_not_counted(
    world: Any, writer: LedgerWriter, metrics: JobMetrics, ref: QueryRef
) -> None:
    world.now = ENDED_MS + 170
    facts = closing_frames(world, ref)
    emissions = writer.apply([], facts, {"a@1": 3})
    assert [e.revision for e in emissions] == [1]

    metrics.observe_batch(facts, emissions, ENDED_MS + 80, ENDED_MS + 170, ENDED_MS + 175, ENDED_MS + 185)

    assert parts_ms(metrics, "a") == {"arrive": 30, "wait": 50, "merge": 90, "queue": 5, "apply": 10}
    assert metrics.registry.get_sample_value("edgewater_job_frame_delay_seconds_count") == 3

    closes = (SliceClose(ENDED_MS - 1000, 9, 0),)
    later = [
        FrameSummary(ref, 4, world.edges[0], ENDED_MS, closes, (ENDED_MS - 1000,), 100, ENDED_MS + 900, "i1", None)
    ]
    emissions, times_ms = writer.apply([], later, {"a@1": 4}), [ENDED_MS + ms for ms in (950, 960, 960, 970)]
    metrics.observe_batch(later, emissions, *times_ms)

    assert sum(parts_ms(metrics, "a").values()) == 185
    stages = {s: metrics.registry.get_sample_value(f"{FIRST}_stage_seconds_count", {"stage": s}) for s in STAGES}
    assert stages == dict.fromkeys(STAGES, 1.0)


def test_how_late_edges_tell_is_measured_from_the_moment_they_tell_of(
    world: Any, writer: LedgerWriter, metrics: JobMetrics, ref: QueryRef
) -> None:
    world.now = ENDED_MS + 100

    writer.apply([], closing_frames(world, ref, arrivals=Arrivals(ENDED_MS, ())), {"a@1": 3})

    assert metrics.registry.get_sample_value("edgewater_job_report_delay_seconds_sum") == pytest.approx(0.06)


def test_final_answers_are_counted_by_the_cause_that_their_facts_violate_first(
    world: Any, writer: LedgerWriter, metrics: JobMetrics, ref: QueryRef
) -> None:
    (emission,) = writer.apply([], closing_frames(world, ref), {"a@1": 3})
    met = replace(emission.facts, deviations=(), has_data=True)
    unmet = replace(met, deviations=(Deviation(Cause.MISSING, "jfk", lacks=UNKNOWN), Deviation(Cause.LEFT, "lga")))

    def counted() -> list[float]:
        values = [
            metrics.registry.get_sample_value(
                "edgewater_job_final_answers_by_cause_total", {"query": "a", "cause": cause}
            )
            for cause in ("none", "missing-edges", "left")
        ]
        return [value or 0.0 for value in values]

    before = counted()
    for phase, facts in ((Phase.EARLY, unmet), (Phase.FINAL, unmet), (Phase.FINAL, met), (Phase.FINAL, met)):
        writer._count([replace(emission, phase=phase, facts=facts)], "test")
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [2.0, 1.0, 0.0]


def test_nothing_is_said_of_deleted_queries_and_retired_edges(
    world: Any, writer: LedgerWriter, metrics: JobMetrics
) -> None:
    for ref in world.register("a", "b"):
        facts = closing_frames(world, ref)
        metrics.observe_batch(facts, writer.apply([], facts, {f"{ref.name}@1": 3}), *[ENDED_MS] * 4)
        for gauge in (metrics.coverage, metrics.confidence, metrics.straggler_share):
            gauge.labels(ref.name).set(0.5)
        for edge in world.edges:
            metrics.needed_rate.labels(ref.name, edge).set(0.1)
    world.catalog.queries.delete("a", world.now)
    world.catalog.edges.retire(world.edges[0])
    writer.advance()
    samples = [s.labels for family in metrics.registry.collect() for s in family.samples if "query" in s.labels]
    assert {labels["query"] for labels in samples} == {"b"}
    assert {labels["edge"] for labels in samples if "edge" in labels} == set(world.edges[1:])
    assert parts_ms(metrics, "b").keys() == set(STAGES)
