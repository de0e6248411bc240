"""Builds the sources of a configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, cast

from edge.codecs import RecordSchema, codec_of
from edge.config import EdgeConfig, FileConfig, PackageSourceConfig, SourceConfig
from edge.receivers import PushedSource, Receiver
from edge.records import CoalesceTime, Source, shortest_wait
from edge.source_kinds import KINDS, SourceCheck, SourceContext
from edge.sources.files import FileSource, OpenReader, parquet_opener, text_opener
from edge.sources.http import http_source_name
from edge.sources.pacing import PacedSource
from edge.sources.stdin import StdinSource
from edge.utilization import ActivityMarker, no_marker
from edgewater.model.errors import InvalidConfig
from edgewater.model.streams import Delivery, StreamClock

Sleep = Callable[[float], Awaitable[None]]


def build_sources(
    config: EdgeConfig,
    clocks: Mapping[str, StreamClock | None],
    *,
    now_ms: Callable[[], int],
    sleep: Sleep = asyncio.sleep,
    idle: ActivityMarker = no_marker,
    coalesce_s: CoalesceTime = shortest_wait,
) -> list[Source]:
    """Builds all sources of all streams, and reads nothing yet.

    Args:
        clocks: per stream, the result of `replay_clock` at the stream's first start. Only replays use it.
        now_ms: returns the wall time.
        sleep: waits for the replay clock, and between polls of followed files.
        idle: marks when a source waits for input.
        coalesce_s: returns how long the next records of a source wait, so that they are processed together.
    """
    sources: list[Source] = []
    for name, stream in config.streams.items():
        clock = clocks.get(name) if stream.replay is not None else None
        for config_source in stream.sources:
            if config_source.package is not None:
                context = SourceContext(name, stream.record_schema, now_ms, sleep, idle, coalesce_s)
                sources += package_sources(config_source.package, context, {source.name for source in sources})
                continue
            source = build_source(
                name, config_source, stream.record_schema,
                now_ms=now_ms, sleep=sleep, idle=idle, coalesce_s=coalesce_s,
            )  # fmt: skip
            if clock is None or isinstance(source, PushedSource):
                sources.append(source)
            else:
                paced_sleep = _idle_sleep(sleep, source.name, idle)
                paced = PacedSource(source, clock, now_ms=now_ms, sleep=paced_sleep, coalesce_s=coalesce_s)
                sources.append(cast(Source, paced))
    return sources


def build_source(
    stream: str,
    config: SourceConfig,
    schema: RecordSchema,
    *,
    now_ms: Callable[[], int],
    sleep: Sleep,
    idle: ActivityMarker = no_marker,
    coalesce_s: CoalesceTime = shortest_wait,
) -> FileSource | StdinSource | PushedSource:
    """Builds one source, without pacing.

    The source's name consists of its stream, kind and path, so it stays the same when sources are reordered.
    """
    if config.file is not None:
        file = config.file
        name = f"{stream}:file:{file.path}"
        opener = file_opener(file, schema)
        return FileSource(
            name, stream, file.path, schema, opener, now_ms=now_ms, follow=file.follow,
            sleep=_idle_sleep(sleep, name, idle), busy_sleep=sleep, coalesce_s=coalesce_s,
            rotate_wait_ms=file.rotate_wait,
            requires_complete=lambda path: file.format == "parquet" or codec_of(path, file.compression) is not None,
        )  # fmt: skip
    if config.stdin is not None:
        return StdinSource(
            f"{stream}:stdin", stream, config.stdin.text_format(schema),
            now_ms=now_ms, sleep=sleep, idle=idle, coalesce_s=coalesce_s,
        )  # fmt: skip
    knows_bodies = config.http is None or config.http.dedupe == "body"
    return PushedSource(http_source_name(stream), stream, schema, idle, knows_bodies=knows_bodies)


def package_sources(config: PackageSourceConfig, context: SourceContext, taken: Collection[str] = ()) -> list[Source]:
    """Builds the sources of one configured source whose kind comes from a package.

    Args:
        taken: names of the edge's sources that were built before.

    Raises:
        InvalidConfig: the kind refuses the options, two sources have one name, or a source does not state a valid
            `delivery`.
    """
    kind = KINDS.get(config.kind)
    assert kind is not None, "the configuration guarantees it"
    sources = list(kind.sources(config.options, context))
    prefix = f"{context.stream}:{config.kind}:"
    names = [*(source.name for source in sources), *taken]
    for source in sources:
        if not source.name.startswith(prefix) or source.stream != context.stream or names.count(source.name) > 1:
            accepted = f"a name of its own that begins with {prefix}, and the stream {context.stream}"
            raise InvalidConfig(f"streams.{context.stream}.sources.{config.kind}", source.name, accepted)
        if source.delivery not in tuple(Delivery):
            accepted = f"a delivery of edgewater.model.streams.Delivery for the source {source.name}"
            raise InvalidConfig(f"streams.{context.stream}.sources.{config.kind}", source.delivery, accepted)
    return sources


def check_package(config: PackageSourceConfig, context: SourceContext, records: int) -> SourceCheck | None:
    """Returns the result of `SourceKind.check` for one configured source; None if the kind has no check."""
    check = getattr(KINDS.get(config.kind), "check", None)
    return None if check is None else check(config.options, context, records)


def package_receivers(config: EdgeConfig, now_ms: Callable[[], int]) -> list[Receiver]:
    """Builds the receivers of all configured kinds that come from packages.

    Raises:
        InvalidConfig: a kind refuses its options, or two receivers have the same path.
    """
    entries: dict[str, list[tuple[Any, SourceContext]]] = {}
    for name, stream in config.streams.items():
        for source in stream.sources:
            if source.package is not None:
                context = SourceContext(name, stream.record_schema, now_ms)
                entries.setdefault(source.package.kind, []).append((source.package.options, context))
    result: list[Receiver] = []
    for kind, given in entries.items():
        build = KINDS.receivers(kind)
        for receiver in build(given) if build is not None else ():
            if any(receiver.path == other.path for other in result):
                raise InvalidConfig(f"streams.{given[0][1].stream}.sources.{kind}", receiver.path, "a path of its own")
            result.append(receiver)
    return result


def _idle_sleep(sleep: Sleep, source: str, idle: ActivityMarker) -> Sleep:
    """Returns a function that marks the source as idle while it sleeps."""

    async def idle_sleep(seconds: float) -> None:
        with idle(source):
            await sleep(seconds)

    return idle_sleep


def file_opener(file: FileConfig, schema: RecordSchema) -> OpenReader:
    """Returns the function that opens the files of a configured file source."""
    if file.format == "parquet":
        return parquet_opener(schema)
    return text_opener(file.text_format(schema), file.compression)
