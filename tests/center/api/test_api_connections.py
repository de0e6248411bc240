"""Connections that cost without asking: silent, slow, too many, and clients that do not take what they asked for."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11
import httpx
import pytest
from starlette.responses import Response, StreamingResponse

from center.api.pages import PAGE_POLICY, SWAGGER_FILES
from edgewater.runtime.connections import SMALL_CHUNKS
from tests.certificates import make_certificates
from tests.waiting import until

WAIT_S = 60.0
REQUEST = b"GET /v1/queries HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def connect() -> Iterator[Callable[..., socket.socket]]:
    """Opens connections, which are closed at the end; a `window` bounds what the client's system takes unread."""
    with ExitStack() as stack:

        def connected(url: str, window: int | None = None) -> socket.socket:
            parts = urlsplit(url)
            connection = stack.enter_context(socket.socket())
            if window is not None:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
            connection.settimeout(WAIT_S)
            connection.connect((parts.hostname, parts.port))
            return connection

        yield connected


def read_all(connection: socket.socket) -> bytes:
    received = b""
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    return received


def refused(url: str, headers: dict[str, str] | None = None) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", headers=headers, timeout=WAIT_S).text
    found = re.findall(r'^edgewater_api_refused_total\{reason="([^"]+)"\} (\S+)', text, re.MULTILINE)
    return {reason: float(count) for reason, count in found}


def test_a_connection_that_sends_nothing_or_never_a_whole_header_is_closed(desk, connect):
    with desk.served(limits={"headers": "500ms"}) as url:
        done, kept, slow, silent = (connect(url) for _ in range(4))
        done.sendall(REQUEST + b"\r\n")
        slow.sendall(REQUEST)
        kept.sendall(b"POST /v1/edges HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n")
        slow.settimeout(0.02)
        began = time.monotonic()
        answer = b""
        while not answer and time.monotonic() - began < WAIT_S:  # a byte every 20 ms does not extend the deadline
            try:
                answer = slow.recv(1000)
            except TimeoutError:
                slow.sendall(b"x")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert read_all(silent) == b""
        assert read_all(done).startswith(b"HTTP/1.1 200 ")  # closed too, after its answer
        assert read_all(kept).startswith(b"HTTP/1.1 405 ")  # its body never comes
        assert refused(url) == {"silent": 3.0, "slow-headers": 1.0}


def test_silent_connections_never_keep_others_out(desk, connect):
    with desk.served(limits={"connections": 20}) as url:
        silent = [connect(url) for _ in range(100)]  # their clients keep them open
        assert httpx.get(f"{url}/livez", timeout=WAIT_S).status_code == 200
        assert refused(url)["connections"] >= 80
        assert len(silent) == 100


def test_a_body_that_does_not_arrive_is_answered_in_time(desk, connect):
    with desk.served(limits={"body": "100ms"}) as url:
        head = "POST /v1/queries HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/yaml\r\nContent-Length: 99\r\n\r\n"
        connection = connect(url)
        connection.sendall(head.encode())
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 0.1 s" in answer


POST = b"POST /v1/queries HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def events(monkeypatch) -> list[object]:
    """What servers of this process have parsed: the work that a connection has made."""
    parsed: list[object] = []
    next_event = h11.Connection.next_event

    def counting(self: h11.Connection) -> object:
        event = next_event(self)
        parsed.append(event)
        return event

    monkeypatch.setattr(h11.Connection, "next_event", counting)
    return parsed


@pytest.mark.parametrize("authorization", [b"", b"Authorization: Bearer secret\r\n"])
def test_a_body_of_one_byte_chunks_is_given_up_early(desk, connect, events, authorization):
    """Each chunk cost 7 µs of the event loop and more: 360 KB, also without a token, kept all others waiting."""
    with desk.served(principals={"ann": {"token": "secret", "role": "admin"}}) as url:
        connection = connect(url)
        with contextlib.suppress(ConnectionError):  # the server may close before it has taken all
            connection.sendall(POST + authorization + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 60_000)
        answer = read_all(connection)
        assert answer[:13] in (b"HTTP/1.1 400 ", b"HTTP/1.1 401 ", b"")  # a reset may overtake it
        assert len(events) < 2 * SMALL_CHUNKS
        assert httpx.get(f"{url}/livez", timeout=WAIT_S).status_code == 200


def test_a_body_of_lines_as_chunks_is_read(desk):
    document = json.dumps({"name": "q", "from": "flights", "measures": {"n": "count()"}, "window": {"tumbling": "1h"}})
    spaces = (b" " * 20 for _ in range(3000))  # JSON may have them, and each is a chunk
    with desk.served() as url:
        lines = itertools.chain(spaces, [document.encode()])
        given = httpx.post(f"{url}/v1/queries", content=lines, headers={"Content-Type": "application/json"})
        assert given.status_code == 201, given.text


def test_a_request_without_a_credential_is_answered_before_its_body_and_is_the_last_of_its_connection(desk, connect):
    with desk.served(principals={"ann": {"token": "secret"}}) as url:
        connection = connect(url)
        connection.sendall(POST + b"Content-Length: 1000000\r\n\r\n" + b"x" * 1000)
        answer = read_all(connection)  # until it is closed; the rest of the body never comes
        assert answer.startswith(b"HTTP/1.1 401 ") and b"connection: close" in answer.lower()
        with httpx.Client() as client:
            for _ in range(20):  # a client that sends head and body apart is told why
                assert client.post(f"{url}/v1/queries", content=b"{}" * 5000).status_code == 401
        alive = connect(url)
        alive.sendall(REQUEST + b"\r\n" + REQUEST + b"Connection: close\r\n\r\n")
        assert read_all(alive).count(b"HTTP/1.1 401 ") == 2, "without a body the connection stays"


def test_a_request_with_two_lengths_has_one_response_and_nothing_after_it_is_a_request(desk, connect):
    with desk.served() as url:
        connection = connect(url)
        smuggled = b"GET /v1/edges HTTP/1.1\r\nHost: localhost\r\n\r\n"
        two = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(smuggled))
        connection.sendall(POST + two + smuggled)
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1 ") == 1
        assert refused(url) == {"malformed": 1.0}


def received_from(connection: socket.socket) -> bytes:
    part = connection.recv(1 << 16)
    assert part, "the connection was closed"
    return part


@pytest.mark.slow
def test_a_client_that_takes_nothing_is_closed_and_its_response_with_it(desk, connect):
    """The body is larger than any buffer between the two: a page of Swagger UI, many times."""
    with desk.served(limits={"body": "150ms", "headers": "150ms"}) as url:
        reader = connect(url, window=4096)
        request = b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
        reader.sendall(request * 20)
        until(lambda: refused(url).get("slow-reader", 0) >= 1)
        assert len(read_all(reader)) < 20 * 1_400_000


def test_a_server_that_stops_closes_a_client_that_takes_nothing_without_a_fault(desk, connect, monkeypatch, caplog):
    monkeypatch.setattr("center.api.server.GRACE_S", 0.5)
    app = desk.app()
    monkeypatch.setattr(desk, "app", lambda: app)

    @app.get("/endless")
    def endless() -> Response:
        return StreamingResponse(itertools.repeat(b"x" * (1 << 16)))

    with desk.served() as url:
        reader = connect(url, window=4096)
        reader.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert reader.recv(100)
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


def test_a_server_that_stops_serves_its_clients_until_they_have_left(desk, connect, monkeypatch):
    """Each response asks them to leave. A connection that the server closed could have a request on its way."""
    monkeypatch.setattr("center.api.server.DRAIN_S", WAIT_S)
    with ExitStack() as serving:
        url = serving.enter_context(desk.served())
        idle, stopping = connect(url), threading.Thread(target=serving.close)
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            assert "connection" not in client.get("/v1/queries").headers
            stopping.start()
            until(lambda: client.get("/v1/queries").raise_for_status().headers.get("connection") == "close")
            assert client.get("/v1/queries").status_code == 200, "by a new connection"
        idle.close()
        stopping.join()


def test_streams_are_limited_per_principal_and_together(desk, two_hours):
    people = {name: {"token": name} for name in ("ann", "bob", "eve")}
    limits = {"live": 3, "live_per_principal": 2}
    with desk.served(principals=people, limits=limits) as url, httpx.Client(timeout=WAIT_S) as client:

        def open_stream(name: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer {name}"}
            return client.send(client.build_request("GET", f"{url}/v1/live", headers=headers), stream=True)

        streams = [open_stream(name) for name in ("ann", "ann", "bob")]
        assert [s.status_code for s in streams] == [200, 200, 200]
        third, full = open_stream("ann"), open_stream("eve")
        assert (third.status_code, full.status_code) == (429, 503)
        assert third.headers["retry-after"] == full.headers["retry-after"] == "5"
        for stream in (*streams, third, full):
            stream.close()
        until(lambda: open_stream("eve").status_code == 200)
        counts = refused(url, {"Authorization": "Bearer ann"})
        assert counts["live-per-principal"] == 1 and counts["live"] >= 1


def test_a_live_stream_ends_with_the_credential_that_opened_it(desk, two_hours, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("center.api.app.REFRESH_S", 0.05)
    path = tmp_path / "principals.yaml"
    path.write_text("ann: {token: a}\n")
    with (
        desk.served(tokens_file=str(path), progress="100ms") as url,
        httpx.stream("GET", f"{url}/v1/live", headers={"Authorization": "Bearer a"}, timeout=WAIT_S) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines)
        path.write_text("ann: {token: b}\n")
        for _ in lines:  # ends
            pass


def test_responses_that_nobody_takes_leave_room_for_others(desk, connect):
    """Three quarters of the room are held by a client that does not read: the same response again has no room."""
    data = "x" * (3 << 20)
    app = desk.app(limits={"response_bytes": "4MiB"})

    @app.get("/large")
    def large() -> Response:
        return Response(data)

    async def ask() -> list[int]:
        taken = asyncio.Event()
        statuses: list[int] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            elif statuses == [200]:
                await taken.wait()  # as the server does for a client that does not read

        def request() -> Awaitable[None]:
            scope = {"type": "http", "method": "GET", "path": "/large", "query_string": b"", "headers": []}
            return app({**scope, "http_version": "1.1", "asgi": {"version": "3.0"}}, asyncio.Event().wait, send)

        first = asyncio.ensure_future(request())
        while not statuses:
            await asyncio.sleep(0)
        await request()
        taken.set()
        await first
        await request()
        return statuses

    assert asyncio.run(ask()) == [200, 503, 200]


def test_over_tls_a_renewed_certificate_is_used_without_a_restart(desk, tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.mkdir()
        make_certificates(path, {"center": "IP:127.0.0.1"})
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(path: Path) -> None:
        key.write_bytes((path / "center.key").read_bytes())
        cert.write_bytes((path / "center.pem").read_bytes())

    install(first)
    with desk.served(tls={"cert": str(cert), "key": str(key)}) as url:
        assert url.startswith("https://")
        given = httpx.get(f"{url}/v1/queries", verify=ssl.create_default_context(cafile=first / "ca.pem"))
        assert given.headers["strict-transport-security"] == "max-age=31536000"
        install(second)
        renewed = ssl.create_default_context(cafile=second / "ca.pem")

        def trusted() -> bool:
            try:
                return httpx.get(f"{url}/livez", verify=renewed).status_code == 200
            except httpx.ConnectError:
                return False

        until(trusted)


CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01"
"""The beginning of one of 512 bytes."""


def test_tls_handshakes_that_never_end_keep_nobody_out_and_are_closed(desk, connect, tmp_path: Path):
    make_certificates(tmp_path, {"center": "IP:127.0.0.1"})
    tls = {"cert": str(tmp_path / "center.pem"), "key": str(tmp_path / "center.key")}
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    with desk.served(tls=tls, limits={"connections": 20, "headers": "300ms"}) as url:
        begun = [connect(url) for _ in range(60)]
        for connection in begun[::2]:
            with contextlib.suppress(ConnectionError):
                connection.sendall(CLIENT_HELLO)
        with httpx.Client(verify=trusting) as client:
            assert client.get(f"{url}/livez").status_code == 200
        assert [read_all(connection) for connection in begun] == [b""] * 60
        text = httpx.get(f"{url}/metrics", verify=trusting).text
        ended = {r: float(n) for r, n in re.findall(r'api_refused_total\{reason="([^"]+)"\} (\S+)', text)}
        assert ended["connections"] >= 41 and ended["connections"] + ended["handshake"] >= 60


def test_a_request_that_comes_in_one_piece_with_the_end_of_the_handshake_is_answered(desk, connect, tmp_path: Path):
    make_certificates(tmp_path, {"center": "IP:127.0.0.1"})
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    tls = {"cert": str(tmp_path / "center.pem"), "key": str(tmp_path / "center.key")}
    with desk.served(tls=tls) as url:
        connection, received, to_send = connect(url), ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(received, to_send, server_hostname="127.0.0.1")
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(to_send.read())
                received.write(received_from(connection))
        client.write(REQUEST + b"\r\n")
        connection.sendall(to_send.read())
        answer = b""
        while not answer:
            received.write(received_from(connection))
            with contextlib.suppress(ssl.SSLWantReadError):  # a session ticket
                answer = client.read(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200 ")
        connection.close()


@pytest.mark.parametrize("path", ["/v1/queries", "/livez", "/nowhere", "/metrics", "/openapi.json"])
def test_data_is_neither_framed_nor_sniffed_nor_cached(desk, path):
    headers = desk.get(path).headers
    assert headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers and "strict-transport-security" not in headers


@pytest.mark.slow
def test_the_documentation_needs_no_other_origin_and_no_script_in_the_page(desk):
    page = desk.get("/docs")
    assert page.headers["content-security-policy"] == PAGE_POLICY
    assert "unsafe-eval" not in PAGE_POLICY and "script-src" not in PAGE_POLICY
    assert not re.search(r"https?://|<script>|<style|\son\w+=", page.text)
    linked = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {f"docs/{name}" for name in SWAGGER_FILES} | {"docs/start.js"} == set(linked)
    for path in linked:
        given = desk.get(f"/{path}")
        assert given.status_code == 200 and len(given.content) > 50
    assert desk.get("/docs/../pages.py").status_code == 404
    assert desk.get("/docs/__init__.py").status_code == 404
