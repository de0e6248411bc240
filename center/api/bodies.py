"""Bodies of requests: limits of their length and time, and reading."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence

import yaml
from fastapi import Request

from center.api.problems import HttpProblem
from edgewater.model.errors import InvalidQuery
from edgewater.model.json_types import Json
from edgewater.model.quantities import require_serialisable
from edgewater.runtime.plain_yaml import load_yaml

MAX_BODY_BYTES = 64 << 10
CLOSE = {"Connection": "close"}
"""Closes the connection, because the rest of the body is not read."""
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml")
READ_TYPES = ("application/json", *YAML_TYPES)


async def read_body(request: Request, timeout_s: float) -> bytes:
    """Returns the body. Raises HttpProblem if it is too long or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise HttpProblem("too-large", f"a body has at most {MAX_BODY_BYTES} bytes", CLOSE)
    except TimeoutError:
        raise HttpProblem("timeout", f"the body did not arrive within {timeout_s:g} s", CLOSE) from None
    return bytes(body)


async def read_typed_body(request: Request, timeout_s: float) -> tuple[bytes, str]:
    """Returns the body and its Content-Type; empty: there is none. Raises HttpProblem as `read_body`."""
    return await read_body(request, timeout_s), request.headers.get("content-type", "")


def read_document(body: bytes, content_type: str, what: str, types: Sequence[str] = READ_TYPES) -> object:
    """Returns the content of a JSON or YAML body.

    Args:
        what: what the body should be, for messages.

    Raises:
        InvalidQuery: the body is no valid document.
        HttpProblem: its Content-Type is not accepted.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type not in types:
        accepted = ", ".join(types)
        raise HttpProblem(
            "unsupported-media-type",
            f"Content-Type: {content_type or '(none)'} is not one of {accepted}",
            {"Accept-Post": accepted},
        )
    try:
        content = _json_or_yaml(body.decode(), media_type)
    except (ValueError, yaml.YAMLError, RecursionError) as exc:
        shown, kind = body[:200].decode(errors="replace"), "JSON" if media_type == "application/json" else "YAML"
        raise InvalidQuery("", shown, f"{what} as {kind}", str(exc)) from exc
    require_serialisable(content, InvalidQuery)
    return content


def _json_or_yaml(text: str, media_type: str) -> object:
    if media_type == "application/json":
        return json.loads(text, object_pairs_hook=_unique)
    return load_yaml(text, aliases=False)


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Refuses duplicate keys: the second entry would silently replace the first."""
    for key, count in Counter(key for key, _ in pairs).items():
        if count > 1:
            raise ValueError(f"duplicate key {key}")
    return dict(pairs)
