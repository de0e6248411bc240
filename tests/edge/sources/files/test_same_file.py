"""Which bytes are the same file: what goes on, what is a copy on a guess, and what is read again on a guess."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edge.sources.files.position import FilePosition
from edgewater.base.errors import StorageError
from tests.edge.conftest import ARRIVAL_MS
from tests.edge.sources.files.test_follower import follow_through, reasons
from tests.edge.sources.files.test_rotation import NOTHING, losses, reread

WAIT = NOTHING * 24  # longer than the original of a copy is given to disappear


def guessed(chunks: list[Any]) -> dict[str, int]:
    return dict(Counter({g.reason: 0 for c in chunks for g in c.guessed}) + _counts(chunks))


def _counts(chunks: list[Any]) -> Counter[str]:
    result: Counter[str] = Counter()
    for guess in (g for chunk in chunks for g in chunk.guessed):
        assert sum(records for _, _, records in guess.spans) == guess.count, "every record has its time"
        result[guess.reason] += guess.count
    return result


def replaced(world: Any, name: str, data: str | bytes) -> Callable[[], None]:
    """As rsync, scp with mv, kubectl cp and cloud sync do it: a new file is renamed over the old one."""

    def step() -> None:
        world.write("." + name + ".Xy1", data).rename(world.folder / name)

    return step


@pytest.fixture
def two_disks(world: Any) -> Iterator[list[Path]]:
    disks = [world.folder / f"disk{n}" for n in (1, 2)]
    mounted: list[Path] = []
    try:
        for disk in disks:
            disk.mkdir()
            made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
            if made.returncode:
                pytest.skip("a tmpfs cannot be mounted")
            mounted.append(disk)
        yield disks
    finally:
        for disk in mounted:
            subprocess.run(["umount", disk], check=True)


def test_files_of_two_disks_are_two_files_even_if_their_inodes_are_equal(
    world: Any, ndjson: Any, numbers: Any, two_disks: list[Path]
) -> None:
    logs = [disk / "app.ndjson" for disk in two_disks]
    for n, log in enumerate(logs):
        log.write_text(ndjson(100 * n, 100 * n + 50))
    assert logs[0].stat().st_ino == logs[1].stat().st_ino
    chunks = follow_through(world, "disk*/app.ndjson", *NOTHING)
    assert sorted(numbers(chunks)) == [*range(50), *range(100, 150)]
    reread(world, "disk*/app.ndjson", chunks)
    with logs[1].open("a") as file:
        file.write(ndjson(150, 160))
    more = follow_through(world, "disk*/app.ndjson", *NOTHING, position=chunks[-1].end)
    assert numbers(more) == list(range(150, 160))
    assert losses(chunks + more) == reasons(chunks + more) == [] and guessed(chunks + more) == {}


@pytest.mark.parametrize("size", [1, 100], ids=["short", "long"])
@pytest.mark.parametrize("pause", [0, 24], ids=["at once", "later"])
def test_a_file_that_a_longer_version_replaces_goes_on(
    world: Any, ndjson: Any, numbers: Any, size: int, pause: int
) -> None:
    world.write("app.log", ndjson(0, size))
    steps = [step for n in range(1, 5) for step in (replaced(world, "app.log", ndjson(0, size + n)), *NOTHING * pause)]
    chunks = follow_through(world, "*.log", *steps, *NOTHING * 2, format="ndjson")
    assert numbers(chunks) == list(range(size + 4))
    assert losses(chunks) == reasons(chunks) == [] and guessed(chunks) == {}
    more = follow_through(world, "*.log", *WAIT, position=chunks[-1].end, format="ndjson")
    assert numbers(more) == [] and losses(more) == [] and guessed(more) == {}


def test_a_csv_export_that_grows_goes_on(world: Any, numbers: Any) -> None:
    header = "t,carrier,distance,delay,late\n"
    rows = [f"17000000000{n:02d},AA,{n},,\n" for n in range(40)]
    world.write("a.csv", header + "".join(rows[:10]))
    steps = [replaced(world, "a.csv", header + "".join(rows[:n])) for n in (20, 21, 40)]
    chunks = follow_through(world, "*.csv", *steps, *NOTHING)
    assert numbers(chunks) == list(range(40)) and losses(chunks) == [] and guessed(chunks) == {}


@pytest.mark.parametrize("in_place", [False, True])
def test_a_gz_that_is_written_anew_with_more_records_goes_on(
    world: Any, ndjson: Any, numbers: Any, in_place: bool
) -> None:
    packed = [gzip.compress(ndjson(0, n).encode(), level, mtime=n) for level, n in ((1, 50), (9, 80))]
    world.write("a.gz", packed[0])
    anew = (lambda: world.write("a.gz", packed[1])) if in_place else replaced(world, "a.gz", packed[1])
    chunks = follow_through(world, "*.gz", *NOTHING * 2, anew, *NOTHING * 6, format="ndjson")
    assert numbers(chunks) == list(range(80)) and losses(chunks) == [] and guessed(chunks) == {}


@pytest.mark.parametrize("old", [False, True], ids=["this release", "0.3.0"])
def test_a_file_that_is_replaced_between_two_runs_goes_on(world: Any, ndjson: Any, numbers: Any, old: bool) -> None:
    log = world.write("app.log", ndjson(0, 100))
    first = follow_through(world, "*.log", format="ndjson")
    position = dict(first[-1].end)
    if old:
        for name in ("device", "digest", "span"):
            del position[name]
        at = FilePosition.from_state(position)
        assert (at.device, at.digest, at.span) == (0, None, None)
        world.append("app.log", ndjson(100, 110))
        first += follow_through(world, "*.log", *NOTHING, position=position, format="ndjson")
        position = first[-1].end
    end = 110 if old else 100
    held = log.open("rb")  # keeps the inode from being given to the next file
    replaced(world, "app.log", ndjson(0, end + 50))()
    more = follow_through(world, "*.log", *NOTHING, position=position, format="ndjson")
    held.close()
    assert numbers(first + more) == list(range(end + 50))
    assert losses(more) == reasons(more) == [] and guessed(more) == {}


def test_a_recovery_reads_what_the_old_file_had_in_the_file_that_replaced_it(world: Any, ndjson: Any) -> None:
    log = world.write("app.log", ndjson(0, 100))
    chunks = follow_through(world, "*.log", lambda: world.append("app.log", ndjson(100, 120)), format="ndjson")
    held = log.open("rb")
    replaced(world, "app.log", ndjson(0, 130))()
    reread(world, "*.log", chunks)
    replaced(world, "app.log", ndjson(5, 135))()
    source = world.source("*.log", follow=True, format="ndjson")
    with pytest.raises(Exception, match=r"gone|overwritten"):
        source.reread(chunks[0].start, chunks[0].end)
    held.close()


def test_a_file_that_another_one_replaces_is_read_again_on_a_guess(world: Any, ndjson: Any, numbers: Any) -> None:
    """A row was corrected, or the beginning was trimmed: the rows may be the old ones, and they have the old times."""
    world.write("app.log", ndjson(0, 100))
    chunks = follow_through(world, "*.log", replaced(world, "app.log", ndjson(50, 130)), *NOTHING, format="ndjson")
    assert sorted(numbers(chunks)) == sorted([*range(100), *range(50, 130)])
    assert guessed(chunks) == {"read-again": 50}, "the truth lies between 130 and 180"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_file_that_is_written_over_itself_is_read_again_on_a_guess(
    world: Any, ndjson: Any, numbers: Any, restarted: bool
) -> None:
    log = world.write("app.log", ndjson(0, 1000))

    def trim() -> None:
        log.write_text(ndjson(900, 1000))

    if restarted:
        first = follow_through(world, "*.log", format="ndjson")
        trim()
        chunks = first + follow_through(world, "*.log", *NOTHING, position=first[-1].end, format="ndjson")
    else:
        chunks = follow_through(world, "*.log", trim, *NOTHING, format="ndjson")
    assert numbers(chunks) == [*range(1000), *range(900, 1000)]
    assert (losses(chunks), guessed(chunks)) == (["file-truncated"], {"read-again": 100})


@pytest.mark.parametrize("restarted", [False, True])
def test_a_change_in_the_middle_of_a_short_file_is_read_again_on_a_guess(
    world: Any, ndjson: Any, numbers: Any, restarted: bool
) -> None:
    """An editor has changed a record, or another device has written a file of the same size into its place."""
    log = world.write("app.log", ndjson(100, 200))
    edited = ndjson(100, 150) + ndjson(151, 152) + ndjson(151, 200)

    def edit() -> None:
        with log.open("r+") as file:
            file.write(edited)
        os.utime(log, (1, 1))

    if restarted:
        first = follow_through(world, "*.log", format="ndjson")
        edit()
        chunks = first + follow_through(world, "*.log", *NOTHING, position=first[-1].end, format="ndjson")
    else:
        chunks = follow_through(world, "*.log", edit, *NOTHING, format="ndjson")
    assert numbers(chunks) == [*range(100, 200), *range(100, 150), 151, *range(151, 200)]
    assert (losses(chunks), guessed(chunks)) == (["file-truncated"], {"read-again": 100})


@pytest.mark.parametrize("again", [False, True])
def test_a_deleted_file_and_a_new_one_of_its_name(world: Any, ndjson: Any, numbers: Any, again: bool) -> None:
    log = world.write("app.log", ndjson(0, 100))
    new = ndjson(40, 100) if again else ndjson(100, 160)
    steps = [log.unlink, *NOTHING * 4, lambda: world.write("app.log", new)]
    chunks = follow_through(world, "*.log", *steps, *NOTHING, format="ndjson")
    assert numbers(chunks) == [*range(100), *(range(40, 100) if again else range(100, 160))]
    assert guessed(chunks) == ({"read-again": 60} if again else {})


def test_a_shorter_version_is_assumed_to_repeat_the_file(world: Any, ndjson: Any, numbers: Any) -> None:
    world.write("app.log", ndjson(0, 100))
    chunks = follow_through(world, "*.log", replaced(world, "app.log", ndjson(0, 60)), *WAIT, format="ndjson")
    assert numbers(chunks) == list(range(100)) and guessed(chunks) == {"assumed-copy": 60}


def test_an_equal_file_is_left_out_on_a_guess_until_it_differs(world: Any, ndjson: Any, numbers: Any) -> None:
    """Two meters that stand still have equal files, and so have a file and its copy."""
    world.write("north.log", ndjson(0, 100))

    def both(start: int, end: int) -> Callable[[], None]:
        return lambda: [world.append(name, ndjson(start, end)) for name in ("north.log", "south.log")] and None

    steps = [lambda: world.write("south.log", ndjson(0, 100)), *WAIT, both(100, 110), *NOTHING, both(110, 115)]
    chunks = follow_through(world, "*.log", *steps, *NOTHING, format="ndjson")
    assert numbers(chunks) == list(range(115))
    assert guessed(chunks) == {"assumed-copy": 115} and losses(chunks) == []
    assert all(chunk.batch.num_rows == 0 for chunk in chunks if chunk.guessed)
    reread(world, "*.log", chunks)
    differs = lambda: world.append("south.log", ndjson(500, 510))  # noqa: E731
    more = follow_through(world, "*.log", differs, *NOTHING, position=chunks[-1].end, format="ndjson")
    assert numbers(more) == list(range(500, 510)) and guessed(more) == {}


@pytest.mark.parametrize("longer", [False, True])
def test_files_that_are_there_at_the_first_start_are_compared_too(
    world: Any, ndjson: Any, numbers: Any, longer: bool
) -> None:
    world.write("a.log", ndjson(0, 100))
    world.write("b.log", ndjson(0, 150 if longer else 100))
    world.write("c.log", ndjson(1000, 1100))
    chunks = follow_through(world, "*.log", *WAIT, format="ndjson")
    if longer:
        assert sorted(numbers(chunks)) == sorted([*range(100), *range(150), *range(1000, 1100)])
        assert guessed(chunks) == {"read-again": 100}
    else:
        assert sorted(numbers(chunks)) == [*range(100), *range(1000, 1100)]
        assert guessed(chunks) == {"assumed-copy": 100}


def test_a_file_keeps_its_identity_when_its_device_gets_another_number(world: Any, ndjson: Any, numbers: Any) -> None:
    """A file system that is mounted again, or a new start of the machine."""
    world.write("app.log", ndjson(0, 100))
    first = follow_through(world, "*.log", format="ndjson")
    world.append("app.log", ndjson(100, 150))
    position = {**first[-1].end, "device": first[-1].end["device"] + 1}
    more = follow_through(world, "*.log", *NOTHING, position=position, format="ndjson")
    assert numbers(more) == list(range(100, 150)) and losses(more) == [] and guessed(more) == {}


def test_a_copy_that_is_read_by_halves_before_a_restart_stays_left_out(
    world: Any, ndjson: Any, numbers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edge.codecs.formats import TextFormat

    monkeypatch.setattr(TextFormat.blocks, "__defaults__", (1000,))
    world.write("north.log", ndjson(0, 100))
    chunks = follow_through(
        world, "*.log", lambda: world.write("south.log", ndjson(0, 100)), *WAIT, *WAIT, format="ndjson"
    )
    aside = [n for n, chunk in enumerate(chunks) if chunk.guessed]
    assert len(aside) > 3
    stopped = chunks[: aside[2] + 1]
    more = follow_through(world, "*.log", *NOTHING, position=stopped[-1].end, format="ndjson")
    assert numbers(stopped) == list(range(100)) and numbers(more) == []
    assert guessed(stopped + more) == {"assumed-copy": 100}


def test_files_that_differ_only_in_their_middle_are_two_files(world: Any, numbers: Any) -> None:
    def day(wet: int) -> str:
        rows = (f'{{"t": {1_700_000_000_000 + n}, "distance": {1000 + n + 1000 * (n == wet)}}}\n' for n in range(200))
        return "".join(rows)

    world.write("north.log", day(90))
    chunks = follow_through(world, "*.log", lambda: world.write("south.log", day(110)), *WAIT, format="ndjson")
    assert len(numbers(chunks)) == 400 and guessed(chunks) == {}
    assert sum(numbers(chunks)) == 2 * (sum(range(1000, 1200)) + 1000)
    assert (world.folder / "north.log").stat().st_size == (world.folder / "south.log").stat().st_size


def test_a_file_that_begins_like_an_open_file_and_goes_on_differently_counts_on_a_guess(
    world: Any, ndjson: Any, numbers: Any
) -> None:
    """As `cp a.log b.log; echo … >> b.log` makes it. Or two devices began alike."""
    world.write("a.log", ndjson(0, 100))
    b = ndjson(0, 100) + ndjson(200, 210)
    chunks = follow_through(world, "*.log", lambda: world.write("b.log", b), *WAIT, format="ndjson")
    assert numbers(chunks) == [*range(100), *range(100), *range(200, 210)]
    assert guessed(chunks) == {"read-again": 100}


def test_a_backup_and_a_longer_version_in_its_place(world: Any, ndjson: Any, numbers: Any) -> None:
    """As `rsync --backup` does it: the old file stays beside the new one, so the new one may be another file."""
    log = world.write("app.log", ndjson(0, 100))

    def update() -> None:
        log.rename(world.folder / "app.log~")
        replaced(world, "app.log", ndjson(0, 130))()

    chunks = follow_through(world, "*.log", update, *WAIT, format="ndjson")
    assert numbers(chunks) == list(range(130)) and guessed(chunks) == {"assumed-copy": 100}


@pytest.mark.parametrize("style", ["rename", "copytruncate", "compress", "hard link", "symbolic link"])
def test_rotation_and_links_need_no_guess(world: Any, ndjson: Any, numbers: Any, style: str) -> None:
    log = world.write("app.log", ndjson(0, 100))
    rotated = world.folder / "app.log.1"

    def rotate() -> None:
        if style == "hard link":
            os.link(log, world.folder / "same.log")
        elif style == "symbolic link":
            (world.folder / "same.log").symlink_to(log)
        elif style == "copytruncate":
            shutil.copy(log, rotated)
            os.truncate(log, 0)
        else:
            log.rename(rotated)
            world.write("app.log", "")
        if style == "compress":
            Path(f"{rotated}.gz").write_bytes(gzip.compress(rotated.read_bytes()))
            rotated.unlink()

    steps = [rotate, *NOTHING, lambda: world.append("app.log", ndjson(100, 150))]
    chunks = follow_through(world, "*.log*", *steps, *WAIT, format="ndjson")
    assert sorted(numbers(chunks)) == list(range(150)) and guessed(chunks) == {}
    assert losses(chunks) == (["file-truncated"] if style == "copytruncate" else [])


@pytest.mark.parametrize("pause", [0, 4], ids=["at once", "later"])
@pytest.mark.parametrize("name", ["app.log.bak", "app.log.1"])
def test_a_copy_of_a_truncated_file_counts_once_under_any_name(
    world: Any, ndjson: Any, numbers: Any, name: str, pause: int
) -> None:
    log, whole = world.write("app.log", ndjson(0, 100)), ndjson(0, 110).encode()

    def truncate() -> None:
        log.write_text(ndjson(200, 210))

    steps = [truncate, *NOTHING * pause] if pause else []
    copy = lambda: (world.write(name, whole), None if pause else truncate())  # noqa: E731
    chunks = follow_through(world, "app.log*", *steps, copy, *WAIT * 2, format="ndjson")
    assert sorted(numbers(chunks)) == [*range(110), *range(200, 210)]
    assert losses(chunks) == ["file-truncated"]
    assert guessed(chunks) == ({"assumed-copy": 100} if name == "app.log.bak" else {})


@pytest.mark.parametrize("deleted", [False, True])
def test_a_slow_copy_counts_each_record_once(world: Any, ndjson: Any, numbers: Any, deleted: bool) -> None:
    """The copy takes longer than the agent waits, so it is left out on a guess before the truncation."""
    data, log = ndjson(0, 1000), world.write("app.log", ndjson(0, 1000))
    copied = lambda begin, end: lambda: world.append("app.log.1", data[begin:end])  # noqa: E731
    steps = [copied(0, 5_000), *WAIT, copied(5_000, 9_000), *WAIT, copied(9_000, None)]
    end = log.unlink if deleted else lambda: os.truncate(log, 0)
    cut = [end, *NOTHING * 4, lambda: world.append("app.log", ndjson(1000, 1100))]
    chunks = follow_through(world, "app.log*", *steps, *cut, *NOTHING * 4, format="ndjson")
    assert sorted(numbers(chunks)) == list(range(1100))
    assert guessed(chunks) == {"assumed-copy": 1000}


@pytest.mark.parametrize("changed", [False, True])
def test_a_parquet_file_that_is_written_anew_is_read_again_on_a_guess_if_anything_differs(
    world: Any, numbers: Any, changed: bool
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def write(**values: list[Any]) -> int:
        rows = [1_700_000_000_000 + n for n in range(50)]
        names = {"carrier": pa.string(), "delay": pa.float64(), "late": pa.bool_()}
        nulls = {name: pa.nulls(50, kind) for name, kind in names.items()}
        pq.write_table(pa.table({"t": rows, "distance": list(range(50)), **nulls, **values}), world.folder / ".new")
        (world.folder / ".new").rename(world.folder / "a.parquet")
        return int((world.folder / "a.parquet").stat().st_size)

    size = write()
    swapped = [*range(20), 21, 20, *range(22, 50)]
    anew = lambda: write(**({"distance": swapped} if changed else {})) == size or pytest.fail("the sizes differ")  # noqa: E731
    chunks = follow_through(world, "*.parquet", *NOTHING * 2, anew, *NOTHING * 6)
    assert numbers(chunks) == [*range(50), *(swapped if changed else [])]
    assert guessed(chunks) == ({"read-again": 50} if changed else {})


def test_a_backfill_states_the_same_guesses(world: Any, ndjson: Any, numbers: Any) -> None:
    import asyncio

    world.write("north.log", ndjson(0, 100))
    steps = [
        lambda: world.write("south.log", ndjson(0, 100)),
        *WAIT,
        lambda: world.append("south.log", ndjson(300, 310)),
    ]
    chunks = follow_through(world, "*.log", *steps, *NOTHING, format="ndjson")
    source = world.source("*.log", follow=True, format="ndjson")

    async def read_again() -> list[Any]:
        return [chunk async for chunk in source.backfill(None, chunks[-1].end, 0)]

    again = asyncio.run(read_again())
    assert sorted(numbers(again)) == sorted(numbers(chunks)) == [*range(100), *range(300, 310)]
    assert guessed(again) == guessed(chunks) == {"assumed-copy": 100}
    for chunk in again:
        assert source.reread(chunk.start, chunk.end).batch.equals(chunk.batch)


@pytest.mark.parametrize("step", ["copy", "part", "copytruncate", "copytruncate later", "gzip", "gzip in pieces"])
def test_a_short_file_that_is_copied_counts_again_only_on_a_guess(
    world: Any, ndjson: Any, numbers: Any, step: str
) -> None:
    """The beginnings of short files may be equal by chance, so that a copy cannot be told from another file."""
    log, data = world.write("app.log", ndjson(0, 2)), ndjson(0, 2).encode()
    new = log.with_name("app.log.1.gz" if "gzip" in step else "app.log.1")
    nothing = NOTHING * (3 if step.endswith(("later", "pieces")) else 0)
    truncate = [lambda: log.write_bytes(ndjson(2, 3).encode())]
    steps: dict[str, list[Callable[[], object]]] = {
        "copy": [lambda: new.write_bytes(data)],
        "part": [lambda: new.write_bytes(ndjson(0, 1).encode())],
        "copytruncate": [lambda: (new.write_bytes(data), truncate[0]())],
        "copytruncate later": [lambda: new.write_bytes(data), *nothing, *truncate],
        "gzip": [lambda: (new.write_bytes(gzip.compress(data)), log.unlink())],
        "gzip in pieces": [lambda: new.write_bytes(gzip.compress(data)), *nothing, log.unlink],
    }
    chunks = follow_through(world, "app.log*", *NOTHING, *steps[step], *WAIT, format="ndjson")
    again = numbers(chunks)[2 + ("copytruncate" in step) :]
    assert sum(guessed(chunks).values()) >= len(again), "the truth lies inside of the bounds"


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("size", [1, 300], ids=["short", "long"])
@pytest.mark.parametrize("kind", ["ndjson", "ndjson.gz", "parquet"])
def test_a_file_and_its_copy_are_a_guess_in_each_format(
    world: Any, ndjson: Any, numbers: Any, kind: str, size: int, later: bool
) -> None:
    log, copy = world.folder / f"a.{kind}", world.folder / f"b.{kind}"
    if kind == "parquet":
        table = pa.Table.from_pylist([json.loads(line) for line in ndjson(0, size).splitlines()])
        pq.write_table(table, log)
    else:
        log.write_bytes((gzip.compress if kind.endswith("gz") else bytes)(ndjson(0, size).encode()))
    steps = [*NOTHING * 3 * later, lambda: shutil.copy(log, copy)]
    if not later:
        steps.pop()()
    chunks = follow_through(world, f"*.{kind}", *steps, *WAIT)
    assert sum(guessed(chunks).values()) == size, "the truth lies inside of the bounds"
    assert len(numbers(chunks)) == (size if "assumed-copy" in guessed(chunks) else 2 * size)
    source = world.source(f"*.{kind}", follow=True)
    for chunk in chunks:
        if chunk.batch.num_rows:
            assert source.reread(chunk.start, chunk.end).batch.equals(chunk.batch)


def test_files_that_have_only_the_header_in_common_need_no_guess(world: Any, numbers: Any) -> None:
    header = "t,carrier,distance,delay,late\n"
    for name in "abc":
        world.write(f"{name}.csv", header + (f"{ARRIVAL_MS},AA,0,,\n" if name == "c" else ""))
    steps = [
        lambda: world.append("a.csv", f"{ARRIVAL_MS},AA,1,,\n"),
        *NOTHING,
        lambda: world.append("b.csv", f"{ARRIVAL_MS},AA,2,,\n"),
    ]
    chunks = follow_through(world, "*.csv", *NOTHING, *steps, *WAIT)
    assert (sorted(numbers(chunks)), guessed(chunks)) == ([0, 1, 2], {})


@pytest.mark.parametrize("when", ["read by half", "read"])
def test_a_parquet_file_that_is_written_over_itself_is_noticed(world: Any, numbers: Any, when: str) -> None:
    """Size and first bytes stay."""
    log = world.folder / "a.parquet"

    def write(first: int) -> None:
        distances = range(first, first + 100)
        columns = {"t": [ARRIVAL_MS] * 100, "carrier": ["AA"] * 100, "distance": distances, "delay": [1.5] * 100}
        table = pa.table(columns | {"late": [True] * 100})
        pq.write_table(table, log, row_group_size=50, use_dictionary=False, compression="none")

    write(0)
    size = log.stat().st_size
    first = follow_through(world, "*.parquet", *NOTHING)
    first = first[:1] if when == "read by half" else first
    write(1000)
    assert log.stat().st_size == size
    more = follow_through(world, "*.parquet", *NOTHING * 3, position=first[-1].end)
    assert numbers(more) == list(range(1000, 1100))
    assert guessed(more) == {"read-again": 100}


@pytest.mark.parametrize("size", [1, 300])
def test_a_file_and_its_compressed_copy_that_are_there_at_the_first_start_are_a_guess(
    world: Any, ndjson: Any, numbers: Any, size: int
) -> None:
    world.write("a.log", ndjson(0, size))
    world.write("a.log.gz", gzip.compress(ndjson(0, size).encode()))
    world.write("b.log", "")
    world.write("b.log.gz", gzip.compress(ndjson(1000, 1001).encode()))
    chunks = follow_through(world, "*.log*", *WAIT, format="ndjson")
    assert sum(guessed(chunks).values()) == size, "the truth lies inside of the bounds"
    assert sorted(set(numbers(chunks))) == [*range(size), 1000]
    reread(world, "*.log*", chunks)


@pytest.mark.parametrize(
    ("name", "value"),
    [("row", "x"), ("size", None), ("tail", [1]), ("span", ["a", 2]), ("like", 7), ("header", 7), ("alike", [1])],
)
def test_a_stored_position_with_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    stored = FilePosition("a.log", 1, (0, 0), 0, 0).to_state()
    with pytest.raises(StorageError):
        FilePosition.from_state(stored | {name: value})
