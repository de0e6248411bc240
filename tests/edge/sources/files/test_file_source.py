import asyncio
import bz2
import gzip
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from edge.codecs.framing import OPEN_RECORD_MS
from edge.records import BLOCK_BYTES, MAX_CHUNK_ROWS
from edgewater.base.errors import InvalidConfig, InvalidRecord, StorageError
from tests.cells import at_night
from tests.refusals import refused

pytestmark = pytest.mark.slow


def every_position_gives_the_same_batch(source: Any, chunks: list[Any]) -> None:
    for chunk in chunks:
        again = source.reread(chunk.start, chunk.end)
        assert again.batch.equals(chunk.batch), (chunk.start, chunk.end)
        assert again.rejected == chunk.rejected
    for chunk in reversed(chunks):
        assert source.reread(chunk.start, chunk.end).batch.equals(chunk.batch)
    source.close()


def test_files_are_read_in_name_order(world: Any, read: Any, ndjson: Any, numbers: Any) -> None:
    world.write("b.ndjson", ndjson(2, 4))
    world.write("a.ndjson", ndjson(0, 2))
    world.write("c.txt", "not this one")
    assert numbers(read(world.source("*.ndjson"))) == [0, 1, 2, 3]


def test_a_last_line_without_a_newline_is_a_record(world: Any, read: Any, ndjson: Any, numbers: Any) -> None:
    world.write("a.ndjson", ndjson(0, 3).rstrip("\n"))
    assert numbers(read(world.source("a.ndjson"))) == [0, 1, 2]


def test_no_matching_file_is_an_error_unless_files_are_waited_for(world: Any, read: Any) -> None:
    with refused(InvalidConfig, f"flights:file:{world.folder}/*.ndjson: path"):
        read(world.source("*.ndjson"))


@pytest.mark.nightly
@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".zst"])
def test_a_large_file_comes_in_blocks_that_can_be_read_again(
    world: Any, read: Any, ndjson: Any, numbers: Any, suffix: str
) -> None:
    plain = ndjson(0, 100_000).encode()
    assert len(plain) > 2 * BLOCK_BYTES
    pack = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress,
            ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True)}[suffix]  # fmt: skip
    world.write(f"a.ndjson{suffix}", pack(plain))
    source = world.source(f"a.ndjson{suffix}")
    chunks = read(source)
    assert len(chunks) > 2
    assert numbers(chunks) == list(range(100_000))
    assert sum(chunk.nbytes for chunk in chunks) == len(plain)
    every_position_gives_the_same_batch(source, chunks)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_reading_goes_on_from_any_position(world: Any, read: Any, ndjson: Any, numbers: Any, suffix: str) -> None:
    pack = gzip.compress if suffix else bytes
    world.write(f"a.ndjson{suffix}", pack(ndjson(0, 12_000).encode()))
    world.write(f"b.ndjson{suffix}", pack(ndjson(12_000, 12_010).encode()))
    chunks = read(world.source(f"*.ndjson{suffix}"))
    for at, chunk in enumerate(chunks):
        rest = read(world.source(f"*.ndjson{suffix}"), chunk.end)
        assert numbers(chunks[: at + 1]) + numbers(rest) == list(range(12_010))


CSV_HEAD = "t,carrier,distance,delay,late\n"


def broken_lines(numbers: range, arrival_ms: int) -> str:
    """Records of CSV with line breaks in quotes; each has a line that looks like a record."""
    return "".join(f'{arrival_ms},"two\n{arrival_ms},x,-1,,\n""c{n}""",{n},,\n' for n in numbers)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("block_bytes", [200, *at_night(None)])
def test_records_with_line_breaks_are_read_from_any_position_and_across_blocks(
    world: Any, read: Any, numbers: Any, arrival_ms: int, suffix: str, block_bytes: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if block_bytes is not None:
        monkeypatch.setattr("edge.codecs.formats.TextFormat.blocks.__defaults__", (block_bytes,))
    count = 40 if block_bytes is not None else 150_000
    data = (CSV_HEAD + broken_lines(range(count), arrival_ms)).encode()
    world.write(f"a.csv{suffix}", gzip.compress(data) if suffix else data)
    source = world.source(f"a.csv{suffix}", format="csv")
    chunks = read(source)
    assert numbers(chunks) == list(range(count))
    assert len(chunks) > 2 and not any(chunk.rejected for chunk in chunks)
    for at in range(0, len(chunks), max(1, len(chunks) // 5)):
        rest = read(world.source(f"a.csv{suffix}", format="csv"), chunks[at].end)
        assert numbers(chunks[: at + 1]) + numbers(rest) == list(range(count))
    every_position_gives_the_same_batch(source, chunks)


def test_a_followed_record_counts_when_its_last_line_has_come_and_an_open_quote_is_rejected_in_the_end(
    world: Any, numbers: Any, arrival_ms: int
) -> None:
    first, second = broken_lines(range(1), arrival_ms), broken_lines(range(1, 2), arrival_ms)
    world.write("a.csv", CSV_HEAD + first[:30])
    seen: list[list[int]] = []
    chunks: list[Any] = []

    def on_sleep(count: int) -> None:
        seen.append(numbers(chunks))
        if count == 3:
            world.append("a.csv", first[30:] + second)
        if count == 6:
            world.append("a.csv", f'{arrival_ms},"open,7,,\n{arrival_ms},x,8,,\n')
        if count == 9:
            world.now_ms += OPEN_RECORD_MS
        if count == 12:
            world.append("a.csv", f"{arrival_ms},x,9,,\n")
        if count == 15:
            raise KeyboardInterrupt

    world.on_sleep = on_sleep

    async def run() -> None:
        async for chunk in world.source("a.csv", format="csv", follow=True).chunks(None):
            chunks.append(chunk)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert seen[2] == [] and seen[5] == [0, 1] and numbers(chunks) == [0, 1, 9]
    assert [(r.reason, r.count) for chunk in chunks for r in chunk.rejected] == [("malformed", 2)]


PATTERN = r"t=(?P<t>\d+) distance=(?P<distance>\d+)(?P<carrier> c)?(?P<delay> d)?(?P<late> l)?"


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"format": "logfmt"}, {"regex": {"pattern": PATTERN}}])
def test_lines_of_text_are_read_on_from_any_position(
    world: Any, read: Any, numbers: Any, arrival_ms: int, options: dict[str, Any]
) -> None:
    lines = [f"t={arrival_ms} distance={n}\n" for n in range(120_000)]
    lines.insert(5, "oops\n")
    world.write("a.log", "".join(lines))
    chunks = read(world.source("a.log", **options))
    assert [(r.reason, r.count) for chunk in chunks for r in chunk.rejected] == [("malformed", 1)]
    every_position_gives_the_same_batch(world.source("a.log", **options), chunks)
    rest = read(world.source("a.log", **options), chunks[0].end)
    assert numbers(chunks[:1]) + numbers(rest) == list(range(120_000))


def test_a_position_inside_a_block_goes_on_behind_the_last_record(
    world: Any, read: Any, ndjson: Any, numbers: Any
) -> None:
    lines = ndjson(0, 20).splitlines(keepends=True)
    lines.insert(3, "oops\n")
    lines.insert(11, '{"t": 5}\n')
    world.write("a.ndjson", "".join(lines))
    source = world.source("a.ndjson")
    (whole,) = read(source)
    for rows in range(1, 20):
        head, tail = whole.split(rows)
        assert source.reread(head.start, head.end).batch.equals(head.batch)
        assert source.reread(tail.start, tail.end).batch.equals(tail.batch)
        assert source.reread(tail.start, tail.end).rejected == ()
        rest = read(world.source("a.ndjson"), head.end)
        assert numbers([head]) + numbers(rest) == list(range(20))
        assert [chunk.rejected for chunk in rest] == [()]
        if rows > 1:
            first, second = head.split(1)
            assert source.reread(second.start, second.end).batch.equals(second.batch)
            assert first.batch.num_rows + second.batch.num_rows == rows


def test_a_block_left_midway_is_judged_by_its_first_arrival(world: Any, read: Any, numbers: Any) -> None:
    """Else a record refused for its time would be accepted later, and the rows would shift."""
    ahead = world.now_ms + 2 * 86_400_000
    world.write(
        "a.ndjson", "".join(f'{{"t": {t}, "distance": {n}}}\n' for n, t in enumerate([world.now_ms, ahead] * 3))
    )
    source = world.source("a.ndjson")
    (whole,) = read(source)
    assert numbers([whole]) == [0, 2, 4]
    head, _ = whole.split(1)
    world.now_ms = ahead
    assert numbers(read(world.source("a.ndjson"), head.end)) == [2, 4]
    assert source.reread(whole.start, whole.end).batch.equals(whole.batch)


def test_short_records_come_in_chunks_of_bounded_rows(world: Any, read: Any) -> None:
    rows = 2 * MAX_CHUNK_ROWS + MAX_CHUNK_ROWS // 2 - 1
    world.write("a.csv", "t,carrier,distance,delay,late\n" + "1700000000000,,,,\n" * rows)
    source = world.source("a.csv")
    chunks = read(source)
    assert [chunk.batch.num_rows for chunk in chunks] == [MAX_CHUNK_ROWS, rows - MAX_CHUNK_ROWS], "no small rest"
    assert sum(chunk.batch.num_rows for chunk in chunks) == rows
    every_position_gives_the_same_batch(source, chunks)


def test_a_line_longer_than_a_block_is_refused_and_the_next_one_read(
    world: Any, read: Any, ndjson: Any, numbers: Any
) -> None:
    long = '{"t": 1, "carrier": "' + "x" * (3 * BLOCK_BYTES) + '"}\n'
    world.write("a.ndjson", ndjson(0, 2) + long + ndjson(2, 4))
    source = world.source("a.ndjson")
    chunks = read(source)
    assert numbers(chunks) == [0, 1, 2, 3]
    (rejection,) = [r for chunk in chunks for r in chunk.rejected]
    assert (rejection.reason, rejection.count) == ("too-long", 1)
    assert f"a line of {len(long)} bytes; expected at most {BLOCK_BYTES}" in rejection.message
    every_position_gives_the_same_batch(source, chunks)


def test_every_csv_file_has_its_own_header_and_positions_remember_it(world: Any, read: Any, numbers: Any) -> None:
    world.write("a.csv", "\ufefft,carrier,distance,delay,late\n1700000000000,AA,0,,\n1700000000000,AA,1,,\n")
    world.write("b.csv", "extra,late,delay,distance,carrier,t\n,,,2,AA,1700000000000\n")
    source = world.source("*.csv")
    chunks = read(source)
    assert numbers(chunks) == [0, 1, 2]
    assert chunks[1].end["header"] == ["extra", "late", "delay", "distance", "carrier", "t"]
    every_position_gives_the_same_batch(source, chunks)
    head, _ = chunks[0].split(1)
    assert numbers(read(world.source("*.csv"), head.end)) == [1, 2]
    for end in (chunks[0].end, head.end):
        assert source.reread(None, end).batch.equals(chunks[0].batch[: end.get("row")])


def test_a_csv_file_without_a_declared_column_is_an_error(world: Any, read: Any) -> None:
    world.write("a.csv", "t,carrier,distance\n")
    with refused(InvalidRecord, f"{world.folder}/a.csv: header"):
        read(world.source("a.csv"))


def test_csv_without_a_header_line_takes_its_columns_from_the_configuration(
    world: Any, read: Any, numbers: Any
) -> None:
    world.write("a.csv", "1700000000000;7;AA;;\n")
    options = {"delimiter": ";", "header": ["t", "distance", "carrier", "delay", "late"]}
    source = world.source("a.csv", csv=options)
    chunks = read(source)
    assert numbers(chunks) == [7]
    every_position_gives_the_same_batch(source, chunks)


@pytest.mark.nightly
@pytest.mark.parametrize("keep", [0.2, 0.5, 0.99])
def test_a_truncated_gz_gives_what_is_whole_and_the_source_goes_on(
    world: Any, read: Any, ndjson: Any, numbers: Any, keep: float
) -> None:
    packed = gzip.compress(ndjson(0, 25_000).encode())
    cut = packed[: int(len(packed) * keep)]
    world.write("a.ndjson.gz", cut)
    world.write("b.ndjson.gz", gzip.compress(ndjson(90_000, 90_003).encode()))
    source = world.source("*.gz", format="ndjson")
    chunks = read(source)
    (rejection,) = [r for chunk in chunks for r in chunk.rejected]
    assert (rejection.reason, rejection.count) == ("truncated", 1)
    assert rejection.example.endswith(f"a.ndjson.gz: byte {len(cut)}")
    found = numbers(chunks)
    assert found[-3:] == [90_000, 90_001, 90_002]
    # Exactly the lines that can be decompressed as a whole.
    import zlib

    whole_lines = zlib.decompressobj(wbits=31).decompress(cut).count(b"\n")
    assert whole_lines - found[:-3][-1] - 1 in (0, 1)  # zlib itself may hold the last bytes back
    assert found[:-3] == list(range(len(found) - 3))
    every_position_gives_the_same_batch(source, chunks)
    for at, chunk in enumerate(chunks):
        assert numbers(chunks[: at + 1]) + numbers(read(world.source("*.gz", format="ndjson"), chunk.end)) == found


def test_zeros_that_pad_gzip_data_are_no_damage(world: Any, read: Any, ndjson: Any, numbers: Any) -> None:
    packed = [gzip.compress(ndjson(k, k + 2).encode()) for k in (0, 2)]
    world.write("a.ndjson.gz", packed[0] + bytes(70_000) + packed[1] + bytes(512))
    source = world.source("*.gz", format="ndjson")
    chunks = read(source)
    assert numbers(chunks) == [0, 1, 2, 3]
    assert [rejection for chunk in chunks for rejection in chunk.rejected] == []
    every_position_gives_the_same_batch(source, chunks)


@pytest.mark.parametrize(
    ("cut", "reason"), [(b"junk", "corrupt"), (b"\0\0junk", "corrupt"), (b"\x1f\x8b\x08", "truncated")]
)
def test_what_follows_gzip_data_and_is_none_is_damage(
    world: Any, read: Any, ndjson: Any, numbers: Any, cut: bytes, reason: str
) -> None:
    world.write("a.ndjson.gz", gzip.compress(ndjson(0, 2).encode()) + cut)
    chunks = read(world.source("*.gz", format="ndjson"))
    assert numbers(chunks) == [0, 1]
    assert [rejection.reason for chunk in chunks for rejection in chunk.rejected] == [reason]


def test_damage_is_reported_once_also_after_a_restart(world: Any, read: Any, ndjson: Any) -> None:
    world.write("a.ndjson.gz", gzip.compress(ndjson(0, 100).encode())[:-30])
    chunks = read(world.source("*.gz", format="ndjson"))
    assert [r.reason for r in chunks[-1].rejected] == ["truncated"]
    assert read(world.source("*.gz", format="ndjson"), chunks[-1].end) == []


def test_a_file_that_is_not_what_its_name_says_is_reported(world: Any, read: Any, ndjson: Any, numbers: Any) -> None:
    world.write("a.ndjson.gz", ndjson(0, 2))
    world.write("b.ndjson.gz", gzip.compress(ndjson(2, 4).encode()))
    chunks = read(world.source("*.gz", format="ndjson"))
    assert [r.reason for c in chunks for r in c.rejected] == ["corrupt"]
    assert numbers(chunks) == [2, 3]


def test_parquet_comes_in_batches_that_can_be_read_again(world: Any, read: Any, numbers: Any) -> None:
    rows = MAX_CHUNK_ROWS + 20
    table = pa.table(
        {
            "extra": ["x"] * rows,
            "t": pa.array([1_700_000_000_000] * rows, pa.int64()).cast(pa.timestamp("ms")),
            "distance": pa.array(range(rows), pa.int32()),
            "carrier": pa.array(["AA"] * rows).dictionary_encode(),
            "delay": pa.array([1.5] * rows, pa.float32()),
            "late": [True] * rows,
        }
    )
    pq.write_table(table, world.folder / "a.parquet", row_group_size=MAX_CHUNK_ROWS + 7)
    source = world.source("a.parquet")
    chunks = read(source)
    assert [chunk.batch.num_rows for chunk in chunks] == [MAX_CHUNK_ROWS, 7, 13]
    assert chunks[0].batch.schema == world.schema.output
    assert numbers(chunks) == list(range(rows))
    every_position_gives_the_same_batch(source, chunks)
    head, tail = chunks[1].split(3)
    for part in (head, tail):
        assert source.reread(part.start, part.end).batch.equals(part.batch)
    assert numbers(read(world.source("a.parquet"), head.end)) == list(range(MAX_CHUNK_ROWS + 3, rows))


def test_parquet_that_lacks_a_column_or_has_another_type_is_an_error(world: Any, read: Any) -> None:
    pq.write_table(pa.table({"t": [1], "carrier": ["AA"], "distance": [1]}), world.folder / "a.parquet")
    with refused(InvalidRecord, f"{world.folder}/a.parquet"):
        read(world.source("a.parquet"))
    columns = {"t": [1], "carrier": ["AA"], "distance": [1.5], "delay": [1.5], "late": [True]}
    pq.write_table(pa.table(columns), world.folder / "a.parquet")
    with refused(InvalidRecord, f"{world.folder}/a.parquet: column distance"):
        read(world.source("a.parquet"))


def test_a_parquet_file_cut_short_is_reported_and_the_next_one_read(world: Any, read: Any, numbers: Any) -> None:
    columns = {"t": [1_700_000_000_000], "carrier": ["AA"], "distance": [1], "delay": [1.5], "late": [True]}
    pq.write_table(pa.table(columns), world.folder / "b.parquet")
    whole = (world.folder / "b.parquet").read_bytes()
    world.write("a.parquet", whole[: len(whole) // 2])
    source = world.source("*.parquet")
    chunks = read(source)
    assert [r.reason for c in chunks for r in c.rejected] == ["corrupt"]
    assert numbers(chunks) == [1]
    every_position_gives_the_same_batch(source, chunks)


def test_a_file_that_vanished_midway_is_said_to_be_gone(world: Any, read: Any, ndjson: Any, numbers: Any) -> None:
    world.write("a.ndjson", ndjson(0, 12_000))
    world.write("b.ndjson", ndjson(12_000, 12_002))
    (first,) = read(world.source("*.ndjson"), limit=1)
    (world.folder / "a.ndjson").unlink()
    source = world.source("*.ndjson")
    chunks = read(source, first.end)
    assert [r.reason for r in chunks[0].rejected] == ["file-gone"]
    assert numbers(chunks) == [12_000, 12_001]
    with pytest.raises(StorageError):
        source.reread(first.start, first.end)


def test_a_copy_put_back_is_the_same_file(world: Any, read: Any, ndjson: Any, numbers: Any) -> None:
    path = world.write("a.ndjson", ndjson(0, 12_000))
    (first,) = read(world.source("*.ndjson"), limit=1)
    held = path.open("rb")  # keeps the inode from being given to the copy
    path.unlink()
    world.write("a.ndjson", ndjson(0, 12_000))
    rest = read(world.source("*.ndjson"), first.end)
    held.close()
    assert numbers([first, *rest]) == list(range(12_000))
    assert world.source("*.ndjson").reread(first.start, first.end).batch.equals(first.batch)


def test_a_parquet_record_whose_text_is_not_utf8_is_refused_and_the_others_read(
    world: Any, read: Any, numbers: Any
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    raw = pa.array([b"AA", b"\xff\xfe", None, b"BB"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 4, raw.buffers())
    world.folder.mkdir(exist_ok=True)
    table = pa.table(
        {"t": [world.now_ms] * 4, "carrier": text, "distance": [0, 1, 2, 3], "delay": [0.0] * 4, "late": [False] * 4}
    )
    pq.write_table(table, world.folder / "a.parquet")
    chunks = read(world.source("*.parquet"))
    assert numbers(chunks) == [0, 2, 3]
    ((rejected,),) = [chunk.rejected for chunk in chunks]
    assert (rejected.reason, rejected.count) == ("wrong-type", 1)


def test_a_csv_header_that_cannot_be_read_is_an_error_that_says_so(world: Any, read: Any) -> None:
    world.write("a.csv", "t,carrier\r1,AA\r")
    with refused(InvalidRecord, "header"):
        read(world.source("a.csv"))
