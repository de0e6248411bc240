import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, InvalidRecord, InvalidRequest
from edgewater.synopses import Count, CountMin, Frequency, Synopsis, from_bytes
from edgewater.synopses.encoding import codec
from edgewater.synopses.hashing import hash_values
from edgewater.synopses.items import row_hashes
from tests.refusals import refused

SEED = 11


def test_a_story_of_one_sketch() -> None:
    sketch: CountMin = CountMin.for_error(0.001, 0.01)
    assert isinstance(sketch, Synopsis) and sketch.stack.parameters == {"width": 4096, "depth": 5}
    sketch.update(pa.array(["/", "/a", None, "/"]))
    assert sketch.query(Count()).value == 3 == sketch.query().value == sketch.records
    answer = sketch.query(Frequency("/"))
    assert (answer.value, answer.upper, answer.basis) == (2, 2, "count_min")
    assert answer.lower == 2 and answer.confidence == pytest.approx(1 - math.exp(-5)), "e·3/4096 is less than one"
    other = CountMin.for_error(0.001, 0.01)
    other.update(["/", "/b"])
    both = sketch.merge_many([other])
    assert both.query(Frequency("/")).value == 3 and sketch.query(Frequency("/")).value == 2
    again = from_bytes(both.to_bytes())
    assert isinstance(again, CountMin) and again.query(Frequency("/b")) == both.query(Frequency("/b"))


def test_an_estimate_is_an_upper_bound() -> None:
    """3 × 16 counters of 200 items, once each: as a lower bound the estimate would be wrong 200 times."""
    items = np.arange(200)
    sketch = CountMin(16, 3)
    sketch.update(items)
    given = [sketch.query(Frequency(i)) for i in items.tolist()]
    assert all(g.lower <= 1 <= g.upper == g.value for g in given)
    assert all(g.value > 1 for g in given)


@pytest.mark.parametrize("seed", range(3))
def test_collisions_in_two_rows_are_independent(seed: int) -> None:
    """One in 64² of the 1.1 million pairs of 1500 items collides in two rows: 275 ± 17; beyond 6 standard deviations:
    1e-9.

    With rows made of two hashes (Kirsch and Mitzenmacher), a pair that meets in two rows meets in all.
    """
    words = hash_values(np.arange(1500), seed)
    columns = [(row_hashes(words, row) >> np.uint64(58)).astype(np.int64) for row in range(4)]

    def pairs(*rows: int) -> int:
        together = sum(columns[r] * 64**i for i, r in enumerate(rows))
        return sum(n * (n - 1) // 2 for n in Counter(together.tolist()).values())

    all_pairs = 1500 * 1499 / 2
    for two in ((0, 1), (1, 2), (0, 3)):
        assert abs(pairs(*two) - all_pairs / 64**2) < 6 * math.sqrt(all_pairs / 64**2)
    assert pairs(0, 1, 2, 3) <= 3, "1 in 64^4"


def test_for_error_gives_the_sizes_of_the_paper() -> None:
    assert CountMin.for_error(math.e / 65536 * 1.0001, math.exp(-5) * 1.0001).stack.parameters == {
        "width": 65536,
        "depth": 5,
    }
    assert CountMin.for_error(0.9, 0.9).stack.parameters == {"width": 16, "depth": 1}
    for epsilon, delta, field in ((0, 0.1, "epsilon"), (1e-9, 0.1, "epsilon"), (0.1, 1, "delta")):
        with refused(InvalidRequest, field):
            CountMin.for_error(epsilon, delta)
    with refused(InvalidRequest, "delta"):
        CountMin.for_error(0.1, 1e-20)


@pytest.mark.parametrize(
    ("width", "depth", "field"),
    [*((width, 5, "width") for width in (100, 8, 1 << 25, 64.0)), *((64, depth, "depth") for depth in (0, 33, True))],
)
def test_widths_and_depths_out_of_range_are_refused(width: object, depth: object, field: str) -> None:
    with refused(InvalidRequest, field):
        CountMin(width, depth)  # type: ignore[arg-type]


def test_an_item_of_another_type_is_refused() -> None:
    sketch = CountMin(64, 3)
    assert sketch.query(Frequency("anything")).value == 0, "nothing is in it, so nothing is known of its type"
    sketch.update(np.array([1.0, 2.5]))
    assert sketch.query(Frequency(1)).value == 1, "a whole number is a float"
    with refused(InvalidRequest, "item"):
        sketch.query(Frequency("1"))
    with refused(InvalidRecord, "values"):
        sketch.update(["a"])
    whole = CountMin(64, 3)
    whole.update([1, 2])
    assert whole.query(Frequency(np.float64(2.0))).value == 1
    for item in (2.5, math.nan, math.inf, True, 1 << 70, None):
        with refused(InvalidRequest, "item"):
            whole.query(Frequency(item))
    with pytest.raises(IncompatibleSynopses):
        sketch.merge_many([whole])
    assert CountMin(64, 3).merge_many([whole]).query(Frequency(2)).value == 1


def test_counters_that_do_not_add_up_are_corrupt() -> None:
    sketch = CountMin(16, 2)
    sketch.update([1, 2])
    message = sketch.stack.to_message()
    message.arrays[1].CopyFrom(codec.encode(np.array([3])))
    with pytest.raises(CorruptSynopsis):
        from_bytes(codec.seal(message))


def test_a_sketch_with_few_values_takes_few_bytes() -> None:
    sketch = CountMin()
    sketch.update(np.arange(100))
    assert len(sketch.to_bytes()) < 3000 < sketch.nbytes
    sketch.update(np.arange(1_000_000) % 200_000)
    assert len(sketch.to_bytes()) < 5 * 65536 + 500, "small counts take a byte each"
