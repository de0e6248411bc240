"""Bodies of requests: limits of their length and time, and reading."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import yaml
from fastapi import Request

from center.api.problems import HttpProblem
from edgewater.base.errors import InvalidQuery
from edgewater.base.plain_yaml import load_yaml
from edgewater.base.quantities import require_serialisable
from edgewater.model.json_types import load_json

MAX_BODY_BYTES = 64 << 10  # limit: memory of a request
CLOSE = {"Connection": "close"}
"""Closes the connection, because the rest of the body is not read."""
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml")
READ_TYPES = ("application/json", *YAML_TYPES)


async def read_body(request: Request, timeout_s: float, most_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Returns the body. Raises HttpProblem if it is too long or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most_bytes:
                    raise HttpProblem("too-large", f"a body has at most {most_bytes} bytes", CLOSE)
    except TimeoutError:
        raise HttpProblem("timeout", f"the body did not arrive within {timeout_s:g} s", CLOSE) from None
    return bytes(body)


async def read_typed_body(request: Request, timeout_s: float) -> tuple[bytes, str]:
    """Returns the body and its Content-Type; empty: there is none. Raises HttpProblem as `read_body`."""
    return await read_body(request, timeout_s), request.headers.get("content-type", "")


def require_media_type(content_type: str, types: Collection[str]) -> str:
    """Returns the media type of a body. Raises HttpProblem if it is none of these."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in types:
        accepted = ", ".join(types)
        text = f"Content-Type: {content_type or '(none)'} is not one of {accepted}"
        raise HttpProblem("unsupported-media-type", text, {"Accept-Post": accepted, **CLOSE})
    return media_type


def read_document(body: bytes, content_type: str, what: str, types: Collection[str] = READ_TYPES) -> object:
    """Returns the content of a JSON or YAML body.

    Args:
        what: what the body should be, for messages.

    Raises:
        InvalidQuery: the body is no valid document.
        HttpProblem: its Content-Type is not accepted.
    """
    media_type = require_media_type(content_type, types)
    try:
        text = body.decode()
        content = load_json(text) if media_type == "application/json" else load_yaml(text, aliases=False)
    except (ValueError, yaml.YAMLError, RecursionError) as exc:
        shown, kind = body[:200].decode(errors="replace"), "JSON" if media_type == "application/json" else "YAML"
        raise InvalidQuery("", shown, f"{what} as {kind}", str(exc)) from exc
    require_serialisable(content, InvalidQuery)
    return content
