"""The used bytes of a byte budget survive a crash at every step, and a state that is lost keeps the budget."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edge.core.events import Configured, PullEvent, SourcesOpened
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef, link_bytes
from tests.cells import at_night
from tests.edge.hard_state import hard_state
from tests.edge.recovery_world import Center, World, flights

REF, HOUR_MS = QueryRef("bytes", 1), 3_600_000
BEGIN_MS = (1 << 40) // HOUR_MS * HOUR_MS + 1_000
AMOUNT = 154_000  # the closes of this world's windows take nearly all of it
BYTES = QuerySpec.from_mapping(
    {
        "name": "bytes", "from": "flights", "group_by": ["carrier"], "measures": {"miles": "sum(distance)"},
        "window": {"tumbling": "10s"}, "budget": {"bytes": f"{AMOUNT}B per hour"}, "lateness": "30s",
    }
)  # fmt: skip
STEP_MS = 2_000  # a close waits for the bytes of several pulls


class ByteWorld(World):
    """A `World` whose pulls have a clock, which the test moves."""

    clock_ms = BEGIN_MS

    def configure(self) -> None:
        if not self.edge.core.configured:
            self.edge.handle(SourcesOpened((("flights", "file"),)))
            self.edge.handle(Configured(((REF, BYTES),), now_ms=self.clock_ms))

    def pull(self, capacity: int = 400, max_frames: int = 64) -> None:
        self.clock_ms += STEP_MS
        self.edge.handle(PullEvent(capacity, {}, max_frames=max_frames, now_ms=self.clock_ms))

    def run(self, steps: int) -> None:
        actions = [lambda: self.ingest(40), self.pull, self.ship, self.pull, self.edge.checkpoint, self.pull]
        self.configure()
        for step in range(steps):
            actions[step % len(actions)]()

    def finish(self) -> None:
        self.configure()
        while self.row < self.data.num_rows:
            self.ingest(40)
            self.pull()
            self.ship()
        self.end()
        while (
            self.edge.core.pulls.next_pull_ms(1e6, self.clock_ms) is not None
            and self.clock_ms < BEGIN_MS + HOUR_MS // 2
        ):
            self.pull(4_000)
            self.ship()


def used(*centers: Center) -> int:
    return sum(link_bytes(frame.wire_bytes) for center in centers for frame in center.frames.values())


def available(now_ms: int) -> float:
    """Returns the bytes that became available after `BEGIN_MS`."""
    return 0.75 * AMOUNT * (now_ms - BEGIN_MS) / HOUR_MS


def closes(center: Center) -> list[int]:
    return [c.slice_start_ms for _, f in sorted(center.frames.items()) for c in f.unpack().closes]


@pytest.mark.parametrize("steps", [*range(2, 44, 6), *at_night(*range(0, 42))])
def test_a_crash_after_any_step_loses_no_used_byte(tmp_path: Path, steps: int) -> None:
    data, center = flights(300, seed=1), Center()
    before = ByteWorld(tmp_path, data, center)
    before.run(steps)
    before.edge.sync()
    again = ByteWorld(tmp_path, data, center)
    again.clock_ms = before.clock_ms
    assert hard_state(again.edge.core) == hard_state(before.edge.core)
    again.finish()
    count = again.edge.core.queries[REF].byte_count
    assert count is not None
    assert (
        0 < used(center) == sum(count.used.values()) - int(AMOUNT * (0.25 + 0.75 / 3_600)) <= available(again.clock_ms)
    )
    assert closes(center) == sorted(closes(center)) and len(set(closes(center))) >= 6


@pytest.mark.parametrize("steps", [*range(2, 36, 8), *at_night(*range(0, 36))])
def test_an_older_copy_of_the_state_that_begins_anew_keeps_the_budget(tmp_path: Path, steps: int) -> None:
    data, center, second = flights(300, seed=1), Center(), Center()
    world = ByteWorld(tmp_path / "state", data, center)
    world.run(steps)
    world.edge.sync()
    shutil.copytree(tmp_path / "state", tmp_path / "copy")
    world.finish()
    copy = ByteWorld(tmp_path / "copy", data, second)
    copy.edge.begin_anew("second", 1)
    copy.edge.close()
    again = ByteWorld(tmp_path / "copy", data, second)
    again.clock_ms = world.clock_ms
    again.finish()
    assert used(center) <= available(world.clock_ms)
    assert used(center, second) <= available(again.clock_ms)
