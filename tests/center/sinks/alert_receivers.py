"""Systems that get the notices of alerts in tests: a web server and a mail server."""

from __future__ import annotations

import json
import ssl
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


class Receiver:
    """A web server that keeps what it gets, and replies with `status`, as soon as `replies` is set."""

    def __init__(self, tls: Path | None = None) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.status = 200
        self.replies = threading.Event()
        self.replies.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.replies.wait(30)
                if receiver.status == 200:
                    receiver.got.append((dict(self.headers), body))
                self.send_response(receiver.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        scheme = "http"
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls / "server.pem", tls / "server.key")
            self.server.socket = context.wrap_socket(
                self.server.socket, server_side=True, do_handshake_on_connect=False
            )
            scheme = "https"
        self.url = f"{scheme}://127.0.0.1:{self.server.server_port}/hook?token=secret"

    @property
    def notices(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]

    @contextmanager
    def serving(self) -> Iterator[Receiver]:
        thread = threading.Thread(target=self.server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.replies.set()
            self.server.shutdown()
            thread.join()
            self.server.server_close()


class MailServer:
    """A mail server that wants a login over TLS, unless `tls` is None. It refuses the receivers `refuses`.

    Attributes:
        mails: the envelopes that it has accepted.
    """

    def __init__(self, port: int, tls: Path | None = None, *, is_implicit: bool = False) -> None:
        controllers = pytest.importorskip("aiosmtpd.controller")
        results = pytest.importorskip("aiosmtpd.smtp").AuthResult
        self.mails: list[Any] = []
        self.refuses: set[str] = set()
        self.reply = "250 OK"
        server = self

        class Handler:
            async def handle_RCPT(  # noqa: N802
                self, _server: Any, _session: Any, envelope: Any, address: str, _options: Any
            ) -> str:
                if address in server.refuses:
                    return "550 no such mailbox"
                envelope.rcpt_tos.append(address)
                return "250 OK"

            async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802
                if server.reply.startswith("250"):
                    server.mails.append(envelope)
                return server.reply

        def login(_server: Any, _session: Any, _envelope: Any, _mechanism: str, data: Any) -> Any:
            return results(success=(data.login, data.password) == (b"ops", b"pass word"), handled=False)

        options: dict[str, Any] = {"hostname": "127.0.0.1", "port": port}
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls / "server.pem", tls / "server.key")
            if is_implicit:
                options |= {"ssl_context": context, "auth_require_tls": False}
            else:
                options |= {"tls_context": context, "require_starttls": True}
            options |= {"authenticator": login, "auth_required": True}
        self.controller = controllers.Controller(Handler(), **options)

    @contextmanager
    def serving(self) -> Iterator[MailServer]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # with TLS from the start, it warns of a login without STARTTLS
            self.controller.start()
            try:
                yield self
            finally:
                self.controller.stop()
