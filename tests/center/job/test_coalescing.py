"""When a batch is held back for the frames that are about to come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from center.job.coalescing import MAX_WAIT_MANY_S, QUIET_S, REMEMBERED_BATCHES, BatchCoalescer

ALL = {"a@1": {"jfk", "lga", "ewr"}}


def make_coalescer() -> BatchCoalescer:
    """A coalescer that has seen frames of all three edges."""
    coalescer = BatchCoalescer(max_wait_s=0.05)
    assert coalescer.wait_until_s(ALL, 0.0) is None
    return coalescer


def test_an_edge_that_has_not_sent_is_not_waited_for() -> None:
    assert BatchCoalescer(max_wait_s=0.05).wait_until_s({"a@1": {"jfk"}}, 0.0) is None


def test_a_batch_waits_for_the_edges_of_earlier_batches_and_begins_with_the_last_of_them() -> None:
    coalescer = make_coalescer()

    assert coalescer.wait_until_s({"a@1": {"jfk"}}, 1.0)
    assert coalescer.wait_until_s({"a@1": {"jfk", "lga"}}, 1.02)
    assert coalescer.wait_until_s(ALL, 1.03) is None


def test_a_batch_is_held_back_no_longer_than_its_bound() -> None:
    coalescer = make_coalescer()

    assert coalescer.wait_until_s({"a@1": {"jfk"}}, 1.0)
    assert coalescer.wait_until_s({"a@1": {"jfk"}}, 1.049) == 1.05
    assert coalescer.wait_until_s({"a@1": {"jfk"}}, 1.051) is None


def test_the_bound_counts_from_the_first_frame_of_each_batch() -> None:
    coalescer = make_coalescer()
    assert coalescer.wait_until_s({}, 1.0) is None

    assert coalescer.wait_until_s({"a@1": {"jfk"}}, 9.0)


def test_one_query_that_misses_an_edge_delays_all() -> None:
    coalescer = BatchCoalescer(max_wait_s=0.05)
    assert coalescer.wait_until_s(ALL | {"b@1": {"jfk"}}, 0.0) is None

    assert coalescer.wait_until_s({"a@1": {"jfk"}, "b@1": {"jfk"}}, 1.0)
    assert coalescer.wait_until_s({"b@1": {"jfk"}}, 1.01) is None


def test_an_edge_that_sends_no_more_is_dropped_after_some_batches() -> None:
    coalescer, now_s = make_coalescer(), 1.0
    for _ in range(REMEMBERED_BATCHES):
        assert coalescer.wait_until_s({"a@1": {"jfk", "lga"}}, now_s)
        assert coalescer.wait_until_s({"a@1": {"jfk", "lga"}}, now_s + 0.06) is None
        now_s += 1.0

    assert coalescer.wait_until_s({"a@1": {"jfk", "lga"}}, now_s) is None


def queries(count: int) -> list[str]:
    return [f"q{n}@1" for n in range(count)]


def test_many_queries_are_gathered_until_no_more_come_and_then_until_all_have_that_did_before() -> None:
    coalescer = BatchCoalescer()
    for now_s, count in ((0.0, 64), (0.03, 128), (0.06, 500), (0.06 + 0.99 * QUIET_S, 500)):
        assert coalescer.wait_for_queries_until_s(queries(count), now_s)
    assert coalescer.wait_for_queries_until_s(queries(500), 0.06 + QUIET_S) is None

    assert coalescer.wait_for_queries_until_s(queries(64), 1.0)
    assert coalescer.wait_for_queries_until_s(queries(500), 1.03) is None, "all have"
    for tick in range(2, 2 + REMEMBERED_BATCHES):
        assert coalescer.wait_for_queries_until_s(queries(100), tick)
        assert coalescer.wait_for_queries_until_s(queries(100), tick + 1.01 * QUIET_S) is None
    assert coalescer.wait_for_queries_until_s(queries(100), 9.0) is None, "no batch of late had more"


def test_queries_that_were_late_for_a_batch_of_many_are_waited_for_the_next_time() -> None:
    coalescer, late = BatchCoalescer(), {"late@1": {"jfk"}}
    assert coalescer.wait_for_queries_until_s(queries(100), 0.0)
    assert coalescer.wait_for_queries_until_s(queries(100), 1.01 * QUIET_S) is None
    assert coalescer.wait_until_s(late, 0.4) is None

    assert coalescer.wait_for_queries_until_s(queries(100), 1.0)
    assert coalescer.wait_for_queries_until_s([*queries(100), *late], 1.01) is None
    coalescer.keep(queries(100))
    assert coalescer.wait_for_queries_until_s(queries(100), 2.0) is None, "it is gone"


def test_queries_that_never_cease_to_come_delay_a_batch_no_longer_than_its_bound() -> None:
    coalescer, held = BatchCoalescer(), 0
    while coalescer.wait_for_queries_until_s(queries(32 + held), 1.0 + held * 0.01) is not None:
        held += 1
    assert held * 0.01 <= MAX_WAIT_MANY_S + 0.01


def test_a_query_that_is_gone_is_dropped() -> None:
    coalescer = make_coalescer()
    coalescer.keep({"b@1"})

    assert coalescer.wait_until_s({"a@1": {"jfk"}}, 1.0) is None


edges = st.frozensets(st.sampled_from(["jfk", "lga", "ewr"]), min_size=1)


@given(st.lists(st.dictionaries(st.sampled_from(["a@1", "b@1"]), edges), max_size=40), st.floats(0.001, 0.1))
def test_no_batch_waits_longer_than_the_bound_and_one_poll(
    polls: list[dict[str, frozenset[str]]], every_s: float
) -> None:
    coalescer, held_since_s = BatchCoalescer(max_wait_s=0.05), None
    for i, pending in enumerate(polls):
        now_s = i * every_s
        if coalescer.wait_until_s(pending, now_s) is not None:
            held_since_s = now_s if held_since_s is None else held_since_s
            assert now_s - held_since_s < 0.05
        else:
            held_since_s = None
