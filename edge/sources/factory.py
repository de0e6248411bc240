"""Builds the sources of a configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from edge.codecs.decompression import codec_of
from edge.codecs.schema import RecordSchema
from edge.config import EdgeConfig, FileConfig, PackageSourceConfig, SourceConfig
from edge.receivers import PushedSource, Receiver
from edge.records import CoalesceTime, Source, shortest_wait
from edge.source_kinds import KINDS, SourceCheck, SourceContext
from edge.sources.files import FileSource, OpenReader, parquet_opener, text_opener
from edge.sources.http import http_source
from edge.sources.pacing import PacedSource
from edge.sources.stdin import StdinSource
from edge.utilization import ActivityMarker, no_marker
from edgewater.base.errors import InvalidConfig
from edgewater.base.streams import Delivery, StreamClock

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
        context = SourceContext(name, stream.record_schema, now_ms, sleep, idle, coalesce_s)
        for config_source in stream.sources:
            if config_source.package is not None:
                sources += package_sources(config_source.package, context, {source.name for source in sources})
                continue
            source = build_source(config_source, context)
            if clock is None or isinstance(source, PushedSource):
                sources.append(source)
            else:
                sources.append(cast(Source, PacedSource(source, clock, context)))
    return sources


def build_source(config: SourceConfig, context: SourceContext) -> FileSource | StdinSource | PushedSource:
    """Builds one source of a built-in kind, without pacing.

    The source's name consists of its stream, kind and path, so it stays the same when sources are reordered.
    """
    if (file := config.file) is not None:
        return FileSource(
            f"{context.stream}:file:{file.path}",
            file.path,
            file_opener(file, context.schema),
            context,
            follow=file.follow,
            rotate_wait_ms=file.rotate_wait_ms,
            requires_complete=lambda path: file.format == "parquet" or codec_of(path, file.compression) is not None,
        )
    if config.stdin is not None:
        return StdinSource(f"{context.stream}:stdin", config.stdin.text_format(context.schema), context)
    assert config.http is not None, "the configuration guarantees it"
    return http_source(config.http, context)


def package_sources(config: PackageSourceConfig, context: SourceContext, taken: Collection[str] = ()) -> list[Source]:
    """Builds the sources of one configured source whose kind comes from a package.

    Args:
        taken: names of the edge's sources that were built before.

    Raises:
        InvalidConfig: the kind refuses the options, two sources have one name, or a source does not state a valid
            `delivery`.
    """
    kind, path = KINDS.get(config.kind), f"streams.{context.stream}.sources.{config.kind}"
    assert kind is not None, "the configuration guarantees it"
    with _errors_below(path):
        sources = list(kind.sources(config.options, context))
    prefix = f"{context.stream}:{config.kind}:"
    names = [*(source.name for source in sources), *taken]
    for source in sources:
        if not source.name.startswith(prefix) or source.stream != context.stream or names.count(source.name) > 1:
            accepted = f"a name of its own that begins with {prefix}, and the stream {context.stream}"
            raise InvalidConfig(path, source.name, accepted)
        if source.delivery not in tuple(Delivery):
            accepted = f"a delivery of edgewater.base.streams.Delivery for the source {source.name}"
            raise InvalidConfig(path, source.delivery, accepted)
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
        with _errors_below(f"streams.{given[0][1].stream}.sources.{kind}"):
            for receiver in build(given) if build is not None else ():
                if any(receiver.path == other.path for other in result):
                    raise InvalidConfig("", receiver.path, "a path of its own")
                result.append(receiver)
    return result


@contextmanager
def _errors_below(path: str) -> Iterator[None]:
    """Puts a path before the fields of `InvalidConfig`."""
    try:
        yield
    except InvalidConfig as exc:
        field = exc.field if exc.field.startswith("streams.") else f"{path}.{exc.field}".rstrip(".")
        raise InvalidConfig(field, exc.value, exc.accepted, exc.reason) from exc


def file_opener(file: FileConfig, schema: RecordSchema) -> OpenReader:
    """Returns the function that opens the files of a configured file source."""
    if file.format == "parquet":
        return parquet_opener(schema)
    return text_opener(file.text_format(schema), file.compression)
