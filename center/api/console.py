"""The console at `/ui`: its files, as the wheel has them, and one page for all of its addresses.

The files contain no data and need no credentials. The page calls the REST API with its user's credentials.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response
from starlette.staticfiles import StaticFiles

from center.api.access import OPEN
from center.api.problems import HttpProblem

FILES = StaticFiles(packages=[("center.api", "ui")])
SENT = (".html", ".js", ".css", ".svg")
"""Ends of the names of files that are sent."""
PAGE = "index.html"
ROUTES = ("", "queries", "edges", "budget", "new", "edit", "dashboard", "alerts")
"""First parts of the addresses that are pages (`center/api/ui/app.js`)."""


router = APIRouter(include_in_schema=False, dependencies=[OPEN])


@router.get("/")
@router.get("/ui")
async def start() -> Response:
    return RedirectResponse("/ui/", 307)


@router.get("/ui/{path:path}")
async def console(path: str, request: Request) -> Response:
    """A file of the console, or its page."""
    wanted = path if path.endswith(SENT) else PAGE
    try:
        response = await FILES.get_response(wanted, request.scope)
    except HTTPException:
        wanted = PAGE
        response = await FILES.get_response(PAGE, request.scope)
    if wanted != path and path.partition("/")[0] not in ROUTES:
        raise HttpProblem("not-found", f"no page at /ui/{path[:100]}; see /ui/")
    response.headers["Cache-Control"] = "no-cache"
    return response
