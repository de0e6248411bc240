"""A journal that needs input that is gone: the edge starts, and every window that lacks records is stated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from edge.durability import journal
from edge.records import InputGone, Position
from edgewater.wire import InputLoss
from tests.edge.durability.test_recovery import script
from tests.edge.recovery_world import BUDGETED, EXACT, SHARE, Center, World, flights, truth

DATA = flights(300, seed=3)
SPECS = {"exact": EXACT, "budgeted": BUDGETED}


class Forgetful(World):
    """Its source no longer has the records in `gone`."""

    gone = range(0)

    def _reread(self, source: str, start: Position | None, end: Position) -> pa.RecordBatch:
        if (start["row"] if start else 0) in self.gone:
            raise InputGone("the file is gone")
        return super()._reread(source, start, end)


def forgetful(rows: range) -> type[Forgetful]:
    return type("Forgetful", (Forgetful,), {"gone": rows})


def losses(center: Center) -> Iterator[tuple[str, InputLoss]]:
    for _, frame in sorted(center.frames.items()):
        yield from ((frame.query.name, loss) for loss in frame.unpack().losses)


def check(center: Center) -> list[tuple[str, InputLoss]]:
    """What is not stated to be incomplete is the truth; nothing is counted twice. Returns the losses."""
    answers, stated = center.answers(), list(losses(center))
    for name, spec in SPECS.items():
        for key, groups in truth(DATA, spec).items():
            got, end = answers.get(key, {}), key[1] + spec.window.slice_ms
            lacking = any(query == name and loss.overlaps(key[1], end) for query, loss in stated)
            for group, values in groups.items():
                for measure, value in values.items():
                    sent = got.get(group, {}).get(measure, 0.0)
                    withheld = SHARE if name == "budgeted" else 0.0
                    assert sent <= value, f"{key} {group} {measure}"
                    assert lacking or value - sent <= withheld, f"{key} {group} {measure}: {stated}"
    return stated


ALL, PARTS = range(300), (range(100), range(60, 120), range(150, 300))
# Without all input at each fourth step, without a part of it at each twentieth: every part meets steps of its own.
CRASHES = [
    pytest.param(steps, gone, marks=[] if steps % every == number else [pytest.mark.nightly])
    for number, (gone, every) in enumerate([(ALL, 4), *((part, 20) for part in PARTS)])
    for steps in range(40)
]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "gone"), CRASHES, ids=str)
def test_after_a_crash_whatever_is_gone_the_windows_that_lack_it_are_stated(
    tmp_path: Path, steps: int, gone: range
) -> None:
    center = Center()
    script(World(tmp_path, DATA, center), steps)
    recovered = forgetful(gone)(tmp_path, DATA, center)
    recovered.finish()
    stated = check(center)
    # Once more, with the input there again: what was recovered does not need it.
    World(tmp_path, DATA, center).finish()
    assert check(center) == stated


class Stricter(World):
    """It accepts fewer records of the same input, as after a change of its stream's columns."""

    def _reread(self, source: str, start: Position | None, end: Position) -> pa.RecordBatch:
        return super()._reread(source, start, end)[1:]


def test_windows_whose_input_is_read_in_another_way_are_stated(tmp_path: Path) -> None:
    center = Center()
    script(World(tmp_path, DATA, center), 24)
    Stricter(tmp_path, DATA, center).finish()
    assert check(center)


def test_windows_that_were_shipped_before_the_crash_do_not_lack_what_is_gone(tmp_path: Path) -> None:
    center = Center()
    world = World(tmp_path, DATA, center)
    world.configure()
    for _ in range(5):
        world.ingest(40)
        world.pull(1 << 20)
        world.ship()
    through = world.edge.core.queries[next(iter(world.edge.core.queries))].through_ms
    recovered = forgetful(range(300))(tmp_path, DATA, center)
    assert recovered.edge.core.streams["flights"].records == 200, "the records keep their numbers"
    recovered.finish()
    stated = check(center)
    assert stated and all(loss.from_ms is not None and loss.from_ms >= through - 34_000 for _, loss in stated)
    late = {name: loss.from_ms for name, loss in stated}
    assert late["budgeted"] is not None and late["budgeted"] >= through - 4_000


def test_nothing_is_lost_if_nothing_was_left_to_send(tmp_path: Path) -> None:
    center = Center()
    World(tmp_path, DATA, center).finish()
    recovered = forgetful(range(300))(tmp_path, DATA, center)
    recovered.finish()
    assert check(center) == []
    assert recovered.edge.state.losses == {"flights/file-gone": 8}, "the operator sees it"


def test_counters_of_shipped_records_are_kept_without_the_records(tmp_path: Path) -> None:
    center = Center()
    world = World(tmp_path, DATA, center)
    world.configure()
    for _ in range(4):
        world.ingest(40)
        world.pull(1 << 20)
        world.ship()

    def observed() -> dict[tuple[str, int], int]:
        """The newest counters: a close replaces the ones before it."""
        frames = (frame for _, frame in sorted(center.frames.items()))
        return {(f.query.name, c.slice_start_ms): c.observed for f in frames for c in f.unpack().closes}

    before = observed()
    assert before
    forgetful(range(300))(tmp_path, DATA, center).finish()
    after = observed()
    assert all(after[key] >= count for key, count in before.items())


def test_a_damaged_record_of_the_journal_is_a_stated_loss(tmp_path: Path) -> None:
    center = Center()
    world = World(tmp_path, DATA, center)
    world.configure()
    for _ in range(3):
        world.ingest(40)
    world.edge.sync()
    path = max(tmp_path.glob("journal-*.log"))
    data = bytearray(path.read_bytes())
    at = data.index(b'"start":{"row":40}')
    data[at + 10] ^= 1
    path.write_bytes(data)
    assert len(journal.scan(bytes(data)).damaged) == 1
    World(tmp_path, DATA, center).finish()
    assert {loss.reason for _, loss in check(center)} == {"journal-damaged"}
