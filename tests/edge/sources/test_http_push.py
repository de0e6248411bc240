import asyncio
import gzip
import json
from typing import Any

import httpx
import pyarrow as pa
import pytest
import zstandard

from edge.records import Chunk
from edge.sources.receiving import Unavailable
from edgewater.base.errors import StorageError
from tests.edge.sources.push_edge import PushEdge

NDJSON = {"content-type": "application/x-ndjson"}
JSON = {"content-type": "application/json"}
CSV = {"content-type": "text/csv; charset=utf-8"}
ARROW = {"content-type": "application/vnd.apache.arrow.stream"}
PATH = "/v1/streams/flights"


COLUMNS = {"carrier": "string", "distance": "int64", "delay": "float64", "late": "bool"}


class Agent(PushEdge):
    """An edge that takes chunks once `durable` is set."""

    def __init__(self, arrival_ms: int, http: object = None, tokens: tuple[str, ...] = (), **limits: object) -> None:
        stream = {"columns": COLUMNS, "time": {"column": "t"}, "sources": [{"http": http}]}
        streams = {"flights": stream, "quiet": {**stream, "sources": [{"stdin": None}]}}
        super().__init__(streams, arrival_ms, {"tokens": list(tokens)}, **limits)
        self.durable, self.entered = asyncio.Event(), asyncio.Event()
        self.durable.set()
        self.failure: Exception | None = None
        self.counted: int | None = None

    async def accept(self, chunk: Chunk, stream: str) -> int | None:
        self.entered.set()
        if self.failure is not None:
            raise self.failure
        await super().accept(chunk, stream)
        await self.durable.wait()
        return self.counted

    def push_id(self, body: Any, **headers: str) -> Any:
        """Pushes a body; returns the identity that its chunk has."""
        assert self.push(body, NDJSON | {name.replace("_", "-"): value for name, value in headers.items()}).is_success
        return self.taken[-1][1].push

    def push(self, body: Any, headers: dict[str, str] = NDJSON, path: str = PATH) -> httpx.Response:
        return self.sent(path, body, headers)


@pytest.fixture
def agent(arrival_ms: int) -> Agent:
    return Agent(arrival_ms)


def problem(response: httpx.Response, status: int, code: str) -> str:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (body["status"], body["type"]) == (status, f"https://edgewater.dev/problems/{code}")
    return str(body["detail"])


def test_records_are_taken_and_counted(agent: Agent, ndjson: Any) -> None:
    response = agent.push(ndjson(0, 3))
    assert (response.status_code, response.json()) == (200, {"accepted": 3, "rejected": [], "already_counted": False})
    ((stream, chunk),) = agent.taken
    assert (stream, chunk.source) == ("flights", "flights:http")
    assert chunk.batch.column("distance").to_pylist() == [0, 1, 2]


def test_bad_records_are_named_in_the_reply_and_the_others_taken(agent: Agent, ndjson: Any) -> None:
    response = agent.push(ndjson(0, 2) + "oops\n" + ndjson(2, 3))
    assert response.json()["accepted"] == 3
    (rejected,) = response.json()["rejected"]
    assert (rejected["reason"], rejected["count"], rejected["example"]) == ("malformed", 1, "oops")
    assert agent.taken[0][1].rejected[0].reason == "malformed"


@pytest.mark.parametrize(
    ("body", "headers"),
    [(b"", NDJSON), (b"\n \n", NDJSON), (b"[]", JSON), (b" [ ]\n", JSON), (b"", JSON), (b"", CSV), (b"", ARROW),
     (b"carrier,distance,delay,late,t\n", CSV)],
)  # fmt: skip
def test_a_push_without_a_record_is_accepted(agent: Agent, body: bytes, headers: dict[str, str]) -> None:
    response = agent.push(body, headers)
    assert (response.status_code, response.json()) == (200, {"accepted": 0, "rejected": [], "already_counted": False})


def test_each_element_of_a_json_array_is_a_record_of_its_own(agent: Agent, ndjson: Any, arrival_ms: int) -> None:
    good = ndjson(0, 2).splitlines()
    body = f'[\n  {good[0]},\n 7, {{"t": "x"}}, {{"t": {arrival_ms},\n"carrier": "\\ud800"}} , {good[1]}\n]\n'
    response = agent.push(body, JSON)
    assert response.json()["accepted"] == 2
    assert sum(each["count"] for each in response.json()["rejected"]) == 3
    assert agent.taken[0][1].batch.column("distance").to_pylist() == [0, 1]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_one_indented_object_is_one_record_also_after_the_mark_of_utf_8(agent: Agent, ndjson: Any, mark: str) -> None:
    record = json.loads(ndjson(3, 4))
    for body in (
        json.dumps(record, indent=2),
        json.dumps(record, indent="\t").replace("\n", "\r\n"),
        json.dumps([record]),
    ):
        response = agent.push((mark + body).encode(), JSON)
        assert (response.json()["accepted"], response.json()["rejected"]) == (1, [])
    assert [taken[1].batch.column("distance").to_pylist() for taken in agent.taken] == [[3]] * 3


def test_an_object_that_is_cut_off_costs_only_its_lines(agent: Agent, ndjson: Any) -> None:
    response = agent.push("{\n" + ndjson(0, 2), JSON)
    assert response.json()["accepted"] == 2
    assert [each["count"] for each in response.json()["rejected"]] == [1]


@pytest.mark.parametrize("body", ["[", "[1", "[1,", "[1,]", "[,]", "[1 2]", "[] x", "[{]", "[" * 100_000])
def test_a_json_array_that_is_not_whole_is_refused(agent: Agent, body: str) -> None:
    problem(agent.push(body, JSON), 422, "invalid-record")
    assert agent.taken == []


@pytest.mark.parametrize("encoding", ["snappy", "deflate", "br", "gzip, gzip", "x" * 200])
def test_an_encoding_that_is_not_known_is_refused_and_the_known_ones_are_named(agent: Agent, encoding: str) -> None:
    response = agent.push("x", {**NDJSON, "content-encoding": encoding})
    assert "expected gzip or zstd or identity" in problem(response, 415, "unsupported-media-type")
    assert response.headers["accept-encoding"] == "gzip, zstd, identity"


def test_a_push_of_which_no_record_can_be_read_is_an_error_and_its_records_are_counted(agent: Agent) -> None:
    response = agent.push("oops\n" * 3)
    assert "none of 3 records can be read: not JSON" in problem(response, 422, "invalid-record")
    (rejected,) = response.json()["rejected"]
    assert (response.json()["accepted"], rejected["reason"], rejected["count"]) == (0, "malformed", 3)
    assert agent.taken[0][1].rejected[0].count == 3


def test_csv_arrow_and_gzip_are_read_by_their_headers(agent: Agent, ndjson: Any, arrival_ms: int) -> None:
    csv = "t,carrier,distance,delay,late\n1700000000000,AA,7,,\n"
    table = pa.table(
        {"t": [arrival_ms], "carrier": ["AA"], "distance": pa.array([8], pa.int16()), "delay": [1.0], "late": [True]}
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    zipped = gzip.compress(ndjson(9, 10).encode()) + gzip.compress(ndjson(10, 11).encode()) + bytes(99)
    for body, headers in (
        (csv, CSV),
        (sink.getvalue().to_pybytes(), ARROW),
        (zipped, {**NDJSON, "content-encoding": "gzip"}),
        (zstandard.compress(ndjson(11, 12).encode()), {**NDJSON, "content-encoding": "zstd"}),
    ):
        assert agent.push(body, headers).status_code == 200
    assert [n for _, chunk in agent.taken for n in chunk.batch.column("distance").to_pylist()] == [7, 8, 9, 10, 11]


def test_a_body_of_several_blocks_is_taken_as_one_chunk(agent: Agent, ndjson: Any) -> None:
    assert agent.push(ndjson(0, 25_000)).json()["accepted"] == 25_000
    ((_, chunk),) = agent.taken
    assert chunk.batch.column("distance").to_pylist() == list(range(25_000))


def test_the_reply_comes_only_when_the_records_are_durable(agent: Agent, ndjson: Any) -> None:
    async def run() -> None:
        agent.durable.clear()
        reply = asyncio.ensure_future(agent.send(PATH, ndjson(0, 1), NDJSON))
        await asyncio.wait_for(agent.entered.wait(), 60)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not reply.done()
        agent.durable.set()
        assert (await asyncio.wait_for(reply, 60)).status_code == 200

    asyncio.run(run())


def test_a_stream_without_http_source_is_not_found_and_the_reply_names_those_with_one(agent: Agent) -> None:
    for path in ("/v1/streams/trains", "/v1/streams/quiet"):
        assert "streams that accept them: flights" in problem(agent.push("", path=path), 404, "not-found")


def test_lines_of_text_are_read_in_the_format_of_the_source_and_refused_without_one(arrival_ms: int) -> None:
    line = f't={arrival_ms} distance=7 carrier="A A"\n'
    plain = {"content-type": "text/plain; charset=utf-8"}
    agent = Agent(arrival_ms, http={"format": "logfmt"})
    assert agent.push(line + "oops\n", plain).json()["accepted"] == 1
    assert agent.taken[0][1].batch.column("carrier").to_pylist() == ["A A"]
    problem(Agent(arrival_ms).push(line, plain), 415, "unsupported-media-type")


def test_another_media_type_is_refused_and_the_right_ones_named(agent: Agent) -> None:
    detail = problem(agent.push("x", {"content-type": "text/html"}), 415, "unsupported-media-type")
    assert all(kind in detail for kind in ("application/x-ndjson", "application/json", "text/csv", "text/plain"))


@pytest.mark.parametrize(
    ("body", "headers", "says"),
    [
        (b"t,carrier\n", CSV, "missing column"),
        (b"not arrow", ARROW, "an Arrow IPC stream"),
        (b"not gzip", {**NDJSON, "content-encoding": "gzip"}, "gzip data, as Content-Encoding says"),
        (b"not zstd", {**NDJSON, "content-encoding": "zstd"}, "one frame of zstd"),
        (zstandard.compress(b"{}" * 99)[:-5], {**NDJSON, "content-encoding": "zstd"}, "it is cut off"),
        (zstandard.compress(b"{}") * 2, {**NDJSON, "content-encoding": "zstd"}, "it goes on after the frame"),
        (gzip.compress(b"{}" * 99, mtime=0)[:-5], {**NDJSON, "content-encoding": "gzip"}, "the data is cut off"),
    ],
)
def test_a_body_that_cannot_be_used_as_a_whole_is_refused(
    agent: Agent, body: bytes, headers: dict[str, str], says: str
) -> None:
    assert says in problem(agent.push(body, headers), 422, "invalid-record")
    assert agent.taken == []


def test_a_damaged_arrow_body_is_refused_and_does_not_crash(agent: Agent, arrival_ms: int) -> None:
    table = pa.table(
        {"t": [arrival_ms], "carrier": ["AA"], "distance": [1], "delay": [1.0], "late": [True]}
    )  # fmt: skip
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    whole = sink.getvalue().to_pybytes()
    damaged = whole.replace(b"AA", b"\xff\xff", 1)
    assert damaged != whole
    problem(agent.push(damaged, ARROW), 422, "invalid-record")
    problem(agent.push(whole[: len(whole) // 2], ARROW), 422, "invalid-record")


def test_a_body_over_the_limit_is_refused_announced_or_not_packed_or_not(arrival_ms: int, ndjson: Any) -> None:
    agent = Agent(arrival_ms, max_push_bytes=1000)
    body = ndjson(0, 100).encode()

    async def in_parts() -> Any:
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    for sent, headers in (
        (body, NDJSON),
        (in_parts(), NDJSON),
        (gzip.compress(body), {**NDJSON, "content-encoding": "gzip"}),
        (zstandard.compress(body), {**NDJSON, "content-encoding": "zstd"}),
    ):
        assert "longer than 1000 bytes" in problem(agent.push(sent, headers), 413, "too-large")
    assert agent.taken == []
    assert agent.push(ndjson(0, 5)).status_code == 200


def test_an_unavailable_agent_sends_retry_after(agent: Agent, ndjson: Any) -> None:
    agent.unavailable = [Unavailable("no queries known yet", retry_after_s=3)]
    response = agent.push(ndjson(0, 1))
    assert problem(response, 503, "unavailable") == "no queries known yet"
    assert response.headers["retry-after"] == "3"


def test_a_journal_that_fails_is_no_positive_reply(agent: Agent, ndjson: Any) -> None:
    agent.failure = StorageError("the disk is full")
    response = agent.push(ndjson(0, 1))
    assert problem(response, 503, "storage") == "the disk is full"
    assert response.headers["retry-after"] == "1"


def test_bodies_that_wait_are_bounded(arrival_ms: int, ndjson: Any) -> None:
    agent = Agent(arrival_ms, max_push_bytes=1000)
    body = ndjson(0, 8).ljust(1000)

    async def run() -> None:
        agent.durable.clear()
        waiting = [asyncio.ensure_future(agent.send(PATH, body, NDJSON)) for _ in range(4)]
        while len(agent.taken) < 4:
            agent.entered.clear()
            await asyncio.wait_for(agent.entered.wait(), 60)
        async with agent.client() as client:
            turned_away = await client.post(PATH, content=body, headers=NDJSON)
        assert "take 4000 bytes; the limit is 4000" in problem(turned_away, 429, "too-many-requests")
        assert turned_away.headers["retry-after"] == "1"
        agent.durable.set()
        replies = await asyncio.wait_for(asyncio.gather(*waiting), 60)
        assert [reply.status_code for reply in replies] == [200] * 4

    asyncio.run(run())
    assert json.loads(agent.push(body).text)["accepted"] == 8


def test_a_dictionary_that_would_expand_beyond_the_limit_is_refused(arrival_ms: int) -> None:
    agent = Agent(arrival_ms, max_push_bytes=10_000)
    rows = 1_000
    carrier = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int8()), pa.array(["x" * 1_000]))
    batch = pa.record_batch(
        {
            "t": pa.array([arrival_ms] * rows), "carrier": carrier, "distance": pa.array([1] * rows),
            "delay": pa.array([0.5] * rows), "late": pa.array([False] * rows),
        }
    )  # fmt: skip
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    body = sink.getvalue().to_pybytes()
    assert len(body) < 10_000
    problem(agent.push(body, ARROW), 413, "too-large")
    assert agent.taken == []


def test_a_batch_that_was_counted_before_says_so_with_the_number_of_its_records(agent: Agent, ndjson: Any) -> None:
    agent.counted = 3
    reply = agent.push(ndjson(0, 3))
    assert (reply.status_code, reply.json()) == (200, {"accepted": 3, "rejected": [], "already_counted": True})


def test_without_a_key_a_repetition_has_the_same_body_and_client(arrival_ms: int, ndjson: Any) -> None:
    agent = Agent(arrival_ms, tokens=("first", "second"))
    first, second = {"authorization": "Bearer first"}, {"authorization": "Bearer second"}
    body = ndjson(0, 3)
    push = agent.push_id(body, **first)
    assert agent.push_id(body, **first) == push
    packed = gzip.compress(body.encode(), mtime=arrival_ms // 1000)
    assert agent.push_id(packed, content_encoding="gzip", **first) == push, "gzip data has a time"
    for other in (agent.push_id(body, **second), agent.push_id(ndjson(0, 4), **first)):
        assert other.key != push.key


def test_a_key_says_which_batches_are_the_same_and_belongs_to_a_token(arrival_ms: int, ndjson: Any) -> None:
    agent = Agent(arrival_ms, tokens=("first", "second"))
    body = ndjson(0, 3)
    keyed = {"authorization": "Bearer first", "idempotency_key": "a"}
    push = agent.push_id(body, **keyed)
    assert agent.push_id(body, **keyed) == push
    again = agent.push_id(ndjson(0, 4), **keyed)
    assert (again.key, again.body == push.body) == (push.key, False)
    for other in ({"idempotency_key": "b"}, {"authorization": "Bearer second"}):
        assert agent.push_id(body, **(keyed | other)).key != push.key


def test_equal_bodies_are_different_batches_where_only_keys_count(arrival_ms: int, ndjson: Any) -> None:
    agent = Agent(arrival_ms, http={"dedupe": "key"})
    assert agent.push_id(ndjson(0, 3)) is None
    assert agent.push_id(ndjson(0, 3), idempotency_key="a") is not None


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_a_key_that_is_none_is_refused(agent: Agent, ndjson: Any, key: str) -> None:
    problem(agent.push(ndjson(0, 3), NDJSON | {"idempotency-key": key}), 422, "invalid-request")
    assert agent.taken == []
