"""A secret is one line of a regular file, wherever it is configured. HTTP's messages quote nothing that was sent."""

from __future__ import annotations

import base64
import contextlib
import os
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

import httpx
import pytest

from center.config import CenterConfig
from center.sinks import read_definition
from edge.config import parse_config
from edgewater.base.errors import EdgewaterError, InvalidConfig
from edgewater.client import Center, connection
from edgewater.client.connection import Connection
from edgewater.client.requests import Unreachable
from edgewater.runtime.configuration import read_secret
from edgewater.runtime.http_exchange import MOST_REPLY_BYTES, ExchangeFailed, post
from edgewater.runtime.secret_files import MOST_BYTES, read_secret_file

STREAM = {"columns": {"n": "int64"}, "time": {"column": "at", "unit": "ms"}, "sources": [{"http": {}}]}
EDGE = {"edge": "jfk", "state_dir": "/tmp/x", "streams": {"s": STREAM}}


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def written(content: bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path.write_bytes(content)
        return path

    return write


BAD: dict[str, Callable[[Path], Path]] = {
    "zero": lambda _: Path("/dev/zero"),
    "fifo": fifo,
    "directory": lambda path: path.parent,
    "missing": lambda path: path,
    "two lines": written(b"top-secret\nX-Admin: 1\n"),
    "carriage return": written(b"top-secret\rX"),
    "nul": written(b"top-secret\0"),
    "not text": written(b"\xfftop-secret"),
    "empty": written(b"\n"),
    "large": written(b"a" * (MOST_BYTES + 1)),
}
READERS: dict[str, Callable[[dict[str, str]], Any]] = {
    "edge": lambda secret: parse_config({**EDGE, "center": {"token": secret}}),
    "pushes": lambda secret: parse_config({**EDGE, "http": {"tokens": [secret]}}),
    "api": lambda secret: CenterConfig.from_mapping({"api": {"token": secret}}),
    "principal": lambda secret: CenterConfig.from_mapping({"api": {"principals": {"p": {"token": secret}}}}),
    "tokens": lambda secret: CenterConfig.from_mapping({"tokens": {"jfk": secret}}),
    "catalog": lambda secret: CenterConfig.from_mapping({"catalog_url": secret}),
    "sink": lambda secret: read_definition("w", {"kind": "remote_write", "url": "http://a", "token": secret}),
    "webhook": lambda secret: read_definition(
        "w",
        {
            "kind": "alerts",
            "rules": [{"alert": "a", "query": "q", "contract": "broken"}],
            "targets": {"t": {"webhook": {"url": "http://a", "headers": {"Authorization": secret}}}},
        },
    ),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_secret_is_refused_at_once_and_not_quoted(tmp_path: Path, bad: str, reader: str) -> None:
    path = BAD[bad](tmp_path / "secret")
    with pytest.raises(InvalidConfig) as refused:
        READERS[reader]({"file": str(path)})
    assert "top-secret" not in str(refused.value)


@pytest.mark.parametrize("bad", BAD)
def test_the_client_refuses_it_too(tmp_path: Path, bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGEWATER_TOKEN", raising=False)
    monkeypatch.setenv("EDGEWATER_TOKEN_FILE", str(BAD[bad](tmp_path / "secret")))
    with pytest.raises(InvalidConfig) as refused:
        Connection(None, None, None, 1.0).open()
    assert "top-secret" not in str(refused.value)


@pytest.mark.parametrize("text", ["top-secret\nX: 1", "a\rb", "a\0b", "\n"])
@pytest.mark.parametrize("reader", READERS)
def test_a_text_and_a_variable_are_one_line_too(reader: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for secret in (text, {"env": "SECRET"}):
        if "\0" not in text:
            monkeypatch.setenv("SECRET", text)
        with pytest.raises(InvalidConfig) as refused:
            READERS[reader](secret)  # type: ignore[arg-type]
        assert "top-secret" not in str(refused.value)


def test_a_file_that_is_renewed_with_two_lines_keeps_the_last_secret(tmp_path: Path) -> None:
    path = written(b"first\n")(tmp_path / "secret")
    secret = read_secret({"file": str(path)}, {})
    assert secret is not None and secret.get_secret_value() == "first"
    path.write_text("second\nline\n")
    assert secret.get_secret_value() == "first"
    path.write_text("third")
    assert secret.get_secret_value() == "third"


def test_a_key_in_pem_has_lines(tmp_path: Path) -> None:
    path = written(b"-----BEGIN KEY-----\nabc\n-----END KEY-----\n")(tmp_path / "key")
    assert read_secret_file(path, is_pem=True).count("\n") == 2


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True


@contextmanager
def serving(answer: Callable[[Any], None]) -> Iterator[str]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            answer(self)

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("bad", ["zero", "fifo", "directory", "two lines", "large"])
def test_what_is_no_secret_leaves_no_file_open(tmp_path: Path, bad: str) -> None:
    path = BAD[bad](tmp_path / "secret")
    opened = sum(1 for _ in Path("/proc/self/fd").iterdir())
    with pytest.raises((OSError, ValueError)):
        read_secret_file(path)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == opened


@pytest.mark.parametrize("path", ["hooks/T0/top-secret", "hook?key=top-secret", "a%62/top%2Dsecret"])
def test_a_reply_that_quotes_the_url_shows_no_part_that_may_be_a_token(path: str) -> None:
    def echo(handler: Any) -> None:
        target = handler.request.recv(65_536).split()[1]
        said = target + b" is unknown: " + unquote_to_bytes(target)
        handler.wfile.write(b"HTTP/1.1 404 No\r\nContent-Length: %d\r\n\r\n" % len(said) + said)

    with serving(echo) as url, httpx.Client() as client:
        reply = post(client, url + path, b"", {}, 10.0)
    assert reply.text.count("…") == 2 and "is unknown" in reply.text
    assert "top" not in reply.text and "%2Dsecret" not in reply.text


def test_a_reply_without_an_end_is_read_to_a_limit() -> None:
    sent = []

    def endless(handler: Any) -> None:
        handler.request.recv(65_536)
        handler.wfile.write(b"HTTP/1.1 500 Broken\r\n\r\n")
        try:
            while True:
                sent.append(handler.request.send(b"a" * 65_536))
        except OSError:
            pass

    with serving(endless) as url, httpx.Client() as client:
        reply = post(client, url, b"", {}, 10.0)
    assert (reply.status, len(reply.text)) == (500, MOST_REPLY_BYTES)


def test_a_server_that_quotes_the_request_reveals_no_header() -> None:
    def echo(handler: Any) -> None:
        request = handler.request.recv(65_536)
        handler.wfile.write(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n%b" % (len(request), request))

    with serving(echo) as url, httpx.Client() as client:
        reply = post(client, url, b"why", {"Authorization": "Bearer top-secret"}, 10.0)
    assert reply.status == 400 and "POST" in reply.text and "top-secret" not in reply.text


@pytest.mark.parametrize("token", ["top-secret\nX: 1", "top-secret\u00fc", "top-secret\0"])
def test_a_header_that_cannot_be_sent_is_not_quoted(token: str) -> None:
    with httpx.Client() as client, pytest.raises(ExchangeFailed) as failed:
        post(client, "http://127.0.0.1:1/", b"", {"Authorization": f"Bearer {token}"}, 10.0)
    assert "top-secret" not in str(failed.value)


def test_a_refused_connection_is_named() -> None:
    with httpx.Client() as client, pytest.raises(ExchangeFailed) as failed:
        post(client, "http://127.0.0.1:1/", b"", {}, 1.0)
    assert "127.0.0.1" in str(failed.value) and "refused" in str(failed.value)


def test_a_reply_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(handler: Any) -> None:
        handler.request.recv(65_536)
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                handler.request.send(b" " * 65_536)

    monkeypatch.setattr(connection, "MAX_REPLY_BYTES", 1 << 20)
    with serving(endless) as url, pytest.raises(Unreachable):
        Center(url).edges()


def test_messages_of_the_client_show_no_password_of_its_url() -> None:
    heads = []

    def closing(handler: Any) -> None:
        heads.append(handler.request.recv(65_536))
        handler.wfile.write(b"HTTP/1.1 500 Broken\r\nContent-Length: 0\r\n\r\n")

    with serving(closing) as url:
        for address in (url, "http://127.0.0.1:1"):
            with Center(address.replace("//", "//me:top-secret@")) as center, pytest.raises(EdgewaterError) as failed:
                center.query("x").latest()
            assert "top-secret" not in f"{failed.value} {center!r}" and "127.0.0.1" in str(failed.value)
    assert b"Basic " + base64.b64encode(b"me:top-secret") in heads[0], "a proxy may need it"
