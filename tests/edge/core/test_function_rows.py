"""Rows for a function of a sample at an edge: which are sent, with which rate, and in how large frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from edge.core.core import EdgeCore
from edge.core.events import Acked, FrameBuilt, Ingested, PullEvent, SamplingSet, TickEvent
from edge.core.streams import StreamSpec
from edgewater.base.streams import LIVE
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate, RowSampleStack
from edgewater.wire import Frame, QueryRef
from tests.cores import open_core, pulled

REF = QueryRef("q", 1)
CAPACITY = 1 << 18


def core_of(measure: str, **parts: Any) -> EdgeCore:
    given = {"name": "q", "from": "s", "measures": {"p": measure}, "window": {"tumbling": "1s"}, "group_by": ["k"]}
    spec = QuerySpec.from_mapping({**given, "accuracy": {"error": "5%"}, **parts})
    return open_core(
        StreamSpec({"x": pa.float64(), "k": pa.string()}, LIVE, 100, 100_000), (REF, spec), source="f", number=1
    )


def feed(core: EdgeCore, times: list[int] | np.ndarray[Any, Any], keys: list[str]) -> None:
    x = np.random.default_rng(len(times)).normal(50, 5, len(times))
    core.handle(Ingested("s", "f", pa.record_batch({"x": x, "k": keys, "event_time_ms": times}), int(max(times))))


def frames(core: EdgeCore, now_ms: int, capacity: int = CAPACITY, bandwidth: float = 1e6) -> list[Frame]:
    core.handle(TickEvent(now_ms))
    sent: list[Frame] = []
    while (due := core.pulls.next_pull_ms(bandwidth, now_ms)) is not None and due <= now_ms:
        built = pulled(core, PullEvent(capacity, core.pulls.event_times(now_ms), bandwidth, 50))
        if not built:
            break
        sent += built
        core.handle(Acked(built[-1].seq))
    return sent


def rows_of(sent: list[Frame]) -> dict[str, tuple[int, float]]:
    """By group, how many rows were sent, and the rate that they were drawn with."""
    result: dict[str, tuple[int, float]] = {}
    for frame in sent:
        for partial in frame.unpack().partials:
            aggregate = GroupedAggregate.from_bytes(partial.synopsis)
            stack = aggregate.measures["p"]
            assert isinstance(stack, RowSampleStack)
            (keys,) = aggregate.rows()
            for key, rows, rate in zip(keys.to_pylist(), stack.rows_by_group(), stack.rates().tolist(), strict=True):
                count, least = result.get(key, (0, 1.0))
                result[key] = count + len(rows), min(least, rate)
    return result


def test_a_group_without_sampled_rows_is_reported_with_its_rate() -> None:
    core = core_of("exact_quantile(x)")
    core.handle(SamplingSet(REF, 0.01, 0.0))
    feed(core, [1_000 + i % 900 for i in range(2_000)] + [1_950], ["many"] * 2_000 + ["rare"])
    feed(core, [3_000], ["many"])

    sent = rows_of(frames(core, 3_100))

    assert sent["rare"] == (0, pytest.approx(0.01))
    assert 5 <= sent["many"][0] <= 45


def test_a_late_record_does_not_lower_the_rate_of_the_sample() -> None:
    core = core_of("exact_quantile(x)", lateness="10s")
    core.handle(SamplingSet(REF, 0.5, 0.0))
    feed(core, [1_000 + i % 900 for i in range(200)], ["g"] * 200)
    feed(core, [3_000], ["g"])
    frames(core, 3_100)

    core.handle(SamplingSet(REF, 0.01, 0.0))
    feed(core, [1_500] * 20, ["g"] * 20)

    assert rows_of(frames(core, 3_200)) == {"g": (20, 1.0)}


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["exact_quantile(x)", "count()"])
def test_under_an_accuracy_a_narrow_link_omits_nothing(measure: str) -> None:
    core = core_of(measure, budget={"staleness": "1s"})
    rng = np.random.default_rng(0)
    sent: list[Frame] = []
    for at in range(1_000, 9_000, 20):
        if at < 3_000:
            feed(core, np.sort(rng.integers(at, at + 20, 20)), [f"g{i}" for i in rng.integers(0, 50, 20)])
        core.handle(TickEvent(at + 20))
        effects = core.handle(PullEvent(150, core.pulls.event_times(at + 20), 3_000.0, 50))
        sent += [e.frame for e in effects if isinstance(e, FrameBuilt)]
    feed(core, [20_000], ["g0"])
    sent += frames(core, 20_000)

    closed = sum(c.observed for f in sent for c in f.unpack().closes)
    partials = [GroupedAggregate.from_bytes(p.synopsis) for f in sent for p in f.unpack().partials]
    assert closed == 2_000
    assert sum(p.query("p").value.sum() for p in partials) == closed


@pytest.mark.parametrize("measure", ["kmeans(x, x, x, x)", "reservoir(x, size=16000)"])
@pytest.mark.slow
def test_groups_with_many_rows_are_sent_in_frames_within_the_limit(measure: str) -> None:
    core = core_of(measure, accuracy=None)
    rng = np.random.default_rng(0)
    feed(core, np.sort(rng.integers(1_000, 2_000, 150_000)), [f"g{i}" for i in rng.integers(0, 20, 150_000)])
    feed(core, [3_000], ["g0"])

    sent = frames(core, 3_100)

    assert max(f.to_wire().ByteSize() for f in sent) < 4 * CAPACITY
    partials = [GroupedAggregate.from_bytes(p.synopsis) for f in sent for p in f.unpack().partials]
    assert sum(map(len, partials)) == 20
