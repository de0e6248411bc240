"""The sources that a configuration names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from edge.codecs.decompression import codec_of
from edge.codecs.formats import TextFormat
from edge.codecs.schema import RecordSchema
from edge.config import CsvConfig, EdgeConfig, FileConfig, SourceConfig
from edge.records import Source
from edge.sources.files.reader import OpenReader
from edge.sources.files.source import FileSource, parquet_opener, text_opener
from edge.sources.http import HttpSource, http_source_name
from edge.sources.pacing import PacedSource
from edge.sources.stdin import StdinSource
from edge.utilization import Mark, unmarked
from edgewater.streams import StreamClock

Sleep = Callable[[float], Awaitable[None]]


def build_sources(
    config: EdgeConfig,
    clocks: Mapping[str, StreamClock | None],
    *,
    now_ms: Callable[[], int],
    sleep: Sleep = asyncio.sleep,
    waiting: Mark = unmarked,
) -> list[Source]:
    """All sources of all streams; reads nothing yet.

    Args:
        clocks: by stream, as `replay_clock` gave them when the stream was first started; only those
            of replays are used.
        now_ms: the wall clock.
        sleep: waits for the replay clock, and between two looks at followed files.
        waiting: marks when a source waits for input.
    """
    sources: list[Source] = []
    for name, stream in config.streams.items():
        clock = clocks.get(name) if stream.replay is not None else None
        for given in stream.sources:
            source = build_source(name, given, stream.record_schema, now_ms=now_ms, sleep=sleep, waiting=waiting)
            if clock is None or isinstance(source, HttpSource):
                sources.append(source)
            else:
                idle = _marked(sleep, source.name, waiting)
                sources.append(PacedSource(source, clock, now_ms=now_ms, sleep=idle))
    return sources


def build_source(
    stream: str,
    given: SourceConfig,
    schema: RecordSchema,
    *,
    now_ms: Callable[[], int],
    sleep: Sleep,
    waiting: Mark = unmarked,
) -> FileSource | StdinSource | HttpSource:
    """One source, without pacing. Its name is its stream, kind and path: it outlives reordering."""
    if given.file is not None:
        file = given.file
        name = f"{stream}:file:{file.path}"
        opener = file_opener(file, schema)
        return FileSource(
            name, stream, file.path, schema, opener, now_ms=now_ms, follow=file.follow,
            sleep=_marked(sleep, name, waiting),
            whole=lambda path: file.format == "parquet" or codec_of(path, file.compression) is not None,
        )  # fmt: skip
    if given.stdin is not None:
        text = text_format(given.stdin.format, given.stdin.csv, schema)
        return StdinSource(f"{stream}:stdin", stream, text, now_ms=now_ms, sleep=sleep, waiting=waiting)
    return HttpSource(http_source_name(stream), stream, schema, waiting)


def _marked(sleep: Sleep, source: str, waiting: Mark) -> Sleep:
    async def idle(seconds: float) -> None:
        with waiting(source):
            await sleep(seconds)

    return idle


def file_opener(file: FileConfig, schema: RecordSchema) -> OpenReader:
    """How the files of a source are read."""
    if file.format == "parquet":
        return parquet_opener(schema)
    return text_opener(text_format(file.format, file.csv, schema), file.compression)


def text_format(name: str, csv: CsvConfig, schema: RecordSchema) -> TextFormat:
    """A text format as it is configured."""
    header = tuple(csv.header) if csv.header is not None else None
    return TextFormat("csv" if name == "csv" else "ndjson", schema, csv.dialect, header if name == "csv" else None)
