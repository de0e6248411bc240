"""Staleness budgets on links that are too narrow: the deadline is kept, the best groups leave, the rest is stated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pyarrow as pa

from edge.core import Configured, EdgeCore, FrameBuilt, Ingested, PullEvent, SourcesOpened, StreamSpec
from edgewater.model.query import QuerySpec
from edgewater.model.streams import TIME_COLUMN, StreamClock
from edgewater.synopses import GroupedAggregate
from edgewater.wire import FrameBody, QueryRef

WINDOW_MS, BUDGET_MS, RATE_BYTES_S, GROUPS = 10_000, 2_000, 1_000.0, 1_000
REF = QueryRef("totals", 1)
SPEC = QuerySpec.from_mapping(
    {
        "name": "totals",
        "from": "sales",
        "group_by": ["shop"],
        "measures": {"amount": "sum(amount)"},
        "window": {"tumbling": "10s"},
        "lateness": "1h",
        "budget": {"staleness": "2s"},
    }
)


@dataclass
class Site:
    """An edge and its link of `RATE_BYTES_S`, in virtual time."""

    others: tuple[QuerySpec, ...] = ()
    core: EdgeCore = field(init=False)
    bodies: list[tuple[int, FrameBody]] = field(default_factory=list)

    def __post_init__(self) -> None:
        columns = {"shop": pa.string(), "amount": pa.int64()}
        self.core = EdgeCore({"sales": StreamSpec(columns, clock=StreamClock(0, 0, 1.0))})
        self.core.handle(SourcesOpened((("sales", "till"),)))
        others = ((QueryRef(spec.name, 1), spec) for spec in self.others)
        self.core.handle(Configured(((REF, SPEC), *others)))

    def sell(self, window: int, arrival_ms: int | None = None) -> None:
        """Sells in each shop, shop k for 1 + k, in one window."""
        start = window * WINDOW_MS
        batch = pa.record_batch(
            {
                "shop": [f"shop{k}" for k in range(GROUPS)],
                "amount": pa.array(range(1, GROUPS + 1), pa.int64()),
                TIME_COLUMN: pa.array([start + 1] * GROUPS, pa.int64()),
            }
        )
        self.core.handle(Ingested("sales", "till", batch, start + 1 if arrival_ms is None else arrival_ms))

    def close(self, window: int) -> None:
        """Brings the watermark to the end of a window."""
        end = (window + 1) * WINDOW_MS
        batch = pa.record_batch({"shop": ["next"], "amount": [1], TIME_COLUMN: pa.array([end], pa.int64())})
        self.core.handle(Ingested("sales", "till", batch, end))

    def send(self, from_ms: int, to_ms: int, path_delay_ms: int = 0) -> None:
        """Has the link pull a frame whenever the frame before has passed it."""
        now_ms = from_ms
        while now_ms < to_ms:
            pull = PullEvent(500, {"sales": now_ms}, RATE_BYTES_S, path_delay_ms)
            built = [e.frame for e in self.core.handle(pull) if isinstance(e, FrameBuilt)]
            for frame in built:
                self.bodies.append((now_ms, frame.unpack()))
            size = sum(len(frame.body) for frame in built)
            now_ms += max(int(1000 * size / RATE_BYTES_S), 20)

    def sent(self, window: int) -> list[str]:
        """Returns the shops of a window that were sent, in order."""
        return [
            row
            for _, body in self.bodies
            for partial in body.partials
            if partial.slice_start_ms == window * WINDOW_MS
            for row in GroupedAggregate.from_bytes(partial.synopsis).rows()[0].to_pylist()
        ]

    def closed_ms(self, window: int) -> int:
        """Returns when the frame with the last close of a window was built."""
        return [at for at, body in self.bodies if window * WINDOW_MS in {c.slice_start_ms for c in body.closes}][-1]


def largest(count: int) -> set[str]:
    return {f"shop{k}" for k in range(GROUPS - count, GROUPS)}


def test_the_close_travels_with_the_last_groups_that_are_in_time() -> None:
    site = Site()
    site.sell(0)
    site.close(0)
    site.send(WINDOW_MS, WINDOW_MS + 5_000)
    with_groups = [at for at, body in site.bodies if any(p.slice_start_ms == 0 for p in body.partials)]
    assert site.closed_ms(0) == with_groups[-1] <= WINDOW_MS + BUDGET_MS
    sent = site.sent(0)
    assert 20 <= len(sent) < GROUPS
    assert set(sent) == largest(len(sent)), "what is worth most leaves"


def test_what_an_exact_query_has_in_open_windows_takes_nothing_from_a_deadline() -> None:
    exact = {**SPEC.to_mapping(), "name": "hourly", "window": {"tumbling": "1h"}, "budget": None}
    hourly = QuerySpec.from_mapping(exact)
    sites = Site(), Site((hourly,))
    for site in sites:
        site.sell(0)
        site.close(0)
        site.send(WINDOW_MS, WINDOW_MS + 5_000)
    alone, beside = (len(site.sent(0)) for site in sites)
    assert beside >= 0.9 * alone


def test_after_an_outage_the_newest_window_leaves_first_and_the_older_ones_are_stated_as_withheld() -> None:
    site = Site()
    for window in range(4):
        site.sell(window)
    site.close(3)
    resumes_ms = 4 * WINDOW_MS + 2 * BUDGET_MS  # the deadlines of all four windows have passed
    site.send(resumes_ms, resumes_ms + WINDOW_MS)
    assert [len(site.sent(window)) for window in range(3)] == [0, 0, 0]
    sent = site.sent(3)
    assert 20 <= len(sent) <= 100, "about what the link passes in the time of the budget"
    assert set(sent) == largest(len(sent))
    assert site.closed_ms(3) <= resumes_ms + BUDGET_MS + 500
    closes = {c.slice_start_ms: c for _, body in site.bodies for c in body.closes}
    for window in range(4):
        (withheld,) = closes[window * WINDOW_MS].withheld
        assert withheld.groups == GROUPS - len(site.sent(window))


def test_a_path_that_takes_longer_than_the_budget_still_gets_the_groups_that_are_worth_most() -> None:
    site = Site()
    site.sell(0)
    site.close(0)
    site.send(WINDOW_MS, WINDOW_MS + 8_000, path_delay_ms=BUDGET_MS + 500)
    sent = site.sent(0)
    assert 20 <= len(sent) <= 100
    assert set(sent) == largest(len(sent))


def test_a_late_window_does_not_make_the_next_one_late() -> None:
    site = Site()
    site.sell(0)
    site.sell(1)
    site.close(0)
    site.send(WINDOW_MS + 2 * BUDGET_MS, 2 * WINDOW_MS)
    site.close(1)
    site.send(2 * WINDOW_MS, 2 * WINDOW_MS + 5_000)
    assert site.closed_ms(1) <= 2 * WINDOW_MS + BUDGET_MS
    assert len(site.sent(1)) >= 20


def test_records_that_arrive_after_their_deadline_are_history_and_are_sent_completely() -> None:
    site = Site()
    site.sell(0, arrival_ms=500_000)
    site.close(0)
    site.send(500_000, 500_000 + 60_000)
    assert len(site.sent(0)) == GROUPS


def test_an_answer_that_takes_the_center_long_brings_forward_the_deadline_of_its_query_only() -> None:
    slow, quick = QueryRef("slow", 1), QueryRef("quick", 1)
    closed_ms: dict[QueryRef, int] = {}
    site = Site()
    site.core.handle(Configured(tuple((ref, replace(SPEC, name=ref.name)) for ref in (slow, quick))))
    site.sell(0)
    site.close(0)
    now_ms = WINDOW_MS
    while len(closed_ms) < 2:
        pull = PullEvent(500, {"sales": now_ms}, RATE_BYTES_S, processing_ms={slow: 1_500})
        for effect in site.core.handle(pull):
            if isinstance(effect, FrameBuilt) and effect.closed:
                closed_ms[effect.frame.query] = now_ms
        now_ms += 100
    assert closed_ms[slow] <= WINDOW_MS + BUDGET_MS - 1_500 + 100
    assert closed_ms[slow] + 500 <= closed_ms[quick] <= WINDOW_MS + BUDGET_MS


def test_a_backlog_leaves_newer_windows_the_time_until_their_deadline() -> None:
    site = Site()
    for window in range(4):
        site.sell(window, arrival_ms=39_000)  # three windows of history, and one of now
    site.close(3)
    site.send(4 * WINDOW_MS, 4 * WINDOW_MS + BUDGET_MS)
    assert len(site.sent(3)) > 24, "more than the groups of a first close"
    assert set(site.sent(3)) == largest(len(site.sent(3)))
    site.send(4 * WINDOW_MS + BUDGET_MS, 4 * WINDOW_MS + 90_000)
    assert [len(site.sent(window)) for window in range(3)] == [GROUPS] * 3
    assert site.bodies[-1][1].through_ms >= 4 * WINDOW_MS
