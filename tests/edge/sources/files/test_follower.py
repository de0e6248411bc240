"""FollowedFiles files: appended to, renamed, cut, deleted, while they are read and between two runs."""

import gzip
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from edge.sources.files import follower as follow
from edgewater.base.errors import InvalidConfig
from tests.edge.conftest import ARRIVAL_MS
from tests.refusals import refused


class Script:
    """Does one step each time the source has found nothing and sleeps; the last ends the reading."""

    def __init__(self, world: Any, *steps: Any) -> None:
        self.world = world
        self.steps = steps
        world.on_sleep = self
        self.done_after = len(steps)

    def __call__(self, count: int) -> None:
        if count <= len(self.steps):
            self.steps[count - 1]()
        elif count > len(self.steps) + 4:
            raise EndOfScript


class EndOfScript(Exception):
    pass


def follow_through(world: Any, pattern: str, *steps: Any, position: Any = None, **options: Any) -> list[Any]:
    import asyncio

    Script(world, *steps)
    world.slept.clear()
    chunks: list[Any] = []

    async def run() -> None:
        try:
            async for chunk in world.source(pattern, follow=True, **options).chunks(position):
                chunks.append(chunk)
        except EndOfScript:
            pass

    asyncio.run(run())
    return chunks


def losses(chunks: list[Any]) -> list[str]:
    return [str(loss) for chunk in chunks for loss in chunk.losses]


def reasons(chunks: list[Any]) -> list[str]:
    return [r.reason for chunk in chunks for r in chunk.rejected]


def test_appended_lines_and_new_files_are_read_as_they_come(world: Any, ndjson: Any, numbers: Any) -> None:
    world.write("a.log", ndjson(0, 2))
    chunks = follow_through(
        world,
        "*.log",
        lambda: world.append("a.log", ndjson(2, 4)),
        lambda: world.write("b.log", ndjson(4, 5)),
        lambda: world.append("a.log", ndjson(5, 6)),
        format="ndjson",
    )
    assert numbers(chunks) == [0, 1, 2, 3, 4, 5]


def test_following_waits_for_a_first_file_and_sleeps_between_two_looks(world: Any, ndjson: Any, numbers: Any) -> None:
    chunks = follow_through(world, "*.log", lambda: world.write("a.log", ndjson(0, 1)), format="ndjson")
    assert numbers(chunks) == [0]
    assert min(world.slept) > 0


def test_a_partial_last_line_is_waited_for(world: Any, ndjson: Any, numbers: Any) -> None:
    line = ndjson(1, 2)
    world.write("a.log", ndjson(0, 1) + line[:9])
    seen: list[list[int]] = []
    chunks = follow_through(
        world, "a.log", lambda: None, lambda: world.append("a.log", line[9:]), format="ndjson"
    )  # fmt: skip
    seen = [chunk.batch.column("distance").to_pylist() for chunk in chunks]
    assert seen == [[0], [1]]
    assert reasons(chunks) == []


def test_a_renamed_file_is_finished_before_the_new_one_begins(world: Any, ndjson: Any, numbers: Any) -> None:
    log = world.write("app.log", ndjson(0, 2))

    def rotate() -> None:
        world.append("app.log", ndjson(2, 4))
        log.rename(world.folder / "app.log.1")
        world.write("app.log", ndjson(5, 7))

    def late_writer() -> None:
        world.append("app.log.1", ndjson(4, 5).rstrip("\n"))

    chunks = follow_through(world, "app.log", rotate, late_writer, format="ndjson")
    assert numbers(chunks) == [0, 1, 2, 3, 5, 6, 4]
    assert reasons(chunks) == []


def test_a_file_renamed_inside_the_pattern_is_not_read_twice(world: Any, ndjson: Any, numbers: Any) -> None:
    log = world.write("app.log", ndjson(0, 2))

    def rotate() -> None:
        log.rename(world.folder / "app.log.1")
        world.write("app.log", ndjson(2, 3))

    chunks = follow_through(world, "app.log*", rotate, format="ndjson")
    assert sorted(numbers(chunks)) == [0, 1, 2]
    more = follow_through(world, "app.log*", position=chunks[-1].end, format="ndjson")
    assert numbers(more) == []


def test_rotation_while_the_agent_is_down_loses_nothing(world: Any, ndjson: Any, numbers: Any) -> None:
    log = world.write("app.log", ndjson(0, 2))
    chunks = follow_through(world, "app.log", format="ndjson")
    world.append("app.log", ndjson(2, 4))
    log.rename(world.folder / "app.log.1")
    world.write("app.log", ndjson(4, 6))
    more = follow_through(world, "app.log", position=chunks[-1].end, format="ndjson")
    assert numbers(more) == [2, 3, 4, 5]
    assert reasons(more) == []
    again = follow_through(world, "app.log", position=more[-1].end, format="ndjson")
    assert numbers(again) == []
    assert reasons(again) == []


def test_a_rotated_file_that_was_deleted_unread_is_said_to_be_gone(world: Any, ndjson: Any, numbers: Any) -> None:
    log = world.write("app.log", ndjson(0, 2))
    chunks = follow_through(world, "app.log", format="ndjson")
    held = log.open("rb")  # keeps the inode from being given to the next file
    log.unlink()
    world.write("app.log", ndjson(4, 6))
    more = follow_through(world, "app.log", position=chunks[-1].end, format="ndjson")
    held.close()
    assert reasons(more) == ["file-gone"]
    assert numbers(more) == [4, 5]


def test_a_rotated_file_deleted_after_its_end_was_seen_is_not_missed(world: Any, ndjson: Any, numbers: Any) -> None:
    log = world.write("app.log", ndjson(0, 2))

    def rotate() -> None:
        log.rename(world.folder / "app.log.1")
        world.write("app.log", ndjson(2, 3))

    chunks = follow_through(world, "app.log", rotate, format="ndjson")
    (world.folder / "app.log.1").unlink()
    assert follow_through(world, "app.log", position=chunks[-1].end, format="ndjson") == []


def test_a_file_that_was_cut_is_read_from_its_beginning_and_it_is_said(world: Any, ndjson: Any, numbers: Any) -> None:
    world.write("a.log", ndjson(0, 5))
    chunks = follow_through(world, "a.log", lambda: world.write("a.log", ndjson(5, 6)), format="ndjson")
    assert numbers(chunks) == [0, 1, 2, 3, 4, 5]
    assert reasons(chunks) == ["file-truncated"]
    again = world.source("a.log", follow=True, format="ndjson")
    assert again.reread(chunks[-1].start, chunks[-1].end).batch.equals(chunks[-1].batch)
    assert again.reread(chunks[1].start, chunks[1].end).rejected == chunks[1].rejected


def test_a_file_that_was_cut_while_the_agent_was_down_is_noticed_by_its_head(
    world: Any, ndjson: Any, numbers: Any
) -> None:
    world.write("a.log", ndjson(0, 5))
    chunks = follow_through(world, "a.log", format="ndjson")
    world.write("a.log", ndjson(100, 120))  # the same inode, and longer than before
    more = follow_through(world, "a.log", position=chunks[-1].end, format="ndjson")
    assert reasons(more) == ["file-truncated"]
    assert numbers(more) == list(range(100, 120))
    assert follow_through(world, "a.log", position=more[-1].end, format="ndjson") == []


@pytest.mark.parametrize("stop_after", range(5))
def test_the_position_of_any_chunk_knows_all_files(world: Any, ndjson: Any, numbers: Any, stop_after: int) -> None:
    for name, start in (("a.log", 0), ("b.log", 10), ("c.log", 20)):
        world.write(name, ndjson(start, start + 2))
    steps = (lambda: world.append("a.log", ndjson(2, 3)), lambda: world.append("c.log", ndjson(22, 23)))
    chunks = follow_through(world, "*.log", *steps, format="ndjson")
    assert len(chunks) == 5
    world.append("b.log", ndjson(12, 13))
    more = follow_through(world, "*.log", position=chunks[stop_after].end, format="ndjson")
    everything = [*chunks[: stop_after + 1], *more]
    assert sorted(numbers(everything)) == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert reasons(everything) == []
    source = world.source("*.log", follow=True, format="ndjson")
    for chunk in everything:
        assert source.reread(chunk.start, chunk.end).batch.equals(chunk.batch)


def test_a_gz_that_is_still_being_written_is_waited_for(world: Any, ndjson: Any, numbers: Any) -> None:
    packed = gzip.compress(ndjson(0, 100).encode())
    chunks = follow_through(
        world,
        "*.gz",
        lambda: world.write("a.gz", packed[:100]),
        lambda: world.write("a.gz", packed[:200]),
        lambda: world.write("a.gz", packed),
        format="ndjson",
    )
    assert numbers(chunks) == list(range(100))
    assert reasons(chunks) == []
    assert follow_through(world, "*.gz", position=chunks[-1].end, format="ndjson") == []


def test_a_header_is_waited_for_like_a_record(world: Any, numbers: Any) -> None:
    world.write("a.csv", "t,carrier,dist")
    chunks = follow_through(
        world,
        "a.csv",
        lambda: world.append("a.csv", "ance,delay,late\n"),
        lambda: world.append("a.csv", "1700000000000,AA,7,,\n"),
    )
    assert numbers(chunks) == [7]


def test_too_many_files_are_refused(world: Any, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MAX_FOLLOWED_FILES", 1)
    world.write("a.log", "")
    world.write("b.log", "")
    with refused(InvalidConfig, "file.path"):
        read(world.source("*.log", follow=True, format="ndjson"))


def test_another_file_in_the_place_of_one_that_has_ended_is_read(world: Any, ndjson: Any, numbers: Any) -> None:
    first = world.write("a.ndjson.gz", gzip.compress(ndjson(0, 2).encode()))

    def replaced() -> None:  # what an inode that is given away again looks like
        first.write_bytes(gzip.compress(ndjson(5, 9).encode()))
        first.rename(world.folder / "b.ndjson.gz")

    nothing = [lambda: None] * 3
    chunks = follow_through(world, "*.ndjson.gz", *nothing, replaced, *nothing, format="ndjson")
    assert numbers(chunks) == [0, 1, 5, 6, 7, 8]


def test_a_whole_file_is_known_by_its_format_and_not_by_its_name(world: Any, ndjson: Any, numbers: Any) -> None:
    packed = gzip.compress(ndjson(0, 100).encode())
    written = world.write("data.part", packed[:60])
    steps = [lambda: written.write_bytes(packed), *[lambda: None] * 4]
    chunks = follow_through(world, "*.part", *steps, format="ndjson", compression="gzip")
    assert numbers(chunks) == list(range(100))
    assert reasons(chunks) == []


def test_a_file_that_could_not_be_read_is_read_once_it_is_whole(world: Any, ndjson: Any, numbers: Any) -> None:
    packed = gzip.compress(ndjson(0, 5).encode())
    slow = world.write("a.ndjson.gz", packed[:4])  # its writer pauses longer than the source waits
    nothing = [lambda: None] * 4
    chunks = follow_through(
        world, "*.gz", *nothing, lambda: slow.write_bytes(packed), *nothing, format="ndjson"
    )  # fmt: skip
    assert numbers(chunks) == [0, 1, 2, 3, 4]
    assert len(reasons(chunks)) == 1


def test_a_file_that_is_copied_anew_over_itself_is_not_read_twice(world: Any, ndjson: Any, numbers: Any) -> None:
    packed = gzip.compress(ndjson(0, 50).encode(), mtime=0)
    path = world.write("a.ndjson.gz", packed)
    nothing = [lambda: None] * 3
    steps = [*nothing, lambda: path.write_bytes(packed[:9]), lambda: path.write_bytes(packed), *nothing]
    assert numbers(follow_through(world, "*.gz", *steps, format="ndjson")) == list(range(50))


def test_a_damaged_file_that_became_whole_while_nobody_looked_is_read(world: Any, ndjson: Any, numbers: Any) -> None:
    packed = gzip.compress(ndjson(0, 5).encode())
    path = world.write("a.ndjson.gz", packed[:4])
    nothing = [lambda: None] * 4
    before = follow_through(world, "*.gz", *nothing, format="ndjson")
    assert len(reasons(before)) == 1
    path.write_bytes(packed)
    assert numbers(follow_through(world, "*.gz", *nothing, position=before[-1].end, format="ndjson")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_file_that_does_not_match_the_stream_costs_only_itself_and_is_read_once_it_does(
    world: Any, numbers: Any, kind: str
) -> None:
    def write(name: str, distance: int, **more: Any) -> None:
        columns = {"t": [ARRIVAL_MS], "carrier": ["AA"], "distance": [distance], "delay": [1.5], "late": [True]} | more
        table = pa.table({column: values for column, values in columns.items() if values})
        to = world.folder / f"{name}.{kind}"
        pq.write_table(table, to) if kind == "parquet" else pa_csv.write_csv(table, to)

    write("a", 0)
    write("b", 1, delay=[])
    write("c", 2)
    chunks = follow_through(world, f"*.{kind}", *[lambda: None] * 3)
    assert numbers(chunks) == [0, 2]
    assert (reasons(chunks), losses(chunks)) == (["malformed"], ["file-damaged"])
    (note,) = (r for chunk in chunks for r in chunk.rejected)
    assert "b." in note.example and "delay" in note.message
    mended = [lambda: None, lambda: write("b", 1), *[lambda: None] * 3]
    assert numbers(follow_through(world, f"*.{kind}", *mended, position=chunks[-1].end)) == [1]
