"""A backfill gives exactly the records before a position, whatever has become of the files since."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edge.records import Chunk, Position, Source, split_rows
from edgewater.base.streams import MIN_TIME_MS
from tests.edge.conftest import record


def read_again(
    source: Source, until: Position, position: Position | None = None, limit: int | None = None
) -> list[Chunk]:
    async def collect() -> list[Chunk]:
        chunks, found = source.backfill(position, until, MIN_TIME_MS), []
        async for chunk in chunks:
            found.append(chunk)
            if len(found) == limit:
                break
        await chunks.aclose()
        return found

    return asyncio.run(collect())


def values(chunks: list[Chunk]) -> list[int]:
    return sorted(n for chunk in chunks for n in chunk.batch.column("distance").to_pylist())


def check_all_positions(make: Callable[[], Source], chunks: list[Chunk]) -> None:
    """Reads up to the position of every chunk, and goes on from every position of that."""
    delivered: list[int] = []
    for chunk in chunks:
        delivered += chunk.batch.column("distance").to_pylist()
        assert chunk.end is not None
        whole = read_again(make(), chunk.end)
        assert values(whole) == sorted(delivered)
        for number, part in enumerate(whole[:-1], 1):
            rest = read_again(make(), chunk.end, part.end)
            assert sorted(values(whole[:number]) + values(rest)) == sorted(delivered)
        again = make()
        for part in whole:
            assert part.end is not None
            assert again.reread(part.start, part.end).batch.equals(part.batch)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a file, and several chunks a block."""
    for module in ("edge.codecs.framing", "edge.codecs.decompression"):
        monkeypatch.setattr(f"{module}.BLOCK_BYTES", 700)
    monkeypatch.setattr("edge.codecs.formats.TextFormat.blocks.__defaults__", (700,))
    monkeypatch.setattr("edge.sources.files.source.BACKFILL_ROWS", 3)


def in_pieces(chunks: list[Chunk], rows: int = 4) -> list[Chunk]:
    """The chunks as a paced replay gives them: with positions inside blocks."""
    return [piece for chunk in chunks for piece in split_rows(chunk, rows)]


def csv_lines(start: int, stop: int) -> str:
    rows = [record(n) for n in range(start, stop)]
    return "t,carrier,distance,delay,late\n" + "".join(
        f"{r['t']},{r['carrier']},{r['distance']},{r['delay']},false\n" for r in rows
    )


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["ndjson", "csv", "gz", "parquet"])
def test_files_read_once(world: Any, read: Any, ndjson: Any, kind: str) -> None:
    options: dict[str, Any] = {"format": "ndjson" if kind == "gz" else kind}
    for name, (start, stop) in {"a": (0, 25), "b": (25, 30), "c": (30, 52)}.items():
        if kind == "parquet":
            table = pa.Table.from_pylist([record(n) for n in range(start, stop)])
            pq.write_table(table, world.folder / f"{name}.x", row_group_size=10)
        elif kind == "gz":
            world.write(f"{name}.x.gz", gzip.compress(ndjson(start, stop).encode()))
        else:
            world.write(f"{name}.x", csv_lines(start, stop) if kind == "csv" else ndjson(start, stop))
    make = lambda: world.source("*.x.gz" if kind == "gz" else "*.x", **options)  # noqa: E731
    check_all_positions(make, in_pieces(read(make())))


def follow(world: Any, pattern: str, *steps: Callable[[], object]) -> list[Chunk]:
    """What a followed source delivers while these steps happen, one each time it has nothing to read."""

    class Done(Exception):
        pass

    def on_sleep(count: int) -> None:
        if count <= len(steps):
            steps[count - 1]()
        elif count > len(steps) + 6:
            raise Done

    world.on_sleep = on_sleep
    world.slept.clear()
    chunks: list[Chunk] = []

    async def run() -> None:
        try:
            async for chunk in world.source(pattern, follow=True, format="ndjson").chunks(None):
                chunks.append(chunk)
        except Done:
            pass

    asyncio.run(run())
    return chunks


@pytest.mark.nightly
def test_files_that_are_followed_together(world: Any, ndjson: Any) -> None:
    world.write("a.log", ndjson(0, 20))
    world.write("b.log", ndjson(100, 120))
    chunks = follow(
        world,
        "*.log",
        lambda: world.append("a.log", ndjson(20, 23)),
        lambda: world.append("b.log", ndjson(120, 140)),
        lambda: world.write("c.log", ndjson(200, 205)),
    )
    assert len(values(chunks)) == 68
    world.append("a.log", ndjson(23, 40))  # after the boundary: live
    check_all_positions(lambda: world.source("*.log", follow=True, format="ndjson"), in_pieces(chunks, 9))


def test_the_oldest_records_of_followed_files_come_first(world: Any, ndjson: Any) -> None:
    world.write("new.log", ndjson(100, 200))
    world.write("old.log", ndjson(0, 100))
    chunks = follow(world, "*.log", *[lambda: None] * 20)
    again = read_again(world.source("*.log", follow=True, format="ndjson"), chunks[-1].end or {})
    found = [n for chunk in again for n in chunk.batch.column("distance").to_pylist()]
    assert sorted(found) == list(range(200))
    assert found.index(150) > found.index(99), "only the first block of each file may come before its turn"


@pytest.mark.slow
def test_compressed_files_that_are_followed(world: Any, ndjson: Any) -> None:
    world.write("a.log.gz", gzip.compress(ndjson(0, 20).encode()))
    world.write("b.log.gz", gzip.compress(ndjson(20, 40).encode()))
    chunks = follow(world, "*.log.gz", *[lambda: None] * 20)
    assert values(chunks) == list(range(40))
    check_all_positions(lambda: world.source("*.log.gz", follow=True, format="ndjson"), in_pieces(chunks, 9))


@pytest.mark.parametrize("style", ["rename", "compress", "copytruncate"])
def test_rotated_files(world: Any, ndjson: Any, style: str) -> None:
    world.write("a.log", ndjson(0, 40))
    rotated = {
        "rename": lambda: (world.folder / "a.log").rename(world.folder / "a.log.1"),
        "compress": lambda: (
            world.write("a.log.1.gz", gzip.compress((world.folder / "a.log").read_bytes())),
            (world.folder / "a.log").unlink(),
        ),
        "copytruncate": lambda: (
            world.write("a.log.1", (world.folder / "a.log").read_bytes()),
            world.write("a.log", ""),
        ),
    }[style]
    steps = [lambda: None, rotated, lambda: None, lambda: world.write("a.log", ndjson(40, 60)), *[lambda: None] * 4]
    chunks = follow(world, "a.log*", *steps)
    assert values(chunks) == list(range(60))
    assert values(read_again(world.source("a.log*", follow=True, format="ndjson"), chunks[-1].end or {})) == list(
        range(60)
    )


def test_what_is_gone_is_left_out_and_the_rest_is_read(world: Any, read: Any, ndjson: Any) -> None:
    for name, start in (("a.log", 0), ("b.log", 20), ("c.log", 40)):
        world.write(name, ndjson(start, start + 20))
    once, followed = read(world.source("*.log", format="ndjson")), follow(world, "*.log")
    Path(world.folder / "a.log").unlink()
    world.write("b.log", ndjson(900, 930))
    assert values(read_again(world.source("*.log", follow=True, format="ndjson"), followed[-1].end or {})) == list(
        range(40, 60)
    )
    # A file that was read once is known by its name.
    assert values(read_again(world.source("*.log", format="ndjson"), once[-1].end or {})) == [
        *range(40, 60),
        *range(900, 930),
    ]
