"""The console at `/ui`: its files, as the wheel has them, and one page for all of its addresses.

The files contain no data and need no credentials. The page calls the REST API with its user's credentials.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from center.api.access import OPEN
from center.api.negotiation import matches
from center.api.problems import HttpProblem

TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
PAGE = "index.html"
ROUTES = ("", "queries", "edges", "budget", "new", "edit", "dashboard")
"""First parts of the addresses that are pages (`center/api/ui/app.js`)."""


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """A file in the form that is sent."""

    body: bytes
    media_type: str
    etag: str


@cache
def console_files() -> dict[str, ConsoleFile]:
    """The files by path below `/ui/`."""
    by_path: dict[str, ConsoleFile] = {}

    def read(folder: Traversable, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                read(entry, f"{prefix}{entry.name}/")
            elif (kind := TYPES.get(entry.name.rpartition(".")[2])) is not None:
                body = entry.read_bytes()
                digest = hashlib.sha256(body).hexdigest()[:32]
                by_path[prefix + entry.name] = ConsoleFile(body, f"{kind}; charset=utf-8", f'"{digest}"')

    read(files("center.api") / "ui", "")
    return by_path


router = APIRouter(include_in_schema=False, dependencies=[OPEN])


@router.get("/")
@router.get("/ui")
async def start() -> Response:
    return RedirectResponse("/ui/", 307)


@router.get("/ui/{path:path}")
async def console(path: str, request: Request) -> Response:
    """A file of the console, or its page."""
    file = console_files().get(path)
    if file is None:
        if path.partition("/")[0] not in ROUTES:
            raise HttpProblem("not-found", f"no page at /ui/{path[:100]}; see /ui/")
        file = console_files()[PAGE]
    headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
    if matches(request.headers.get("if-none-match"), file.etag):
        return Response(None, 304, headers)
    return Response(file.body, 200, headers, file.media_type)
