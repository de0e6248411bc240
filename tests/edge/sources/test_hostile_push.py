"""Pushes that try to take more than their share: memory, CPU time, connections of others."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
from collections.abc import AsyncIterator
from typing import Any

import h11
import httpx
import numpy as np
import pyarrow as pa
import pytest
import uvicorn

from edge.codecs.schema import EventTime, RecordSchema
from edge.receivers import BodyTooCostly, BodyTooLarge
from edge.sources.http_body import ENCODINGS, MAX_GZIP_MEMBERS, BodyLimits, decode_body
from edge.sources.push_shares import DecodingThreads
from edgewater.base.errors import InvalidConfig, InvalidRecord
from edgewater.runtime.connections import SMALL_CHUNKS, ConnectionLimits, guarded
from edgewater.runtime.health import EmbeddedServer, listen
from tests.edge.sources.push_edge import PushEdge

NOW_MS = 1_700_000_000_000
SCHEMA = RecordSchema({"k": pa.string(), "x": pa.int64()}, EventTime("t"))
NDJSON = {"content-type": "application/x-ndjson"}
RECORD = b'{"t": %d, "k": "a", "x": 1}\n' % NOW_MS
PATH = "/v1/streams/s"


def decode(
    body: bytes, media: str = "ndjson", encoding: str = "identity", size: int = 1 << 20, cpu_s: float = 60.0
) -> Any:
    limits = BodyLimits(size, cpu_s)
    return decode_body(limits.of(ENCODINGS[encoding](body, size), NOW_MS), media, SCHEMA, "s")


def stream(*batches: pa.RecordBatch, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def records(rows: int, k: pa.Array | None = None) -> pa.RecordBatch:
    texts = k if k is not None else pa.array(["a"] * rows)
    return pa.record_batch({"t": np.full(rows, NOW_MS), "k": texts, "x": np.zeros(rows, np.int64)})


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_compressed_arrow_buffers_are_measured_before_they_are_decompressed(compression: str) -> None:
    body = stream(records(4_000_000, pa.array([""] * 4_000_000)), compression=compression)
    assert len(body) < 1 << 20
    pool = pa.default_memory_pool()
    before = pool.total_bytes_allocated()
    with pytest.raises(BodyTooLarge):
        decode(body, "arrow")
    assert pool.total_bytes_allocated() - before < 4 << 20, "they would take 80 MB"
    assert decode(stream(records(1000), compression=compression), "arrow").batch.num_rows == 1000


def test_a_compressed_dictionary_is_measured_too() -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), pa.array(["x" * 5_000_000]))
    body = stream(records(1, texts), compression="zstd")
    assert len(body) < 10_000
    with pytest.raises(BodyTooLarge):
        decode(body, "arrow")


def test_buffers_that_are_stored_uncompressed_in_a_compressed_message_are_read() -> None:
    rng = np.random.default_rng(1)
    batch = pa.record_batch({"t": np.full(9, NOW_MS), "k": pa.array(["a"] * 9), "x": rng.integers(0, 1 << 62, 9)})
    assert (
        decode(stream(batch, compression="zstd"), "arrow").batch.column("x").to_pylist()
        == batch.column("x").to_pylist()
    )


def test_views_that_share_one_long_text_are_measured_by_what_they_become() -> None:
    long = pa.array(["x" * 100_000]).cast(pa.string_view())
    _, view, text = long.buffers()
    views = pa.py_buffer(view.to_pybytes()[:16] * 5_000)
    body = stream(records(5_000, pa.Array.from_buffers(pa.string_view(), 5_000, [None, views, text])))
    assert len(body) < 1 << 20
    with pytest.raises(BodyTooLarge):
        decode(body, "arrow", size=1 << 20)
    assert decode(stream(records(2, pa.array(["a", "b"]).cast(pa.string_view()))), "arrow").batch.num_rows == 2
    assert decode(stream(records(0, pa.array([], pa.string_view())), records(1, long)), "arrow").batch.num_rows == 1


def test_any_damage_of_an_arrow_body_is_refused_as_a_record_that_is_not_valid() -> None:
    """Bytes of messages and metadata are changed one by one: no other error, and nothing that grows."""
    rng = np.random.default_rng(7)
    for body in (stream(records(3)), stream(records(3), compression="lz4")):
        for at in range(0, len(body), 3):
            damaged = bytearray(body)
            damaged[at] ^= int(rng.integers(1, 256))
            with contextlib.suppress(InvalidRecord, BodyTooLarge):
                decode(bytes(damaged), "arrow", size=1 << 16)


def test_gzip_members_are_bounded() -> None:
    empty = gzip.compress(b"", mtime=0)
    assert decode(gzip.compress(RECORD) * 3 + empty * 5, encoding="gzip").batch.num_rows == 3
    with pytest.raises(InvalidRecord, match=f"at most {MAX_GZIP_MEMBERS} gzip members"):
        decode(empty * (MAX_GZIP_MEMBERS + 1), encoding="gzip")
    assert decode(gzip.compress(RECORD * 5000), encoding="gzip").batch.num_rows == 5000
    with pytest.raises(BodyTooLarge):
        decode(gzip.compress(b" " * (2 << 20)), encoding="gzip")


def test_short_records_with_many_columns_are_measured_by_what_they_become() -> None:
    wide = RecordSchema({f"c{i}": pa.float64() for i in range(200)}, EventTime("t"))
    body = b'{"t":%d}\n' % NOW_MS * 10_000
    with pytest.raises(BodyTooLarge):
        decode_body(BodyLimits(len(body), 60.0).of(body, NOW_MS), "ndjson", wide, "s")


@pytest.mark.parametrize(("media", "body"), [("ndjson", b"x\n" * 10_000), ("arrow", stream(*[records(1)] * 50))])
def test_decoding_ends_once_its_cpu_time_is_used_up(media: str, body: bytes) -> None:
    """The clock advances by a second each time it is read."""
    seconds = itertools.count()

    def limits(cpu_s: float) -> BodyLimits:
        return BodyLimits(1 << 20, cpu_s, lambda: float(next(seconds)))

    decode_body(limits(1e6).of(body, NOW_MS), media, SCHEMA, "s")
    with pytest.raises(BodyTooCostly):
        decode_body(limits(20.0).of(body, NOW_MS), media, SCHEMA, "s")


class Edge(PushEdge):
    def __init__(self, http: dict[str, Any] | None = None, **limits: object) -> None:
        columns = {"k": "string", "x": "int64"}
        served = {"columns": columns, "time": {"column": "t"}, "sources": [{"http": None}]}
        super().__init__({"s": served}, NOW_MS, http, **limits)

    async def push(self, body: Any, **headers: str) -> httpx.Response:
        return await self.send(PATH, body, {**NDJSON, **headers})


def test_clients_that_announce_a_body_and_send_nothing_keep_nobody_out() -> None:
    edge = Edge(max_push_bytes=1000)
    silent = asyncio.Event()

    async def nothing() -> AsyncIterator[bytes]:
        await silent.wait()
        yield RECORD

    async def run() -> None:
        waiting = [asyncio.ensure_future(edge.push(nothing(), **{"content-length": "999"})) for _ in range(50)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert (await edge.push(RECORD)).status_code == 200
        silent.set()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(run())


def test_bodies_in_progress_share_the_memory_and_give_it_back() -> None:
    edge = Edge(max_push_bytes=1000)
    go_on = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b" " * 900
        await go_on.wait()
        yield RECORD

    async def run() -> None:
        waiting = [asyncio.ensure_future(edge.push(slow())) for _ in range(4)]
        for _ in range(100):
            await asyncio.sleep(0)
        refused = await edge.push(RECORD.ljust(500))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "take 3600 bytes; the limit is 4000" in refused.json()["detail"]
        go_on.set()
        assert {reply.status_code for reply in await asyncio.gather(*waiting)} == {200}
        assert (await edge.push(RECORD.ljust(1000))).status_code == 200

    asyncio.run(run())
    assert edge.refused == {"too-many-requests": 1}


def test_slow_bodies_of_one_token_holder_keep_no_other_out() -> None:
    """Over real sockets: a body that has arrived but for one byte holds its memory until it is there."""
    edge = Edge({"tokens": ["slow", "other", "third"]}, max_push_bytes=8000)

    async def run() -> None:
        with listen("127.0.0.1:0", "http.listen") as socket:
            server = EmbeddedServer(uvicorn.Config(edge.app, lifespan="off", log_level="error"))
            serving = asyncio.create_task(server.serve([socket]))
            port = socket.getsockname()[1]

            async def hold(token: str) -> asyncio.StreamReader:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST {PATH} HTTP/1.1\r\nHost: e\r\nAuthorization: bearer {token}\r\nContent-Length: 8000\r\n"
                writer.write(head.encode() + b"Content-Type: application/x-ndjson\r\n\r\n" + b" " * 7999)
                await writer.drain()
                writers.append(writer)
                return reader

            writers: list[asyncio.StreamWriter] = []
            slow = [await hold("slow") for _ in range(4)]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=NDJSON) as client:

                async def push(token: str) -> int:
                    body = RECORD.ljust(7000)
                    return (
                        await client.post(PATH, content=body, headers={"authorization": f"Bearer {token}"})
                    ).status_code

                while (refused := await push("slow")) == 200:  # until all four have arrived
                    await asyncio.sleep(0)
                assert refused == 429, "it has its part"
                assert [await push(token) for token in ("other", "third", "other")] == [200, 200, 200]
            assert b" 429 " in await slow[0].readline(), "the oldest of those who had most"
            for writer in writers:
                writer.write(b"\n")
            replies = [await reader.readline() for reader in slow[1:]]
            assert all(b" 200 " in reply or b" 422 " in reply for reply in replies), "the others go on"
            server.should_exit = True
            for writer in writers:
                writer.close()
            await serving

    asyncio.run(run())
    assert edge.refused["too-many-requests"] >= 2


def test_costly_bodies_of_one_client_delay_another_by_one_body() -> None:
    async def run() -> list[str]:
        threads, order, go_on = DecodingThreads(2), list[str](), asyncio.Event()

        async def decode(principal: str) -> None:
            async with threads.permit(principal):
                order.append(principal)
                await go_on.wait()

        tasks = [asyncio.ensure_future(decode("costly")) for _ in range(20)]
        await asyncio.sleep(0)
        assert order == ["costly", "costly"], "alone, it may have all"
        tasks.append(asyncio.ensure_future(decode("other")))
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[5].cancel()
        await asyncio.wait(tasks[:1])
        go_on.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(r, asyncio.CancelledError) for r in results) == 2
        async with threads.permit("costly"), threads.permit("costly"):
            return order

    order = asyncio.run(run())
    assert order[2] == "other" and len(order) == 20


def test_a_body_has_a_deadline() -> None:
    edge = Edge(push_timeout="100ms")

    async def stalled() -> AsyncIterator[bytes]:
        yield RECORD
        await asyncio.Event().wait()

    reply = asyncio.run(edge.push(stalled()))
    assert (reply.status_code, reply.json()["type"]) == (408, "https://edgewater.dev/problems/timeout")
    assert "limits.push_timeout" in reply.json()["detail"]
    assert edge.taken == []


def test_a_body_that_takes_too_much_cpu_time_is_refused_as_a_whole() -> None:
    edge = Edge(push_cpu="10ms")
    reply = asyncio.run(edge.push(RECORD + b"x\n" * 100_000))
    assert (reply.status_code, reply.json()["type"]) == (422, "https://edgewater.dev/problems/too-costly")
    assert (edge.taken, edge.refused) == ([], {"too-costly": 1})


def test_a_push_needs_a_token_that_is_configured() -> None:
    edge = Edge({"tokens": ["old-secret", "new-secret"]})
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic old-secret"}):
        reply = asyncio.run(edge.push(RECORD, **headers))
        assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert "secret" not in reply.text
    for token in ("old-secret", "new-secret"):
        assert asyncio.run(edge.push(RECORD, authorization=f"Bearer {token}")).status_code == 200
    assert edge.refused == {"unauthenticated": 3}


def test_another_machines_pushes_need_credentials() -> None:
    with pytest.raises(InvalidConfig, match=r"http.listen.*0.0.0.0:1.*http.tokens or http.tls.client_ca"):
        Edge({"listen": "0.0.0.0:1"})
    Edge({"listen": "0.0.0.0:1", "tokens": ["secret"]})
    Edge({"listen": "0.0.0.0:1", "tls": {"cert": "c", "key": "k", "client_ca": "ca"}})
    with pytest.raises(InvalidConfig, match=r"http\.tokens"):
        Edge({"tokens": "secret"})


def test_a_push_of_one_byte_chunks_is_given_up_early_and_one_of_lines_as_chunks_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over a real server, with the agent's options. 600 KB of such chunks kept the agent's session waiting for 2 s."""
    edge, parsed = Edge(), itertools.count()
    next_event = h11.Connection.next_event
    monkeypatch.setattr(h11.Connection, "next_event", lambda self: (next(parsed), next_event(self))[1])

    async def run() -> None:
        with listen("127.0.0.1:0", "http.listen") as socket:
            options = guarded(ConnectionLimits(), lambda reason: edge.count(reason))
            server = EmbeddedServer(uvicorn.Config(edge.app, lifespan="off", **options))
            serving = asyncio.create_task(server.serve([socket]))
            port = socket.getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST {PATH} HTTP/1.1\r\nHost: e\r\nContent-Type: {NDJSON['content-type']}\r\n"
            writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 100_000)
            with contextlib.suppress(ConnectionError):
                while await reader.read(1 << 16):
                    pass
            writer.close()
            assert next(parsed) < 2 * SMALL_CHUNKS
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=NDJSON) as client:
                reply = await client.post(PATH, content=_each(RECORD, 3000))
                assert (reply.status_code, reply.json()["accepted"]) == (200, 3000)
            server.should_exit = True
            await serving

    asyncio.run(run())
    assert edge.refused["malformed"] == 1
    assert [chunk.batch.num_rows for _, chunk in edge.taken] == [3000]


async def _each(piece: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield piece
