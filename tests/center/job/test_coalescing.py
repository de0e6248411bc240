"""When a micro-batch is held back for the frames that are about to come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from center.job.coalescing import REMEMBERED_BATCHES, BatchCoalescer

ALL = {"a@1": {"jfk", "lga", "ewr"}}


def make_gathering() -> BatchCoalescer:
    """One that has seen all three edges speak."""
    gathering = BatchCoalescer(most_s=0.05)
    assert not gathering.holds(ALL, 0.0)
    return gathering


def test_whom_nobody_has_heard_is_not_waited_for() -> None:
    assert not BatchCoalescer(most_s=0.05).holds({"a@1": {"jfk"}}, 0.0)


def test_a_batch_waits_for_the_edges_that_spoke_before_and_begins_with_the_last_of_them() -> None:
    gathering = make_gathering()

    assert gathering.holds({"a@1": {"jfk"}}, 1.0)
    assert gathering.holds({"a@1": {"jfk", "lga"}}, 1.02)
    assert not gathering.holds(ALL, 1.03)


def test_a_batch_is_held_back_no_longer_than_its_bound() -> None:
    gathering = make_gathering()

    assert gathering.holds({"a@1": {"jfk"}}, 1.0)
    assert gathering.holds({"a@1": {"jfk"}}, 1.049)
    assert not gathering.holds({"a@1": {"jfk"}}, 1.051)


def test_the_bound_counts_from_the_first_frame_of_each_batch() -> None:
    gathering = make_gathering()
    assert not gathering.holds({}, 1.0)

    assert gathering.holds({"a@1": {"jfk"}}, 9.0)


def test_one_query_that_lacks_an_edge_holds_all_back() -> None:
    gathering = BatchCoalescer(most_s=0.05)
    assert not gathering.holds(ALL | {"b@1": {"jfk"}}, 0.0)

    assert gathering.holds({"a@1": {"jfk"}, "b@1": {"jfk"}}, 1.0)
    assert not gathering.holds({"b@1": {"jfk"}}, 1.01)


def test_an_edge_that_speaks_no_more_is_forgotten_after_some_batches() -> None:
    gathering, now_s = make_gathering(), 1.0
    for _ in range(REMEMBERED_BATCHES):
        assert gathering.holds({"a@1": {"jfk", "lga"}}, now_s)
        assert not gathering.holds({"a@1": {"jfk", "lga"}}, now_s + 0.06)
        now_s += 1.0

    assert not gathering.holds({"a@1": {"jfk", "lga"}}, now_s)


def test_a_query_that_is_gone_is_forgotten() -> None:
    gathering = make_gathering()
    gathering.keep({"b@1"})

    assert not gathering.holds({"a@1": {"jfk"}}, 1.0)


edges = st.frozensets(st.sampled_from(["jfk", "lga", "ewr"]), min_size=1)


@given(st.lists(st.dictionaries(st.sampled_from(["a@1", "b@1"]), edges), max_size=40), st.floats(0.001, 0.1))
def test_whatever_comes_nothing_waits_longer_than_the_bound_and_a_look(
    looks: list[dict[str, frozenset[str]]], every_s: float
) -> None:
    gathering, held_since_s = BatchCoalescer(most_s=0.05), None
    for i, waiting in enumerate(looks):
        now_s = i * every_s
        if gathering.holds(waiting, now_s):
            held_since_s = now_s if held_since_s is None else held_since_s
            assert now_s - held_since_s < 0.05
        else:
            held_since_s = None
