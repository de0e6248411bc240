"""Frames are the same bytes whatever checkpoints were taken and read back, also of synopses that order changes.

Values of `kll` and `top_k` wait to be compacted many together, and what was compacted together decides the coins and
the cuts that follow. So a checkpoint must neither compact, nor forget what waits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edge.core import Configured, SourcesOpened
from edgewater.model.query import QuerySpec
from edgewater.wire import QueryRef
from tests.cells import at_night
from tests.edge.recovery_world import Center, World, flights

pytestmark = pytest.mark.slow

DATA = flights(600, seed=3)
QUERIES = tuple(
    (
        QueryRef(name, 1),
        QuerySpec.from_mapping(
            {
                "name": name,
                "from": "flights",
                "group_by": groups,
                "measures": {
                    "ranks": "kll(distance, k=8)",
                    "most": "top_k(distance, k=3)",
                    "some": "reservoir(distance, size=5)",
                    "quantiles": "quantiles(distance, accuracy=0.2)",
                    "different": "distinct(distance, precision=5)",
                },
                "window": {"tumbling": "20s"},
                "lateness": "30s",
            }
        ),
    )
    for name, groups in (("grouped", ["carrier"]), ("whole", []))
)


class OrderedWorld(World):
    """The same edge, with measures whose bytes depend on the order of updates."""

    queries = QUERIES

    def configure(self) -> None:
        if not self.edge.core.configured:
            self.edge.handle(SourcesOpened((("flights", "file"),)))
            self.edge.handle(Configured(self.queries))


def run(directory: Path, center: Center, between: Callable[[OrderedWorld], OrderedWorld]) -> dict[int, int]:
    """Ingests in small batches and ships now and then; `between` is called after each batch. Sequence -> CRC32C."""
    world = OrderedWorld(directory, DATA, center)
    world.configure()
    batch = 0
    while world.row < DATA.num_rows:
        world.ingest(31)
        world = between(world)
        batch += 1
        if batch % 5 == 0:
            world.pull(2000)
            world = between(world)
            world.ship()
    world.finish()
    return {seq: frame.crc32c for seq, frame in center.frames.items()}


def test_checkpoints_in_between_change_no_byte_of_any_frame(tmp_path: Path) -> None:
    def written(world: OrderedWorld) -> OrderedWorld:
        world.edge.checkpoint()
        return world

    plain = run(tmp_path / "plain", Center(), lambda world: world)
    assert len(plain) > 4
    assert run(tmp_path / "written", Center(), written) == plain


def test_an_edge_restored_from_a_checkpoint_builds_the_same_bytes(tmp_path: Path) -> None:
    def read_back(world: OrderedWorld) -> OrderedWorld:
        world.edge.checkpoint()
        return OrderedWorld(world.edge.directory, DATA, world.center)

    plain = run(tmp_path / "plain", Center(), lambda world: world)
    assert run(tmp_path / "read-back", Center(), read_back) == plain


@pytest.mark.parametrize("lost", [4, *at_night(2, 9)])
def test_with_a_damaged_checkpoint_the_replay_from_the_previous_one_gives_the_same_bytes(
    tmp_path: Path, lost: int
) -> None:
    """The edge compared with what it shipped before: recovery stops if a frame is built of other bytes."""
    calls = 0

    def damaged(world: OrderedWorld) -> OrderedWorld:
        nonlocal calls
        calls += 1
        world.edge.checkpoint()
        if calls != lost:
            return world
        world.edge.sync()
        newest = max(world.edge.directory.glob("checkpoint-*.ckpt"), key=lambda p: int(p.stem.split("-")[1]))
        newest.write_bytes(b"\0" * 40)
        return OrderedWorld(world.edge.directory, DATA, world.center)

    plain = run(tmp_path / "plain", Center(), lambda world: world)
    assert run(tmp_path / "damaged", Center(), damaged) == plain
