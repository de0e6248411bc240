"""Pages for browsers: security headers on every response, and the API's documentation from the same origin."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.datastructures import MutableHeaders
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.types import ASGIApp, Message, Scope

from center.api.access import OPEN
from center.api.problems import HttpProblem
from center.api.responses import OnStart, ResponseMiddleware

PAGES = ("/docs", "/ui")
"""Paths of pages. All other responses are data, which browsers must neither run nor show in a frame."""
PAGE_POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'"
)
DATA_POLICY = "default-src 'none'; frame-ancestors 'none'"
HSTS = "max-age=31536000"
SWAGGER = files("fastapi_offline") / "static"
SWAGGER_FILES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css", "favicon.png": "image/png"}
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


class SecurityHeaders(ResponseMiddleware):
    """Middleware: headers by which browsers protect their users. Data is not cached unless its endpoint says so."""

    def __init__(self, app: ASGIApp, *, over_tls: bool) -> None:
        super().__init__(app)
        self._over_tls = over_tls

    def begin(self, scope: Scope) -> OnStart:
        """Implements `ResponseMiddleware.begin`."""
        is_page = any(scope["path"] == p or scope["path"].startswith(f"{p}/") for p in PAGES)

        async def guard(start: Message) -> None:
            headers = MutableHeaders(scope=start)
            headers["Content-Security-Policy"] = PAGE_POLICY if is_page else DATA_POLICY
            headers["X-Content-Type-Options"] = "nosniff"
            headers["Referrer-Policy"] = "no-referrer"
            headers["Cross-Origin-Resource-Policy"] = "same-origin"
            headers.setdefault("Cache-Control", "no-store")
            if self._over_tls:
                headers["Strict-Transport-Security"] = HSTS

        return guard


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
