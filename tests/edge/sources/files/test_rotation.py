"""Every style of log rotation on real files: each record exactly once, or the loss is stated."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from edge.sources.files import follower as follow
from tests.edge.sources.files.test_follower import follow_through, reasons


def losses(chunks: list[Any]) -> list[str]:
    return [str(loss) for chunk in chunks for loss in chunk.losses]


def reread(world: Any, pattern: str, chunks: list[Any]) -> None:
    """Every chunk can be read again, as recovery does it, while its file is there in any form."""
    source = world.source(pattern, follow=True, format="ndjson")
    for chunk in chunks:
        assert source.reread(chunk.start, chunk.end).batch.equals(chunk.batch)


NOTHING = [lambda: None]


@pytest.mark.parametrize("pattern", ["app.log", "app.log*"])
def test_a_writer_that_goes_on_after_the_rename_is_followed(
    world: Any, ndjson: Any, numbers: Any, pattern: str
) -> None:
    log = world.write("app.log", ndjson(0, 5))
    writer = log.open("a")

    def rotate() -> None:
        log.rename(world.folder / "app.log.1")
        world.write("app.log", ndjson(100, 105))

    def write_on(n: int) -> Any:
        def step() -> None:
            world.now_ms += 1_000
            writer.write(ndjson(n, n + 1))
            writer.flush()

        return step

    steps = [rotate, *(write_on(n) for n in range(5, 15)), writer.close, *NOTHING * 4]
    chunks = follow_through(world, pattern, *steps, format="ndjson")
    assert sorted(numbers(chunks)) == [*range(15), *range(100, 105)]
    assert losses(chunks) == reasons(chunks) == []
    reread(world, pattern, chunks)


def test_a_renamed_file_is_found_again_when_a_writer_goes_on_after_a_long_silence(
    world: Any, ndjson: Any, numbers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "has_writer", lambda descriptor: None)  # an agent that may not ask
    log = world.write("app.log", ndjson(0, 5))

    def silence() -> None:
        world.now_ms += 120_000

    steps = [lambda: log.rename(world.folder / "app.log.1"), *NOTHING, silence, *NOTHING * 2]
    chunks = follow_through(
        world, "app.log", *steps, lambda: world.append("app.log.1", ndjson(5, 8)), *NOTHING, format="ndjson"
    )
    assert any("ended" in chunk.end for chunk in chunks), "it was closed meanwhile"
    assert numbers(chunks) == list(range(8))


@pytest.mark.parametrize(("seconds", "closed"), [(3, False), (6, True)])
def test_rotate_wait_is_how_long_a_silent_writer_is_waited_for(
    world: Any, ndjson: Any, monkeypatch: pytest.MonkeyPatch, seconds: int, closed: bool
) -> None:
    monkeypatch.setattr(follow, "has_writer", lambda descriptor: None)
    log = world.write("app.log", ndjson(0, 5))
    polls = NOTHING * 4 * seconds
    chunks = follow_through(world, "app.log", log.unlink, *polls, format="ndjson", rotate_wait="5s")
    assert any(chunk.end.get("ended") for chunk in chunks) is closed
    assert [chunk.input_gone for chunk in chunks] == [False, True, True][: 2 + closed], "nothing can be read again"
    assert losses(chunks) == [], "nobody is known to write on"


def test_a_deleted_file_that_is_still_written_to_when_it_is_closed_is_a_stated_loss(world: Any, ndjson: Any) -> None:
    log = world.write("app.log", ndjson(0, 5))
    writer = log.open("a")

    def silence() -> None:
        world.now_ms += 61_000

    chunks = follow_through(world, "app.log", log.unlink, *NOTHING, silence, *NOTHING * 2, format="ndjson")
    writer.close()
    assert losses(chunks) == ["file-gone"]


@pytest.mark.parametrize("pattern", ["app.log", "app.log*"])
@pytest.mark.parametrize("same_head", [False, True])
def test_copytruncate_and_growth_beyond_the_old_size_within_a_poll(
    world: Any, ndjson: Any, numbers: Any, pattern: str, same_head: bool
) -> None:
    header = "#" * 300 + "\n" if same_head else ""
    log = world.write("app.log", header + ndjson(0, 1000))

    def rotate() -> None:
        world.append("app.log", ndjson(1000, 1500))  # not read before the truncation
        shutil.copy(log, world.folder / "app.log.1")
        with log.open("r+") as file:
            file.truncate(0)
            file.write(header + ndjson(2000, 4000))

    chunks = follow_through(world, pattern, rotate, *NOTHING * 4, format="ndjson")
    assert sorted(numbers(chunks)) == [*range(1500), *range(2000, 4000)], "the copy has what was not read"
    assert losses(chunks) == ["file-truncated"], "what came between the copy and the truncation is nowhere"
    assert [c.input_gone for c in chunks if c.losses] == [True]
    reread(world, pattern, chunks)
    again = follow_through(world, pattern, position=chunks[-1].end, format="ndjson")
    assert numbers(again) == [] and losses(again) == []


def test_truncation_without_a_copy_is_a_stated_loss(world: Any, ndjson: Any, numbers: Any) -> None:
    log = world.write("app.log", ndjson(0, 1500))

    def truncated() -> None:
        with log.open("r+") as file:
            file.truncate(0)
            file.write(ndjson(1500, 3500))

    chunks = follow_through(world, "app.log", truncated, format="ndjson")
    assert numbers(chunks) == list(range(3500))
    assert (losses(chunks), reasons(chunks)) == (["file-truncated"], ["file-truncated"])


def test_a_copy_that_is_still_being_written_is_not_read(world: Any, ndjson: Any, numbers: Any) -> None:
    data = ndjson(0, 1000)
    log = world.write("app.log", data)

    def truncated() -> None:
        world.append("app.log.1", data[20_000:])
        log.write_text(ndjson(1000, 1001))

    steps = [
        lambda: world.write("app.log.1", ""),
        lambda: world.append("app.log.1", data[:5_000]),
        lambda: world.append("app.log.1", data[5_000:20_000]),
        truncated,
    ]
    chunks = follow_through(world, "app.log*", *steps, *NOTHING * 2, format="ndjson")
    assert sorted(numbers(chunks)) == list(range(1001))


def test_a_new_file_with_the_same_header_is_another_file(world: Any, numbers: Any) -> None:
    header = ",".join(["t", "carrier", "distance", "delay", "late", "x" * 300]) + "\n"
    world.write("a.csv", header + "".join(f"17000000000{n:02d},AA,{n},,,\n" for n in range(50)))
    chunks = follow_through(
        world,
        "*.csv",
        lambda: world.write("b.csv", header),
        lambda: world.append("b.csv", "1700000000099,AA,99,,,\n"),
        *NOTHING,
    )
    assert numbers(chunks) == [*range(50), 99]


def test_a_file_that_is_the_beginning_of_another_one_is_read_in_the_end(world: Any, ndjson: Any, numbers: Any) -> None:
    world.write("a.log", ndjson(0, 2))

    def later() -> None:
        world.now_ms += 6_000

    chunks = follow_through(
        world, "*.log", lambda: world.write("b.log", ndjson(0, 1)), later, *NOTHING, format="ndjson"
    )
    assert numbers(chunks) == [0, 1, 0]


def compress(path: Path) -> None:
    """As `gzip` does it: the compressed file is complete before the other one is deleted."""
    Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


@pytest.mark.parametrize("pattern", ["app.log", "app.log*"])
@pytest.mark.parametrize("delay", [0, 4], ids=["at once", "later"])
def test_a_compressed_rotated_file_is_not_read_twice(
    world: Any, ndjson: Any, numbers: Any, pattern: str, delay: int
) -> None:
    log, rotated = world.write("app.log", ndjson(0, 100)), world.folder / "app.log.1"

    def rotate() -> None:
        world.append("app.log", ndjson(100, 120))
        log.rename(rotated)
        world.write("app.log", ndjson(200, 300))
        if not delay:
            compress(rotated)

    more = [] if not delay else [*NOTHING * delay, lambda: compress(rotated)]
    chunks = follow_through(world, pattern, rotate, *more, *NOTHING * 6, format="ndjson")
    assert sorted(numbers(chunks)) == [*range(120), *range(200, 300)]
    assert losses(chunks) == reasons(chunks) == []
    reread(world, pattern, chunks)
    again = follow_through(world, pattern, *NOTHING * 4, position=chunks[-1].end, format="ndjson")
    assert numbers(again) == [] and losses(again) == []


@pytest.mark.parametrize("pattern", ["app.log", "app.log*"])
def test_a_file_that_was_compressed_while_the_agent_was_down_is_read_further(
    world: Any, ndjson: Any, numbers: Any, pattern: str
) -> None:
    log = world.write("app.log", ndjson(0, 100))
    chunks = follow_through(world, pattern, format="ndjson")
    world.append("app.log", ndjson(100, 150))
    held = log.open("rb")  # keeps the inode from being given to the next file
    log.rename(world.folder / "app.log.1")
    compress(world.folder / "app.log.1")
    world.write("app.log", ndjson(200, 300))
    more = follow_through(world, pattern, *NOTHING * 4, position=chunks[-1].end, format="ndjson")
    held.close()
    assert sorted(numbers(more)) == [*range(100, 150), *range(200, 300)]
    assert losses(more) == reasons(more) == []


@pytest.mark.parametrize("pattern", ["app.log", "app.log*"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "compressed"])
def test_a_file_that_was_created_and_rotated_while_the_agent_was_down_is_read(
    world: Any, ndjson: Any, numbers: Any, pattern: str, packed: bool
) -> None:
    """Two rotations in one absence, numbered as by logrotate: the file between them was never under its name."""
    older = world.write("app.log.1", ndjson(900, 950))
    os.utime(older, (1, 1))
    log = world.write("app.log", ndjson(0, 100))
    first = follow_through(world, "app.log", format="ndjson")
    world.append("app.log", ndjson(100, 150))
    os.utime(log, (10, 10))
    older.rename(world.folder / "app.log.3")
    log.rename(world.folder / "app.log.2")
    between = world.write("app.log.1", ndjson(200, 300))
    os.utime(between, (20, 20))
    if packed:
        compress(between)
        os.utime(f"{between}.gz", (20, 20))
    world.write("app.log", ndjson(300, 400))
    more = follow_through(world, "app.log", *NOTHING * 4, position=first[-1].end, format="ndjson")
    if packed:  # it is read once it has not changed for a round
        assert sorted(numbers(more)) == [*range(100, 150), *range(200, 400)]
    else:
        assert numbers(more) == [*range(100, 150), *range(200, 400)], "in the order in which they were written"
    assert losses(more) == reasons(more) == []
    reread(world, "app.log", more)
    again = follow_through(world, pattern, *NOTHING * 4, position=more[-1].end, format="ndjson")
    assert [n for n in numbers(again) if n < 900] == [] and losses(again) == []


def test_another_file_of_the_same_inode_and_the_same_head_is_read_from_its_beginning(
    world: Any, ndjson: Any, numbers: Any
) -> None:
    head = ndjson(0, 1) + "#" * 256 + "\n"
    log = world.write("app.log", head + ndjson(1, 100))
    chunks = follow_through(world, "app.log", format="ndjson")
    inode = log.stat().st_ino
    log.write_text(head + ndjson(100, 400))  # what a reused inode looks like
    assert log.stat().st_ino == inode
    more = follow_through(world, "app.log", position=chunks[-1].end, format="ndjson")
    assert numbers(more) == [0, *range(100, 400)]
    assert losses(more) == ["file-truncated"], "it may also have been truncated"


def test_a_file_that_disappears_and_comes_back_is_read_further(world: Any, ndjson: Any, numbers: Any) -> None:
    log, away = world.write("app.log", ndjson(0, 100)), world.folder.parent / "away.log"
    chunks = follow_through(world, "app.log", format="ndjson")
    log.rename(away)  # a file system that is not mounted yet

    def back() -> None:
        away.rename(log)
        world.append("app.log", ndjson(100, 150))

    more = follow_through(world, "app.log", back, *NOTHING, position=chunks[-1].end, format="ndjson")
    assert losses(more) == ["file-gone"], "nobody knew that it would come back"
    assert numbers(more) == list(range(100, 150))


def test_leaving_files_are_bounded(world: Any, ndjson: Any, numbers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "has_writer", lambda descriptor: None)
    monkeypatch.setattr(follow, "MAX_LEAVING_FILES", 2)

    def rotate(n: int) -> Any:
        def step() -> None:
            if n:
                (world.folder / "app.log").rename(world.folder / f"app.{n}")
            world.write("app.log", ndjson(n, n + 1))

        return step

    steps = [step for n in range(10) for step in (rotate(n), *NOTHING * 3)]
    chunks = follow_through(world, "app.log", *steps, format="ndjson")
    assert sorted(numbers(chunks)) == list(range(10))
    assert len(chunks[-1].end["others"]) <= 1 + 2 + follow.MIN_RELEASED_FILES


@pytest.mark.slow
def test_a_compressed_file_that_ended_too_early_is_read_further_when_it_is_complete(
    world: Any, ndjson: Any, numbers: Any
) -> None:
    packed = gzip.compress("".join(ndjson(n, n + 1) for n in range(20_000)).encode())
    path = world.write("a.gz", packed[: len(packed) // 2])
    idle = NOTHING * 4
    chunks = follow_through(world, "*.gz", *idle, lambda: path.write_bytes(packed), *idle, format="ndjson")
    assert numbers(chunks) == list(range(20_000))
    assert losses(chunks) == ["file-damaged"], "nobody knew that it would be completed"


def test_a_file_that_was_created_and_rotated_between_two_polls_is_read(world: Any, ndjson: Any, numbers: Any) -> None:
    log = world.write("app.log", ndjson(0, 5))

    def rotate_twice() -> None:
        log.rename(world.folder / "app.log.2")
        between = world.write("app.log", ndjson(5, 10))
        between.rename(world.folder / "app.log.1")
        world.write("app.log", ndjson(10, 15))

    chunks = follow_through(world, "app.log", rotate_twice, *NOTHING * 4, format="ndjson")
    assert sorted(numbers(chunks)) == list(range(15))


HEADER = ",".join(["t", "carrier", "distance", "delay", "late", "x" * 300]) + "\n"


def rows(start: int, stop: int) -> str:
    return "".join(f"17000000000{n:02d},AA,{n},,,\n" for n in range(start, stop))


def test_a_file_of_which_only_the_header_was_read_hides_no_other_one(world: Any, numbers: Any) -> None:
    world.write("a.csv", HEADER)
    chunks = follow_through(
        world,
        "*.csv",
        lambda: world.append("a.csv", rows(0, 1)),
        lambda: world.write("b.csv", HEADER + rows(0, 1) + rows(5, 10)),
        lambda: world.write("c.csv", HEADER + rows(10, 15)),
        (world.folder / "a.csv").unlink,
        *NOTHING * 4,
        lambda: world.write("d.csv", HEADER + rows(15, 20)),
        *NOTHING,
    )
    assert sorted(numbers(chunks)) == [0, 0, *range(5, 20)]


def test_a_file_of_another_program_is_not_taken_for_a_copy(world: Any, numbers: Any) -> None:
    log = world.write("app.csv", HEADER)
    world.write("other.csv", HEADER + rows(50, 60))
    chunks = follow_through(
        world, "app.csv", lambda: world.append("app.csv", rows(0, 1)), lambda: log.write_text(""), *NOTHING
    )
    assert numbers(chunks) == [0]
