import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from edge.codecs.schema import EventTime, RecordSchema
from edge.records import COALESCE_S, Chunk, Position, Source
from edge.source_kinds import SourceContext
from edge.sources.factory import build_source

ARRIVAL_MS = 1_700_000_000_000
COLUMNS = {"carrier": pa.string(), "distance": pa.int64(), "delay": pa.float64(), "late": pa.bool_()}


@pytest.fixture
def schema() -> RecordSchema:
    """Records as in the tests below; event times are ms in the column t."""
    return RecordSchema(COLUMNS, EventTime("t", "ms"))


@pytest.fixture
def arrival_ms() -> int:
    return ARRIVAL_MS


@dataclass
class World:
    """Builds file sources over a folder, with a clock that the test moves."""

    folder: Path
    schema: RecordSchema
    now_ms: int = ARRIVAL_MS
    slept: list[float] = field(default_factory=list)
    on_sleep: Callable[[int], None] = lambda count: None
    wait_s: float = COALESCE_S

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_ms += round(seconds * 1000)
        self.on_sleep(len(self.slept))
        await asyncio.sleep(0)

    def source(self, pattern: str, **options: Any) -> Source:
        from edge.config import SourceConfig

        given = SourceConfig.model_validate({"file": {"path": str(self.folder / pattern), **options}})
        return build_source(given, self.context)

    @property
    def context(self) -> SourceContext:
        return SourceContext(
            "flights", self.schema, lambda: self.now_ms, self.sleep, coalesce_s=lambda stream, source: self.wait_s
        )

    def write(self, name: str, data: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return path

    def append(self, name: str, data: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(data)


@pytest.fixture
def world(tmp_path: Path, schema: RecordSchema) -> World:
    return World(tmp_path, schema)


async def _collect(chunks: AsyncIterator[Chunk], limit: int | None) -> list[Chunk]:
    result: list[Chunk] = []
    if limit == 0:
        return result
    async for chunk in chunks:
        result.append(chunk)
        if len(result) == limit:
            break
    await chunks.aclose()  # type: ignore[attr-defined]
    return result


@pytest.fixture
def read() -> Callable[..., list[Chunk]]:
    """All chunks of a source from a position on, or the first `limit`."""

    def read(source: Source, position: Position | None = None, limit: int | None = None) -> list[Chunk]:
        return asyncio.run(asyncio.wait_for(_collect(source.chunks(position), limit), 30))

    return read


def record(number: int, **changes: object) -> dict[str, object]:
    base = {"t": ARRIVAL_MS + number, "carrier": f"c{number}", "distance": number, "delay": number / 2, "late": False}
    return {**base, **changes}


@pytest.fixture
def ndjson() -> Callable[..., str]:
    """Lines for records numbered `start` to `stop`: carrier c<n>, distance n, delay n/2."""
    import json

    def lines(start: int, stop: int) -> str:
        return "".join(json.dumps(record(n)) + "\n" for n in range(start, stop))

    return lines


@pytest.fixture
def numbers() -> Callable[[list[Chunk]], list[int]]:
    """The distances of all records, in order."""
    return lambda chunks: [n for chunk in chunks for n in chunk.batch.column("distance").to_pylist()]
