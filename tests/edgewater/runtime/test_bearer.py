"""One reading of bearer tokens for edges, gateways and the API."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from center.ingest.authentication import Presented
from edge.sources.http import BearerTokens
from edgewater.runtime.bearer import bearer_token, token_digest

READ = {
    "Bearer abc": "abc",
    "bearer abc": "abc",
    "BEARER  abc ": "abc",
    "Basic abc": None,
    "Bearer": None,
    "Bearer ": None,
    "Bearerabc": None,
    "": None,
}


@pytest.mark.parametrize(("header", "token"), READ.items())
def test_all_that_read_a_header_read_the_same(header: str, token: str | None) -> None:
    assert bearer_token(header) == token
    presented = Presented.of([("authorization", header)], {})
    assert presented.token_digest == (None if token is None else token_digest(token))
    request = Request({"type": "http", "headers": [(b"authorization", header.encode())], "client": ("10.0.0.1", 1)})
    assert BearerTokens(["abc"]).principal(request) == (None if token is None else token_digest("abc"))
    assert BearerTokens([]).principal(request) == "10.0.0.1"


def test_a_call_without_a_header_has_no_token() -> None:
    assert bearer_token(None) is None
    assert Presented.of([], {}).token_digest is None
