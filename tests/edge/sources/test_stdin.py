import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from edge.codecs.formats import TextFormat
from edge.source_kinds import SourceContext
from edge.sources.stdin import StdinSource
from edgewater.base.errors import InvalidRecord, StorageError
from tests.refusals import refused


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe()
    yield read_end, write_end
    os.close(read_end)


def source(schema: Any, fd: int, arrival_ms: int, kind: Any = "ndjson") -> StdinSource:
    return StdinSource(
        "flights:stdin", TextFormat(kind, schema), SourceContext("flights", schema, lambda: arrival_ms), fd
    )


def test_lines_are_read_until_the_input_ends(
    schema: Any, arrival_ms: int, pipe: tuple[int, int], ndjson: Any, read: Any, numbers: Any
) -> None:
    read_end, write_end = pipe
    os.write(write_end, (ndjson(0, 3) + ndjson(3, 4).rstrip("\n")).encode())
    os.close(write_end)
    chunks = read(source(schema, read_end, arrival_ms))
    assert numbers(chunks) == [0, 1, 2, 3]
    assert [(chunk.start, chunk.end) for chunk in chunks] == [(None, None)] * len(chunks)


def test_lines_are_given_as_they_come_and_a_partial_one_is_waited_for(
    schema: Any, arrival_ms: int, pipe: tuple[int, int], ndjson: Any
) -> None:
    read_end, write_end = pipe

    async def run() -> list[list[int]]:
        chunks = source(schema, read_end, arrival_ms).chunks(None)
        line = ndjson(1, 2).encode()
        os.write(write_end, ndjson(0, 1).encode() + line[:10])
        first = await asyncio.wait_for(anext(chunks), 60)
        os.write(write_end, line[10:])
        second = await asyncio.wait_for(anext(chunks), 60)
        os.close(write_end)
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(chunks), 60)
        return [chunk.batch.column("distance").to_pylist() for chunk in (first, second)]

    assert asyncio.run(run()) == [[0], [1]]


def test_reading_can_be_cancelled_while_nothing_comes(schema: Any, arrival_ms: int, pipe: tuple[int, int]) -> None:
    read_end, write_end = pipe

    async def run() -> None:
        waiting = asyncio.ensure_future(anext(source(schema, read_end, arrival_ms).chunks(None)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())  # returns: the thread does not hang in a read
    os.close(write_end)


def test_csv_begins_with_its_header(
    schema: Any, arrival_ms: int, pipe: tuple[int, int], read: Any, numbers: Any
) -> None:
    read_end, write_end = pipe
    os.write(write_end, b"t,carrier,distance,delay,late\n1700000000000,AA,7,,\n")
    os.close(write_end)
    assert numbers(read(source(schema, read_end, arrival_ms, "csv"))) == [7]


def test_a_header_without_a_declared_column_is_an_error_that_stays(
    schema: Any, arrival_ms: int, pipe: tuple[int, int], read: Any
) -> None:
    read_end, write_end = pipe
    os.write(write_end, b"t,carrier\n1700000000000,AA\n")
    os.close(write_end)
    made = source(schema, read_end, arrival_ms, "csv")
    for _ in range(2):  # the agent tries again: a source that ended would complete windows without its records
        with refused(InvalidRecord, "flights:stdin: header"):
            read(made)


def test_what_was_read_cannot_be_read_again(schema: Any) -> None:
    with pytest.raises(StorageError):
        source(schema, 0, 0).reread(None, {})
