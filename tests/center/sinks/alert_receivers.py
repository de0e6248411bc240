"""The web servers that get the notices of alerts, and the series of remote write, in tests."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import cramjam

from edgewater.wire import remote_write_pb2 as pb


class Receiver:
    """A web server that keeps what it gets, and replies with `status`, as soon as `replies` is set.

    Attributes:
        asked: the number of requests, also of those that wait for a reply.
    """

    def __init__(self, tls: Path | None = None) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.status, self.reply, self.asked = 200, b"", 0
        self.replies = threading.Event()
        self.replies.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if len(body) < int(self.headers["Content-Length"]):
                    return  # the sender was killed
                receiver.asked += 1
                receiver.replies.wait(30)
                self.send_response(receiver.take(dict(self.headers), body))
                self.send_header("Content-Length", str(len(receiver.reply)))
                self.end_headers()
                self.wfile.write(receiver.reply)

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

    def take(self, headers: dict[str, str], body: bytes) -> int:
        """Returns the status of the reply."""
        if self.status == 200:
            self.got.append((headers, body))
        return self.status

    @property
    def notices(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.got]

    @contextmanager
    def serving(self) -> Iterator[Self]:
        thread = threading.Thread(target=self.server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self.replies.set()
            self.server.shutdown()
            thread.join()
            self.server.server_close()


class SeriesReceiver(Receiver):
    """A receiver of remote write, which refuses what Prometheus refuses: another value of a series at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[tuple[tuple[str, str], ...], dict[int, float]] = {}

    def take(self, headers: dict[str, str], body: bytes) -> int:
        found = []
        for raw in pb.WriteRequest.FromString(bytes(cramjam.snappy.decompress_raw(body))).timeseries:
            series = pb.TimeSeries.FromString(raw)
            labels = [pb.Label.FromString(label) for label in series.labels]
            (sample,) = series.samples
            found.append((tuple((x.name, x.value) for x in labels), sample.timestamp, sample.value))
        for labels_, at, value in found:
            if self.samples.get(labels_, {}).get(at, value) != value:
                return 400
            self.samples.setdefault(labels_, {})[at] = value
        return 204

    def values(self, metric: str) -> list[float]:
        return sorted(v for s, each in self.samples.items() if dict(s)["__name__"] == metric for v in each.values())
