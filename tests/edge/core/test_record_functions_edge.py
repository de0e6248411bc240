"""Users' functions at an edge: called for the records that are processed, and harmless whatever they do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from edge.core.core import EdgeCore
from edge.core.events import (
    Configured,
    Dropped,
    Effect,
    FunctionFailed,
    Ingested,
    PullEvent,
    SamplingSet,
    SourceEnded,
    SourcesOpened,
)
from edge.core.streams import StreamSpec
from edge.durability import DurableCore
from edge.metrics import EdgeCollector
from edgewater.arrivals import read_report
from edgewater.base.streams import LIVE, MAX_TIME_MS, TIME_COLUMN
from edgewater.model.accuracy import report_schedule
from edgewater.model.query import QuerySpec
from edgewater.model.record_functions import RecordFunction
from edgewater.synopses import GroupedAggregate
from edgewater.wire import FrameBody, QueryRef
from tests.cores import open_core, pulled
from tests.edgewater.functions_world import Counting, install_functions

REF = QueryRef("q", 1)
COLUMNS = {"x": pa.float64(), "k": pa.string()}
SAMPLED = 0.25


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """`score(x)` is x, and null for multiples of five; `quick(x)` is the same, and cheap."""
    counting = Counting(lambda x: None if x % 5 == 0 else x)
    install_functions(monkeypatch, counting.named("score"), counting.named("quick", expensive=False))
    return counting


def spec(measure: str = "sum(score(x))", **parts: object) -> QuerySpec:
    accuracy = {"error": "5%", "substream": "500ms", "measure": "m"}
    given = {"name": "q", "from": "s", "measures": {"m": measure}, "window": {"tumbling": "1s"}, "accuracy": accuracy}
    return QuerySpec.from_mapping({**given, "lateness": "5s", **parts})


def empty() -> EdgeCore:
    return EdgeCore({"s": StreamSpec(COLUMNS, LIVE, 10_000)}, source=3)


def core(query: QuerySpec, rate: float = 1.0) -> EdgeCore:
    edge = open_core(StreamSpec(COLUMNS, LIVE, 10_000), (REF, query), source="f", number=3)
    edge.handle(SamplingSet(REF, rate))
    return edge


def come(edge: EdgeCore, values: list[float | None], keys: list[str] | None = None, at_ms: int = 400) -> list[Effect]:
    return edge.handle(event(values, keys, at_ms))


def event(values: list[float | None], keys: list[str] | None = None, at_ms: int = 400) -> Ingested:
    times = np.full(len(values), at_ms - 300, np.int64)
    columns = {"x": pa.array(values, pa.float64()), "k": pa.array(keys or ["a"] * len(values), pa.string())}
    return Ingested("s", "f", pa.record_batch({**columns, TIME_COLUMN: times}), at_ms)


def pull(edge: EdgeCore, now_ms: int = 1_000) -> FrameBody:
    return pulled(edge, PullEvent(1 << 16, edge.pulls.event_times(now_ms)))[0].unpack()


def told(body: FrameBody, query: QuerySpec) -> tuple[int, float, float, float]:
    """Records, and of those with a value how many, Σv, Σv². Reports have the variance with 13 bits."""
    clock = report_schedule(query.window, query.accuracy, query.lateness_ms)
    assert clock is not None and body.arrivals is not None
    statistics = [each for s in body.arrivals.substreams for each in read_report(s, clock.grid)]
    count, total, squares = sum(s.value_sums.sum(axis=1) for s in statistics)
    return sum(s.events for s in statistics), float(count), float(total), float(squares)


def shipped(body: FrameBody) -> list[float]:
    (partial,) = body.partials
    values: list[float] = GroupedAggregate.from_bytes(partial.synopsis).measures["m"].query().value.tolist()
    return values


RECORDS: list[float | None] = [None if i % 7 == 0 else float(i) for i in range(1, 2_001)]
NUMBERS = [x for x in RECORDS if x is not None]


def test_without_a_sample_each_record_is_scored_once(score: Counting) -> None:
    query = spec(measures={"m": "sum(score(x))", "same": "mean(score(x))", "n": "count()"})
    edge = core(query)
    come(edge, RECORDS)
    assert score.seen == NUMBERS, "once, for two measures and the statistics together, and not for null"
    worth = [x for x in NUMBERS if x % 5]
    body = pull(edge)
    # A null result counts as 0, as it does in a sample, because the rate may change within a window.
    everything = len(NUMBERS), len(NUMBERS), sum(worth), sum(x * x for x in worth)
    assert told(body, query) == pytest.approx(everything, rel=1e-4)
    assert shipped(body) == [sum(worth)]


def test_only_sampled_records_are_scored_and_all_are_counted(score: Counting) -> None:
    query = spec()
    edge = core(query, SAMPLED)
    (dropped,) = come(edge, RECORDS)
    assert isinstance(dropped, Dropped) and dropped.reason == "sampled-out"
    kept = set(score.seen)
    assert len(score.seen) == len(kept) < 0.3 * len(NUMBERS)
    assert dropped.count >= len(RECORDS) - len(kept) - len(RECORDS) // 7 and kept <= set(NUMBERS)
    body = pull(edge)
    worth = sum(x for x in kept if x % 5)
    # A null result counts as 0 in the sum: Σv is the same, and the sample is larger.
    everything = len(NUMBERS), len(kept), worth, sum(x * x for x in kept if x % 5)
    assert told(body, query) == pytest.approx(everything, rel=1e-4)
    assert shipped(body) == [worth]


def test_in_a_mean_a_sampled_record_without_a_value_is_left_out(score: Counting) -> None:
    query = spec("mean(score(x))")
    edge = core(query, SAMPLED)
    come(edge, RECORDS)
    worth = [x for x in score.seen if x % 5]
    body = pull(edge)
    assert told(body, query)[:3] == pytest.approx((len(NUMBERS), len(worth), sum(worth)))
    assert shipped(body) == [pytest.approx(sum(worth) / len(worth))]


def test_while_all_are_scored_a_mean_covers_the_records_with_a_score(score: Counting) -> None:
    query = spec("mean(score(x))")
    edge = core(query)
    come(edge, RECORDS)
    worth = [x for x in NUMBERS if x % 5]
    assert told(pull(edge), query)[:3] == pytest.approx((len(worth), len(worth), sum(worth)))


def test_when_the_rate_changes_within_a_window_its_records_stay_one_population(score: Counting) -> None:
    query = spec()
    edge = core(query)
    come(edge, RECORDS)
    edge.handle(SamplingSet(REF, SAMPLED))
    come(edge, RECORDS)
    records, count, total, _ = told(pull(edge), query)
    assert records == 2 * len(NUMBERS) and count == len(score.seen)
    assert total == pytest.approx(sum(x for x in score.seen if x % 5))


def test_with_a_default_for_null_records_without_a_column_are_sampled_too(score: Counting) -> None:
    query = spec("sum(coalesce(score(x), 3))")
    edge = core(query, SAMPLED)
    come(edge, RECORDS)
    records, kept, total, _ = told(pull(edge), query)
    assert records == len(RECORDS) and kept > len(score.seen)
    worth = [x for x in score.seen if x % 5]
    assert total == pytest.approx(sum(worth) + 3 * (kept - len(worth)))


def test_a_cheap_function_is_called_for_all_so_that_nulls_are_known(score: Counting) -> None:
    query = spec("sum(quick(x))")
    edge = core(query, SAMPLED)
    come(edge, RECORDS)
    assert score.seen == NUMBERS, "once each"
    assert told(pull(edge), query)[0] == sum(1 for x in NUMBERS if x % 5)


def test_a_count_of_scores_needs_all_of_them(score: Counting) -> None:
    query = spec("count(score(x))")
    edge = core(query, SAMPLED)
    come(edge, RECORDS)
    assert score.seen == NUMBERS and told(pull(edge), query)[0] == sum(1 for x in NUMBERS if x % 5)


def test_a_condition_is_evaluated_for_every_record_and_a_score_only_where_it_holds(
    monkeypatch: pytest.MonkeyPatch, score: Counting
) -> None:
    small = RecordFunction("is_small", ("float64",), "bool", lambda x: pa.array([v < 500 for v in x.to_pylist()]))
    install_functions(monkeypatch, score.named("score"), small)
    query = spec(where="is_small(x)")
    edge = core(query, SAMPLED)
    come(edge, RECORDS)
    assert score.seen and max(score.seen) < 500
    assert told(pull(edge), query)[0] == sum(1 for x in NUMBERS if x < 500)


@pytest.mark.parametrize("measure", ["sum(score(x))", "mean(score(x))"])
def test_with_groups_each_group_has_its_own_records_and_scores(score: Counting, measure: str) -> None:
    query = spec(measure, group_by=["k"])
    edge = core(query, SAMPLED)
    keys = ["ab"[i % 2] for i in range(len(RECORDS))]
    come(edge, RECORDS, keys)
    body = pull(edge)
    clock = report_schedule(query.window, query.accuracy, query.lateness_ms)
    assert clock is not None and body.arrivals is not None
    (part,) = [each for s in body.arrivals.substreams for each in read_report(s, clock.grid, grouped=True)]
    key_of = {x: k for x, k in zip(RECORDS, keys, strict=True) if x is not None}
    for key, row in zip(part.keys[0].to_pylist(), part.arrival_counts(), strict=True):
        kept = [x for x in score.seen if key_of[x] == key]
        worth = [x for x in kept if x % 5]
        count, total, _ = row[1:-2].reshape(3, -1).sum(axis=1)
        assert row[0] == sum(1 for k in key_of.values() if k == key)
        assert (count, total) == pytest.approx((len(kept) if "sum" in measure else len(worth), sum(worth)))


def test_batches_may_be_cut_anywhere(score: Counting) -> None:
    """A file that is read again after a crash comes in other batches than before only if they are journaled so."""
    whole, parts, query = core(spec(), SAMPLED), core(spec(), SAMPLED), spec()
    come(whole, RECORDS)
    seen, score.seen = score.seen, []
    for first in range(0, len(RECORDS), 37):
        come(parts, RECORDS[first : first + 37])
    assert score.seen == seen and told(pull(whole), query) == told(pull(parts), query)


def failing(x: pa.Array) -> pa.Array:
    if 13.0 in x.to_pylist():
        raise ValueError("unlucky")
    return x


@pytest.mark.parametrize("rate", [1.0, SAMPLED])
@pytest.mark.parametrize("accuracy", [True, False])
def test_a_function_that_raises_affects_only_its_batch(
    monkeypatch: pytest.MonkeyPatch, rate: float, accuracy: bool
) -> None:
    install_functions(monkeypatch, RecordFunction("score", ("float64",), "float64", failing))
    edge = core(spec() if accuracy else spec(accuracy=None), rate)
    failed = [e for e in come(edge, [13.0] * 50) if isinstance(e, FunctionFailed)]
    assert failed == [FunctionFailed(REF, "score", "ValueError", "ValueError: unlucky", 1)]
    assert not [e for e in come(edge, [2.0] * 50) if isinstance(e, FunctionFailed)]
    edge.handle(SourceEnded("s", "f"))
    rows = 50 if rate == 1.0 or not accuracy else None
    (total,) = shipped(pull(edge, 20_000))
    assert total == 2.0 * rows if rows else 0 < total < 100


def durable(path: Path) -> DurableCore:
    return DurableCore(path, empty, lambda *_: pytest.fail("nothing is replayable"), "i")


def test_failures_are_counted_logged_once_a_reason_and_survive_a_restart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install_functions(monkeypatch, RecordFunction("score", ("float64",), "float64", failing))
    edge = durable(tmp_path)
    edge.handle(Configured(((REF, spec()),)))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            edge.ingest_payload(event([13.0, 2.0]))
    said = "function score failed in query q, its values are null: ValueError: unlucky"
    assert [r.getMessage() for r in caplog.records] == [said]
    edge.checkpoint()
    edge.ingest_payload(event([13.0]))
    edge.sync()
    edge.close()
    again = durable(tmp_path)
    assert again.state.function_failures == {"score": 4}
    registry = CollectorRegistry()
    registry.register(EdgeCollector(again, dict, list, {}, {}, lambda _: {}, {}))
    exposed = generate_latest(registry).decode()
    assert 'edgewater_edge_function_failures_total{function="score"} 4.0' in exposed
    assert "edgewater_edge_watermark_seconds{stream=" in exposed
    again.handle(SourceEnded("s", "f"))
    assert again.core.streams["s"].watermark_ms == MAX_TIME_MS
    assert "edgewater_edge_watermark_seconds{stream=" not in generate_latest(registry).decode(), "an ended stream"
    again.close()


def test_a_replayed_journal_calls_the_function_again_and_builds_the_same_frames(
    score: Counting, tmp_path: Path
) -> None:
    def scored(act: Callable[[], object]) -> list[float]:
        score.seen = []
        act()
        return score.seen

    edge = durable(tmp_path)
    edge.handle(Configured(((REF, spec()),)))
    edge.handle(SamplingSet(REF, SAMPLED))

    def work() -> None:
        edge.ingest_payload(event(RECORDS))
        assert edge.handle(PullEvent(1 << 16, edge.core.pulls.event_times(1_000)))

    first = scored(work)
    edge.sync()
    edge.close()
    assert first and scored(lambda: durable(tmp_path).close()) == first  # another frame would raise


@pytest.mark.nightly
def test_at_a_tenth_of_the_rate_sums_and_means_are_right_on_average(score: Counting) -> None:
    """200 samples of 2,000 records. A mean of independent estimates is further than 4 standard errors off in one run of
    15,000; two are looked at. Marks are hashes of fixed identities, so every run is the same."""
    values: list[float | None] = np.random.default_rng(5).integers(1, 400, 2_000).astype(float).tolist()
    worth = [x for x in values if x is not None and x % 5]
    for measure, truth in (("sum(score(x))", sum(worth)), ("mean(score(x))", sum(worth) / len(worth))):
        query, estimates = spec(measure), []
        for source in range(200):
            edge = EdgeCore({"s": StreamSpec(COLUMNS, LIVE, 10_000)}, source=source)
            for given in (SourcesOpened((("s", "f"),)), Configured(((REF, query),)), SamplingSet(REF, 0.1)):
                edge.handle(given)
            come(edge, values)
            records, count, total, _ = told(pull(edge), query)
            estimates.append(total / count * (records if "sum" in measure else 1))
        error = np.std(estimates, ddof=1) / np.sqrt(len(estimates))
        assert abs(np.mean(estimates) - truth) <= 4 * error
        assert 0.01 * truth < error * np.sqrt(len(estimates)) < 0.2 * truth, "they are estimates"
