"""An edge states its late records with their amounts: those that it counts, and those that it drops."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from edge.core.core import EdgeCore
from edge.core.dropped import COUNTED, UnreportedDrops, late_amounts
from edge.core.events import Ingested
from edge.core.measure_inputs import MeasureArguments
from edge.core.streams import StreamSpec
from edgewater.base.streams import MIN_TIME_MS, TIME_COLUMN
from edgewater.model.query import BoundQuery, QuerySpec
from edgewater.wire import DropReason, FrameBody, QueryRef, Withheld
from tests.cores import open_core, pulled

COLUMNS = {"x": pa.int64(), "f": pa.float64()}
MEASURES = {
    "n": "count()",
    "s": "sum(x)",
    "m": "max(x)",
    "fs": "sum(f)",
    "mean": "mean(x)",
    "lo": "min(x)",
    "v": "var(x)",
}
REF = QueryRef("q", 1)


def spec(**parts: object) -> QuerySpec:
    given = {"name": "q", "from": "s", "measures": MEASURES, "window": {"tumbling": "1s"}, **parts}
    return QuerySpec.from_mapping(given)


def batch(*rows: tuple[int, int | None, float | None]) -> pa.RecordBatch:
    """Records of event time, x and f."""
    times, x, f = zip(*rows, strict=True)
    return pa.record_batch({TIME_COLUMN: pa.array(times, pa.int64()), "x": pa.array(x, pa.int64()), "f": pa.array(f)})


def arguments(*rows: tuple[int, int | None, float | None]) -> MeasureArguments:
    bound: BoundQuery = spec().bind(COLUMNS)
    return MeasureArguments(bound, batch(*rows))


def frames(core: EdgeCore) -> list[FrameBody]:
    return [frame.unpack() for frame in pulled(core)]


@pytest.mark.parametrize("lateness", ["0s", "10s"])
def test_a_frame_states_late_records_with_their_amounts(lateness: str) -> None:
    core = open_core(StreamSpec(COLUMNS, None), (REF, spec(lateness=lateness)))
    core.handle(Ingested("s", "file", batch((100, 1, 1.0), (1500, 1, 1.0)), 0))
    frames(core)
    core.handle(Ingested("s", "file", batch((200, 7, 0.5), (300, -2, 0.5)), 0))
    core = restored(core)
    (frame,) = frames(core)
    (stated,), others = (frame.late, frame.dropped) if lateness == "10s" else (frame.dropped, frame.late)
    assert (stated.slice_start_ms, stated.records, others) == (0, 2, ())
    assert stated.reason is (DropReason.COUNTED if lateness == "10s" else DropReason.TOO_LATE)
    amounts = {w.measure: (w.largest_above, w.largest_below, w.largest_unsent) for w in stated.amounts}
    assert amounts.pop("fs") == (pytest.approx(1.0, abs=1e-12), 0.0, None)
    above, _, _ = amounts.pop("v")
    assert 53.0 <= above <= 53.0 * (1 + 1e-12), "the sum of the squares"
    sums = {"s": (7.0, 2.0, None), "mean": (7.0, 2.0, None)}
    assert amounts == {**sums, "n": (2.0, 0.0, None), "m": (0.0, 0.0, 7.0), "lo": (0.0, 0.0, 2.0)}
    assert not any(each.late or each.dropped for each in frames(core)), "stated once"


def restored(core: EdgeCore) -> EdgeCore:
    """Returns a core with the state of another one."""
    result = EdgeCore({"s": StreamSpec(COLUMNS, None)})
    result.restore(core.to_state())
    assert result.to_state() == core.to_state()
    return result


def test_amounts_of_values_that_are_not_numbers_are_unlimited() -> None:
    amounts = late_amounts(arguments((0, None, math.nan), (0, None, -math.inf)))
    assert amounts["fs"] == Withheld("fs", math.inf, math.inf, 1)
    assert (amounts["m"].largest_unsent, amounts["s"].largest_above) == (None, 0.0)


def test_integers_that_float64_does_not_represent_are_rounded_outwards() -> None:
    for sign in (1, -1):
        amounts = late_amounts(arguments((0, sign * (2**53 + 1), 0.0)))
        unsent = amounts["m" if sign > 0 else "lo"].largest_unsent
        assert unsent is not None and unsent >= 2**53 + 1


def test_amounts_of_several_reports_add_up_and_an_unknown_one_stays_unknown() -> None:
    drops = UnreportedDrops()
    drops.add(0, COUNTED, 1, late=arguments((0, 5, 1.0)))
    drops.add(0, COUNTED, 1, late=arguments((0, 3, 1.0)))
    drops.add(1000, "too-late", 1)
    drops.add(1000, "too-late", 1, late=arguments((0, 3, 1.0)))
    state, drops = drops.to_state(), UnreportedDrops()
    drops.restore(state)
    (dropped,), (late,) = drops.take()
    of_late = {w.measure: w for w in late.amounts}
    assert (of_late["s"].largest_above, of_late["m"].largest_unsent) == (8.0, 5.0)
    assert (dropped.records, dropped.amounts) == (2, ())
    assert drops.take() == ((), ())


def test_a_state_of_0_3_0_has_no_amounts() -> None:
    drops = UnreportedDrops()
    drops.restore([5, [[0, 0, 3, MIN_TIME_MS]]])
    ((stated,), late) = drops.take()
    assert (stated.reason, stated.records, stated.amounts, late) == (DropReason.TOO_LATE, 3, (), ())
