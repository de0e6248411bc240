"""The counters of finished slices: as a dictionary would hold them, in a tenth of its memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.core import finished
from edge.core.finished import Counters, FinishedSlices
from edge.core.query_pipeline import QueryPipeline
from edge.core.streams import StreamSpec, StreamState
from edgewater.model.query import QuerySpec
from edgewater.synopses.encoding.state import State
from edgewater.wire import QueryRef

TIMES = st.integers(-300, 300)
STEPS = st.lists(st.tuples(st.sampled_from(["set", "set", "set", "forget", "starts", "state"]), TIMES), max_size=60)


@given(STEPS)
def test_it_holds_what_was_set_and_not_forgotten(steps: list[tuple[str, int]]) -> None:
    held, expected = FinishedSlices(), dict[int, Counters]()
    before, finished.MAX_RECENT = finished.MAX_RECENT, 5
    try:
        for step, (action, start) in enumerate(steps):
            if action == "set":
                held[start] = expected[start] = (step + 1, step, start, start + 9)
            elif action == "forget":
                held.forget_before(start)
                expected = {other: counters for other, counters in expected.items() if other >= start}
            elif action == "starts":
                assert held.starts().tolist() == sorted(expected)
            else:
                state = held.to_state()
                assert state.pack("test") == FinishedSlices.of(expected.items()).to_state().pack("test")
                held = FinishedSlices.from_state(state)
            assert {start: held.get(start) for start in range(-300, 301)} == {
                start: expected.get(start) for start in range(-300, 301)
            }
    finally:
        finished.MAX_RECENT = before


@pytest.mark.slow
def test_a_million_slices_take_40_bytes_each() -> None:
    held = FinishedSlices()
    for start in range(100_000):
        held[start] = 1, 0, start, start
    assert held.nbytes < 100_000 * 40 + 1_024 * 400
    held.forget_before(99_999)
    assert held.nbytes <= 400 and held.starts().tolist() == [99_999]


def test_a_state_of_an_earlier_release_is_read() -> None:
    spec = QuerySpec.from_mapping(
        {"name": "q", "from": "s", "measures": {"n": "count()"}, "window": {"tumbling": "1s"}}
    )
    pipeline = QueryPipeline(QueryRef("q", 1), spec.bind({}))
    pipeline.finished[5000], pipeline.finished[1000] = (3, 1, 5001, 5999), (1, 0, 1000, 1000)
    pipeline.full.suspended, pipeline.full.stated = {6000}, {4000}
    state = pipeline.to_state()
    before = {**state.numbers, "full": state.numbers["full"][:3]}
    before["finished_counters"] = [[1000, [1, 0, 1000, 1000]], [5000, [3, 1, 5001, 5999]]]
    components = {name: component for name, component in state.components.items() if name != "finished"}
    streams = {"s": StreamState(StreamSpec({}))}
    again = QueryPipeline.from_state(State(before, {}, components), streams, 0, pipeline.encode)
    assert again is not None and again.to_state().pack("test") == state.pack("test")
