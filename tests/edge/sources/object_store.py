"""As much of S3 as the Kafka broker of the tests needs to find its data again after a kill."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from hashlib import md5
from typing import Self
from xml.sax.saxutils import escape

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sim.demo.ports import free_port
from tests.brokers import BUCKET, TIMEOUT_S


class ObjectStore:
    """The objects are in this process. `environ` is for the broker."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        port = free_port()
        self.environ: Mapping[str, str] = {
            "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip
        methods = ["GET", "PUT", "HEAD", "DELETE"]
        routes = [Route(f"/{BUCKET}", self._list), Route(f"/{BUCKET}/{{key:path}}", self._object, methods=methods)]
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
