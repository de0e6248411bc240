"""The path of an edge from a file to its core: source, decoder, journal, core, on one processor core."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from bench.first_light.edge_rates import COLUMNS, QUERY
from edge.config import parse_config
from edge.core.core import EdgeCore
from edge.core.events import Configured, Ingested, SourcesOpened
from edge.core.streams import StreamSpec
from edge.durability import DurableCore
from edge.process import now_ms
from edge.records import Source
from edge.sources.factory import build_sources
from edgewater.base.streams import type_name
from edgewater.wire import QueryRef


def ndjson(path: Path, records: int) -> dict[str, float]:
    """Returns records/s from an NDJSON file: decoding only, and with journal and core."""
    decoding = asyncio.run(_read(_source(path), None))
    durable = DurableCore(path.parent / "state", lambda: EdgeCore({"access": StreamSpec(COLUMNS)}), _never, "bench")
    durable.handle(SourcesOpened((("access", "file"),)))
    durable.handle(Configured(((QueryRef("bytes_by_url", 1), QUERY),)))
    whole = asyncio.run(_read(_source(path), durable))
    assert durable.core.streams["access"].records == records
    durable.close()
    return {"ndjson_decode_records_s": records / decoding, "ndjson_records_s": records / whole}


def _source(path: Path) -> Source:
    stream = {
        "columns": {name: type_name(t) for name, t in COLUMNS.items()},
        "time": {"column": "at", "unit": "ms"},
        "sources": [{"file": {"path": str(path), "format": "ndjson"}}],
    }
    config = parse_config({"edge": "bench", "state_dir": str(path.parent), "streams": {"access": stream}})
    (source,) = build_sources(config, {}, now_ms=now_ms)
    return source


async def _read(source: Source, durable: DurableCore | None) -> float:
    began = time.perf_counter()
    async for chunk in source.chunks(None):
        assert not chunk.rejected, chunk.rejected
        if durable is not None and chunk.end is not None:
            event = Ingested("access", "file", chunk.batch, now_ms())
            durable.ingest_range(event, chunk.start, chunk.end)
            if durable.unsynced_bytes > 1 << 16:
                await asyncio.to_thread(durable.sync)
    return time.perf_counter() - began


def _never(*_: object) -> object:
    raise AssertionError("nothing is recovered here")
