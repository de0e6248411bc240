"""Each guess of an edge, once right and once wrong: the truth is inside the bounds of the answer, or they are null."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from edge.codecs.schema import EventTime, RecordSchema
from edge.core.events import Ingested
from edge.receivers import Body, Request
from edge.records import Chunk
from edge.series import SeriesMemory
from edgewater.wire import GUESSES
from tests.center.border_world import MINUTE, SOURCE, STREAM, Border
from tests.edge.conftest import COLUMNS, World
from tests.edge.sources.files.test_follower import follow_through
from tests.edge.sources.files.test_same_file import WAIT, replaced
from tests.edge.sources.test_otlp import AT_MS, counter, histogram, metric_edge, metrics
from tests.edge.sources.test_remote_write import STALE, Series, named, receiver, request

WINDOW_MS = AT_MS - AT_MS % MINUTE
Truth = tuple[int, float]
"""Number of the window's records, and their sum."""


@pytest.fixture
def center(tmp_path: Path) -> Iterator[Border]:
    yield Border(tmp_path)


def lines(start: int, stop: int) -> str:
    return "".join(f'{{"t": {AT_MS + n}, "distance": {n}}}\n' for n in range(start, stop))


def answer_of(center: Border, chunks: Iterable[Chunk], column: str) -> Any:
    """The answer to the window, once an edge has counted these chunks of a real source and has closed the window."""
    center.now_ms = AT_MS
    edge = center.edge_with_query("a", measures={"n": "count()", "s": "sum(x)", "low": "min(x)", "high": "max(x)"})
    for chunk in chunks:
        arrays = [chunk.batch.column(column).cast(pa.int64()), chunk.batch.column("event_time_ms")]
        batch = pa.RecordBatch.from_arrays(arrays, names=["x", "event_time_ms"])
        event = Ingested(STREAM, SOURCE, batch, center.now_ms, rejected=chunk.rejected_records)
        edge.durable.ingest_payload(event)
    center.now_ms = WINDOW_MS + 2 * MINUTE
    edge.deliver(center.now_ms)
    return center.answer(WINDOW_MS)


def assert_contains(answer: Any, truths: Iterable[Truth], reason: str) -> None:
    completeness = answer["quality"]["completeness"]
    assert set(completeness["guessed"]) == {reason} and not answer["contract"]["met"]
    assert [v["code"] for v in answer["contract"]["violations"]] in (["guessed"], ["input-lost", "guessed"])
    assert GUESSES[reason].is_guess
    cells = answer["data"][0]
    for count, total in truths:
        for name, truth in (("n", count), ("s", total)):
            lower, upper = cells[name]["lower"], cells[name]["upper"]
            assert (lower is None or lower <= truth) and (upper is None or truth <= upper), (name, truth)


FILES: dict[str, tuple[str, dict[str, str], Callable[[World], list[Callable[[], Any]]], list[Truth]]] = {
    "a copy, or a second meter that stands still": (
        "assumed-copy",
        {"north.log": lines(0, 100)},
        lambda world: [lambda: world.write("south.log", lines(0, 100)), *WAIT],
        [(100, 4950), (200, 9900)],
    ),
    "a corrected export, or another file": (
        "read-again",
        {"app.log": lines(0, 100)},
        lambda world: [replaced(world, "app.log", lines(50, 130))],
        [(130, sum(range(130))), (180, 4950 + sum(range(50, 130)))],
    ),
    "a copy that goes on, or a device that began alike": (
        "read-again",
        {"a.log": lines(0, 100)},
        lambda world: [lambda: world.write("b.log", lines(0, 100) + lines(200, 210))],
        [(110, 4950 + sum(range(200, 210))), (210, 9900 + sum(range(200, 210)))],
    ),
    "a trimmed log, or a truncated one": (
        "read-again",
        {"app.log": lines(0, 100)},
        lambda world: [lambda: world.write("app.log", lines(80, 100))],
        [(100, 4950), (120, 4950 + sum(range(80, 100)))],
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_guesses_of_files(center: Border, tmp_path: Path, name: str) -> None:
    reason, files, steps, truths = FILES[name]
    folder = tmp_path / "logs"
    folder.mkdir()
    world = World(folder, RecordSchema(COLUMNS, EventTime("t", "ms")))
    for file, data in files.items():
        world.write(file, data)
    chunks = follow_through(world, "*.log", *steps(world), *WAIT, format="ndjson")
    assert_contains(answer_of(center, chunks, "distance"), truths, reason)


def test_a_longer_version_of_a_file_is_certain(center: Border, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    world = World(folder, RecordSchema(COLUMNS, EventTime("t", "ms")))
    world.write("app.log", lines(0, 100))
    steps = [replaced(world, "app.log", lines(0, n)) for n in (120, 140, 160, 180, 200)]
    answer = answer_of(center, follow_through(world, "*.log", *steps, *WAIT, format="ndjson"), "distance")
    assert answer["contract"]["met"] and answer["data"][0]["n"] == {"estimate": 200, "lower": 200, "upper": 200}


BOOT, LARGE = -30, 7_000_000_000


def drift(step_s: Callable[[int], int]) -> list[Any]:
    return [counter("c", LARGE + 1500 * n, at_s=n + 1, start_s=BOOT * 100 + step_s(n)) for n in range(12)]


OTLP: dict[str, tuple[str, list[Any], list[Truth]]] = {
    "the start jumps once": (
        "overlapping-total",
        drift(lambda n: n >= 6),
        [(11, 16_500), (11, 15_000 + LARGE + 9_000)],
    ),
    "the start drifts": ("overlapping-total", drift(lambda n: n), [(11, 16_500), (11, 11 * LARGE + 1500 * 66)]),
    "the start moves back": ("overlapping-total", drift(lambda n: -(n >= 6)), [(11, 16_500)]),
    "a smaller total, or two senders": (
        "assumed-reset",
        [counter("c", total, at_s=n + 1, start_s=BOOT) for n, total in enumerate((100, 103, 101, 104))],
        [(3, 3 + 101 + 3), (4, 3 + 3)],
    ),
    "the first total of a series": ("first-total", [counter("c", 50, at_s=1, start_s=-7200)], [(0, 0), (1, 50)]),
}


@pytest.mark.parametrize("name", OTLP)
def test_guesses_of_cumulative_otlp_points(center: Border, name: str) -> None:
    reason, points, truths = OTLP[name]
    edge = metric_edge({"value": "int64"})
    if reason != "first-total":  # the first total of the series is in an earlier window
        total, start_s = (LARGE, BOOT * 100) if "start" in name else (97, -90)
        edge.post(metrics(counter("c", total, at_s=-40, start_s=start_s)), "metrics")
    for point in points:
        edge.post(metrics(point), "metrics")
    assert_contains(answer_of(center, [chunk for _, chunk in edge.taken], "value"), truths, reason)


def test_a_histogram_whose_bounds_change_counts_on_a_guess() -> None:
    edge = metric_edge({"count": "int64", "part": "string"})

    def bounded(counts: list[int], bounds: list[float], at_s: int, start_s: int) -> Callable[[Any], None]:
        def add(metric: Any) -> None:
            histogram(counts, at_s=at_s)(metric)
            point = metric.histogram.data_points[0]
            point.explicit_bounds[:] = bounds
            point.start_time_unix_nano = (AT_MS + 1000 * start_s) * 1_000_000

        return add

    edge.post(metrics(bounded([2, 3, 1], [1.0, 2.0], 0, -60)), "metrics")
    edge.post(metrics(bounded([2, 4, 1], [1.0, 2.0], 1, -60)), "metrics")
    assert not any(chunk.guessed for _, chunk in edge.taken)
    edge.post(metrics(bounded([2, 5, 1], [1.0, 5.0], 2, -60)), "metrics")
    reasons = {g.reason for _, chunk in edge.taken for g in chunk.guessed}
    assert reasons == {"overlapping-total"}, "seven of its records are in the buckets of before"
    again = metric_edge({"count": "int64", "part": "string"})
    again.post(metrics(bounded([2, 3, 1], [1.0, 2.0], 0, -60)), "metrics")
    again.post(metrics(bounded([2, 5, 1], [1.0, 5.0], 2, 1)), "metrics")
    assert not any(chunk.guessed for _, chunk in again.taken), "the process began anew with its bounds"


def test_histograms_and_summaries_take_part_in_the_guess() -> None:
    edge = metric_edge({"count": "int64"})

    def moved(add: Callable[[Any], None], start_s: int) -> Callable[[Any], None]:
        def apply(metric: Any) -> None:
            add(metric)
            for kind in ("histogram", "summary"):
                for point in getattr(metric, kind).data_points:
                    point.start_time_unix_nano = (AT_MS + 1000 * start_s) * 1_000_000

        return apply

    def summary(count: int, at_s: int) -> Callable[[Any], None]:
        def add(metric: Any) -> None:
            metric.name = "wait"
            metric.summary.data_points.add(time_unix_nano=(AT_MS + 1000 * at_s) * 1_000_000, count=count, sum=1.0)

        return add

    for n, counts in enumerate(([1, 2, 3], [2, 2, 3], [2, 3, 4])):
        edge.post(metrics(moved(histogram(counts, at_s=n), n - 60), moved(summary(6 + n, n), n - 60)), "metrics")
    increments = [row["count"] for row in edge.records()]
    assert sum(increments) == 2 * 9 + 8, "each count once in its total, and once in its bucket"
    reasons = {g.reason for _, chunk in edge.taken for g in chunk.guessed}
    assert reasons == {"overlapping-total"}


WRITES: dict[str, tuple[str, list[tuple[float, int]], list[Truth]]] = {
    "a restart, or two senders": ("assumed-reset", [(50, -30), (100, 1), (5, 2), (9, 3)], [(3, 59), (2, 54)]),
    "a series that ended and came back": (
        "overlapping-total",
        [(50, -30), (100, 1), (STALE, 2), (120, 3)],
        [(2, 70), (2, 170)],
    ),
    "a total that came late": ("late-total", [(50, -30), (100, 5), (40, 3), (110, 6)], [(2, 60), (3, 100)]),
    "the first total": ("first-total", [(100, 1), (130, 2)], [(1, 30), (2, 130)]),
}


@pytest.mark.parametrize("name", WRITES)
def test_guesses_of_remote_write(center: Border, name: str) -> None:
    reason, samples, truths = WRITES[name]
    made, memory, chunks = receiver({"v": "float64"}, counters=["c_total"]), SeriesMemory(0), list[Chunk]()
    for sample in samples:
        series: Series = (named("c_total", job="a"), [sample])
        (part,) = made.decode(Request("", {}), Body(request([series], AT_MS), AT_MS, 1 << 20, lambda: None))
        assert part.convert is not None
        decoded, update = part.convert(memory)
        memory.apply(update)
        chunks.append(Chunk("s", decoded.batch, None, None, decoded.rejected, 0, guessed=decoded.guessed))
    earlier = [chunk for chunk, (_, at_s) in zip(chunks, samples, strict=True) if at_s < 0]
    answer = answer_of(center, [chunk for chunk in chunks if chunk not in earlier], "v")
    assert_contains(answer, truths, reason)
