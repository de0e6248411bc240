from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from center.job.function_rates import FunctionRatePlanner, FunctionRates
from center.job.job_parts import JobParts
from center.job.ledger_writer import LedgerWriter
from center.job.metrics import JobMetrics
from center.ledger import FrameSummary
from center.results import AnswerRecord
from center.storage.delta_segments import Delta
from edgewater.model.query import QuerySpec
from edgewater.model.registered_query import query_key
from edgewater.runtime.tasks import Tasks
from edgewater.synopses import GroupedAggregate, RowSampleStack
from edgewater.wire import QueryRef, SliceClose
from tests.insides import reading

ROWS = 5_000


def median_spec(name: str, **measures: str) -> QuerySpec:
    return QuerySpec.from_mapping(
        {
            "name": name, "from": "downloads", "measures": {"p": "exact_quantile(bytes)", **measures},
            "window": {"tumbling": "1s"}, "accuracy": {"error": "5%", "measure": "p"},
        }
    )  # fmt: skip


def answer_window(world: Any, writer: LedgerWriter, ref: QueryRef, window: int, spread: float) -> None:
    """All edges close a window of rows with such a spread."""
    stack = RowSampleStack(columns=1, source=window)
    aggregate = GroupedAggregate({}, {"p": stack})
    rows = np.random.default_rng(window).normal(100, spread, (ROWS, 1))
    column = pa.FixedSizeListArray.from_arrays(pa.array(rows[:, 0]), 1)
    aggregate.update([], {"p": column}, ROWS)
    start = window * 1_000
    facts = [
        FrameSummary(
            ref, 3 * window + i + 1, edge, start + 1_000, (SliceClose(start, ROWS, 0),), (start,), 100, world.now
        )
        for i, edge in enumerate(world.edges)
    ]
    through = {query_key(ref): facts[-1].position}
    writer.apply([Delta(query_key(ref), start, aggregate.to_bytes())], facts, through)


def test_every_edge_gets_the_rate_that_the_newest_window_needed(world: Any, writer: LedgerWriter) -> None:
    metrics = JobMetrics()
    planner = FunctionRatePlanner(writer, JobParts(world.catalog, world.store, metrics, world.clock))
    ref = world.catalog.queries.register(median_spec("q"), world.now)[0].ref
    writer.advance()
    planner.update()
    assert world.catalog.budgets.sampling() == {}, "nothing is known yet, so all is processed"

    answer_window(world, writer, ref, 0, spread=20.0)
    planner.update()
    first = world.catalog.budgets.sampling()[ref]
    answer_window(world, writer, ref, 1, spread=60.0)
    planner.update()
    second = world.catalog.budgets.sampling()[ref]

    assert set(first) == set(world.edges)
    assert 0.03 < first[world.edges[0]].rate < second[world.edges[0]].rate < 1.0
    assert reading(metrics.needed_rate.labels("q", "jfk")) == second[world.edges[0]].rate


def test_a_sample_that_would_make_other_measures_wrong_is_not_asked_for(world: Any, writer: LedgerWriter) -> None:
    planner = FunctionRatePlanner(writer, world.shared())
    world.catalog.queries.register(median_spec("q", n="count()"), world.now)
    writer.advance()

    planner.update()

    assert world.catalog.budgets.sampling() == {}


def test_a_query_whose_function_fails_does_not_block_the_others(
    world: Any, writer: LedgerWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = FunctionRatePlanner(writer, world.shared())
    refs = [world.catalog.queries.register(median_spec(name), world.now)[0].ref for name in ("bad", "good")]
    writer.advance()
    for ref in refs:
        answer_window(world, writer, ref, 0, spread=20.0)
    add = FunctionRates.add

    def failing(self: FunctionRates, record: AnswerRecord, spec: QuerySpec) -> None:
        if spec.name == "bad":
            raise RuntimeError("third-party code")
        add(self, record, spec)

    monkeypatch.setattr(FunctionRates, "add", failing)

    planner.update()

    assert list(world.catalog.budgets.sampling()) == [refs[1]]


def test_a_deleted_query_is_forgotten(world: Any, writer: LedgerWriter) -> None:
    planner = FunctionRatePlanner(writer, world.shared())
    ref = world.catalog.queries.register(median_spec("q"), world.now)[0].ref
    writer.advance()
    answer_window(world, writer, ref, 0, spread=20.0)
    planner.update()

    world.catalog.queries.delete("q", world.now)
    writer.advance()
    planner.update()

    assert not planner._rates and not planner._stored._stored


def test_a_thread_that_is_stopped_ends(world: Any, writer: LedgerWriter) -> None:
    stop, leads = threading.Event(), threading.Event()
    leads.set()
    planner = FunctionRatePlanner(writer, world.shared())
    thread = Tasks().thread("function-rates", lambda: planner.run(stop, leads))

    stop.set()
    thread.join(20)

    assert not thread.is_alive()
