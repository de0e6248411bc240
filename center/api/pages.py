"""Pages for browsers: security headers on every response, and the API's documentation from the same origin."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.datastructures import MutableHeaders
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from center.api.access import OPEN
from center.api.problems import HttpProblem

PAGES = ("/docs", "/ui")
"""Paths of pages. All other responses are data, which browsers must neither run nor show in a frame."""
PAGE_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
DATA_POLICY = "default-src 'none'; frame-ancestors 'none'"
HSTS = "max-age=31536000"
SWAGGER = files("fastapi_offline") / "static"
SWAGGER_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
DOCS = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"><title>Edgewater – API</title>
<link rel="icon" href="docs/favicon.png"><link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div><script src="docs/swagger-ui-bundle.js"></script><script src="docs/start.js"></script>
</body>
</html>
"""
# In a separate file, because the policy allows no script in the page.
START = """SwaggerUIBundle({url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, docExpansion: "list"});
"""


class SecurityHeaders:
    """Middleware: headers by which browsers protect their users. Data is not cached unless its endpoint says so."""

    def __init__(self, app: ASGIApp, *, over_tls: bool) -> None:
        self._app = app
        self._over_tls = over_tls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_page = any(scope["path"] == p or scope["path"].startswith(f"{p}/") for p in PAGES)

        async def guarded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = PAGE_POLICY if is_page else DATA_POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
                headers["Cross-Origin-Resource-Policy"] = "same-origin"
                headers.setdefault("Cache-Control", "no-store")
                if self._over_tls:
                    headers["Strict-Transport-Security"] = HSTS
            await send(message)

        await self._app(scope, receive, guarded_send)


router = APIRouter(include_in_schema=False, dependencies=[OPEN])


@router.get("/docs")
async def docs() -> Response:
    return HTMLResponse(DOCS)


@router.get("/docs/{name}")
async def docs_file(name: str) -> Response:
    if name == "start.js":
        return Response(START, media_type="text/javascript", headers={"Cache-Control": "no-cache"})
    if name not in SWAGGER_FILES:
        raise HttpProblem("not-found", f"no resource at /docs/{name[:100]}; see /docs")
    headers = {"Cache-Control": "max-age=86400"}
    return FileResponse(str(SWAGGER / name), media_type=SWAGGER_FILES[name], headers=headers)
