import math
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from edgewater.base.errors import InvalidRecord, InvalidRequest
from edgewater.synopses import Count, Distinct, HyperLogLog, Synopsis, from_bytes
from edgewater.synopses.distinct.hyperloglog import STANDARD_ERROR, HyperLogLogStack
from edgewater.synopses.encoding import codec
from tests.refusals import refused

SEED = 99


@pytest.mark.parametrize("n", [100, 1000, 10_000, 100_000])
def test_the_error_is_that_of_the_paper_for_all_cardinalities(n: int) -> None:
    """The RMS of 60 sketches exceeds 1.5 times 1.04/√m with probability 1e-8; the bias is within 5 standard
    deviations."""
    rng = np.random.default_rng([SEED, n])
    estimates = []
    for _ in range(60):
        sketch = HyperLogLog(12)
        sketch.update(rng.integers(0, 1 << 62, n))
        estimates.append(sketch.query().value / n - 1)
    standard_error = STANDARD_ERROR / math.sqrt(1 << 12)
    assert np.sqrt(np.mean(np.square(estimates))) < 1.5 * standard_error
    assert abs(np.mean(estimates)) < 5 * standard_error / math.sqrt(60)


def test_a_story_of_one_sketch() -> None:
    sketch: HyperLogLog = HyperLogLog.for_error(0.01)
    assert isinstance(sketch, Synopsis)
    sketch.update(pa.array(["ann", "bob", None, "ann"]))
    assert sketch.records == 3
    answer = sketch.query(Distinct(0.9))
    assert round(answer.value) == 2 and answer.lower <= 2 <= answer.upper and answer.basis == "hyperloglog"
    other = HyperLogLog.for_error(0.01)
    other.update(["bob", "cy"])
    both = sketch.merge_many([other])
    assert round(both.query().value) == 3 and both.records == 5
    assert round(sketch.query().value) == 2, "merging makes a new one"
    again = from_bytes(both.to_bytes())
    assert isinstance(again, HyperLogLog) and again.records == 5
    assert again.to_bytes() == both.to_bytes()
    assert again.query() == both.query()
    assert "5 values" in repr(again)


def test_for_error_returns_the_smallest_sufficient_sketch() -> None:
    assert HyperLogLog.for_error(0.0082).stack.precision == 14
    assert HyperLogLog.for_error(0.0081).stack.precision == 15
    assert HyperLogLog.for_error(1.0).stack.precision == 4
    with refused(InvalidRequest, "epsilon"):
        HyperLogLog.for_error(0.001)


@pytest.mark.parametrize("precision", [3, 19, 14.0, True, "14"])
def test_a_precision_out_of_range_is_refused(precision: object) -> None:
    with refused(InvalidRequest, "precision"):
        HyperLogLog(precision)  # type: ignore[arg-type]


def test_other_values_and_questions_are_refused_by_name() -> None:
    sketch = HyperLogLog()
    with refused(InvalidRecord, "values"):
        sketch.update(pa.array([0], pa.timestamp("ms")))
    with refused(InvalidRequest, "question"):
        sketch.query(Count())
    for confidence in (0.0, 1.0, -1.0, math.nan):
        with refused(InvalidRequest, "confidence"):
            sketch.query(Distinct(confidence))
    assert sketch.query().value == 0


def test_narrow_and_encoded_arrays_count_as_their_wide_types() -> None:
    wide, narrow = HyperLogLog(), HyperLogLog()
    wide.update(np.arange(10))
    narrow.update(pa.array(range(10), pa.int16()))
    assert wide.to_bytes() == narrow.to_bytes()
    wide, narrow = HyperLogLog(), HyperLogLog()
    wide.update(["a", "b", "a"])
    narrow.update(pa.array(["a", "b", "a"]).dictionary_encode())
    assert wide.to_bytes() == narrow.to_bytes()


def test_sparse_groups_take_bytes_only_for_registers_in_use() -> None:
    groups = 5000
    stack = HyperLogLogStack(groups)
    codes = np.repeat(np.arange(groups), 20)
    stack.update(codes, np.arange(len(codes)))
    assert len(codec.seal(stack.to_message())) < 100 * groups
    assert stack.nbytes < 500 * groups, "against 16 KiB each when dense"
    stack.update(np.zeros(50_000, np.int64), np.arange(50_000))
    assert (stack._view("row") >= 0).sum() <= 1
    stack.to_message()
    assert (stack._view("row") >= 0).sum() == 1, "only the crowded group has a dense row"


@pytest.mark.parametrize("known", [0, 5, 200, 3_000])
@pytest.mark.parametrize("pending", [5, 200, 3_000])
def test_what_is_beyond_known_registers_completes_them(known: int, pending: int) -> None:
    def stack(clients: np.ndarray) -> HyperLogLogStack:
        result = HyperLogLogStack(2, precision=8)
        result.update(clients % 2, clients)
        return result

    sent, more = stack(np.arange(known)), stack(np.arange(known // 2, known // 2 + pending))
    rest = more.beyond(sent)
    for other in (more, rest):
        whole = stack(np.arange(known))
        whole.merge(other, np.arange(2))
        assert whole.to_message() == stack(np.arange(max(known, known // 2 + pending))).to_message()
    assert not more.beyond(more).holds_values.any()
    assert rest.holds_values.any() == (rest.to_message() != HyperLogLogStack(2, precision=8).to_message())


def test_an_update_needs_memory_for_a_chunk_and_not_for_the_batch() -> None:
    stack, values, codes = HyperLogLogStack(1), np.arange(4_000_000), np.zeros(4_000_000, np.int64)
    stack.update(codes[:100_000], values[:100_000])
    tracemalloc.start()
    stack.update(codes, values)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_answers_of_many_groups_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = HyperLogLogStack(10, precision=6)
    rng = np.random.default_rng(5)
    stack.update(rng.integers(0, 10, 900) ** 2 // 9, rng.integers(0, 300, 900))
    whole = stack.query(Distinct(0.9))
    monkeypatch.setattr("edgewater.synopses.distinct.hyperloglog._MOST_GROUPS", 3)
    parts = stack.query(Distinct(0.9))
    for name in ("value", "lower", "upper"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    assert parts.confidence == whole.confidence
