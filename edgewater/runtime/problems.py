"""HTTP errors as RFC 9457 problem details: ``application/problem+json`` with stable `type` URIs."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

MEDIA_TYPE = "application/problem+json"
TYPE_BASE = "https://edgewater.dev/problems/"


def problem_body(
    status: int, code: str, detail: str, *, title: str = "", members: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Returns problem details.

    Args:
        code: the stable code of the error, which ends its `type`.
        title: a short text that is the same for each error of the code; "" to build it from the code.
        members: extension members, and `instance`.
    """
    title = title or code.replace("-", " ").capitalize()
    return {"type": TYPE_BASE + code, "title": title, "status": status, "detail": detail, **(members or {})}


def problem(
    status: int,
    code: str,
    detail: str,
    *,
    title: str = "",
    members: Mapping[str, object] | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Returns a response with problem details. `problem_body` describes the arguments.

    A 401 also requests a bearer token.
    """
    if status == 401:
        headers = {**(headers or {}), "WWW-Authenticate": "Bearer"}
    body = problem_body(status, code, detail, title=title, members=members)
    text = json.dumps(body, default=repr, ensure_ascii=False)
    # A message may quote unpaired surrogates. They become JSON escapes.
    return Response(text.encode(errors="backslashreplace"), status, headers, MEDIA_TYPE)
