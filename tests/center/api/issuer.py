"""An OpenID Connect issuer on loopback, with keys made when a test runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jwt
import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from edgewater.runtime.health import EmbeddedServer, bound_address, listen


class Issuer:
    """Signs tokens, and serves its keys; `fetches` counts how often they were asked for."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fetches = 0
        self.keys: dict[str, ec.EllipticCurvePrivateKey] = {}
        self.is_down = False
        self.add_key("k1")

    def add_key(self, kid: str) -> None:
        self.keys[kid] = ec.generate_private_key(ec.SECP256R1())

    def token(self, kid: str = "k1", *, key: Any = None, algorithm: str = "ES256", **changes: Any) -> str:
        now = int(time.time())  # noqa: TID251  # jwt reads the clock
        claims = {"iss": self.url, "aud": "edgewater", "sub": "ann", "exp": now + 600, "roles": ["analysts"], **changes}
        kept = {k: v for k, v in claims.items() if v is not None}
        return jwt.encode(kept, key or self.keys[kid], algorithm, headers={"kid": kid})

    async def discovery(self, _: Request) -> Response:
        return JSONResponse({"issuer": self.url, "jwks_uri": f"{self.url}/keys"})

    async def jwks(self, _: Request) -> Response:
        self.fetches += 1
        if self.is_down:
            return Response(status_code=500)
        algorithm = jwt.algorithms.ECAlgorithm
        keys = [
            {**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": kid, "use": "sig"}
            for kid, key in self.keys.items()
        ]
        return JSONResponse({"keys": keys})


@contextmanager
def issuing() -> Iterator[Issuer]:
    """An issuer that serves while entered."""
    listener = listen("127.0.0.1:0", "issuer")
    issuer = Issuer(f"http://{bound_address(listener)}")
    routes = [Route("/.well-known/openid-configuration", issuer.discovery), Route("/keys", issuer.jwks)]
    pages = Starlette(routes=routes)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and "://" in scope["path"]:  # as a proxy is asked
            scope["path"] = "/" + scope["path"].partition("://")[2].partition("/")[2]
        await pages(scope, receive, send)

    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
    server = EmbeddedServer(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield issuer
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
