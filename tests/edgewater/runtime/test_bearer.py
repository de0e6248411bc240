"""One reading of bearer tokens for edges, gateways and the API."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from center.ingest.authentication import Presented
from edge.sources.receiving import BearerTokens
from edgewater.base.errors import InvalidConfig
from edgewater.runtime.bearer import bearer_token, token_digest
from edgewater.runtime.configuration import Secret, Section, validate
from tests.refusals import refused

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
    known = BearerTokens([SecretStr("abc")]).principal(header, "10.0.0.1")
    assert known == (None if token is None else token_digest("abc"))
    assert BearerTokens([]).principal(header, "10.0.0.1") == "10.0.0.1"


def test_a_call_without_a_header_has_no_token() -> None:
    assert bearer_token(None) is None
    assert Presented.of([], {}).token_digest is None


class Tokens(Section):
    token: Secret


def pushes(tokens: BearerTokens, token: str) -> bool:
    return tokens.principal(f"Bearer {token}", "10.0.0.1") is not None


def test_a_renewed_file_changes_who_may_push_and_an_unreadable_one_does_not(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    tokens = BearerTokens([validate(Tokens, {"token": {"file": str(file)}}).token])
    assert pushes(tokens, "old")
    for broken in (b"", b"\xff"):
        file.write_bytes(broken)
        assert pushes(tokens, "old")
    file.unlink()
    assert pushes(tokens, "old")
    file.write_text("renewed\n")
    assert pushes(tokens, "renewed") and not pushes(tokens, "old")


@pytest.mark.parametrize("path", ["/run/${EDGE}", "/run/$"])
def test_a_path_with_a_variable_that_is_not_set_is_refused(path: str) -> None:
    with refused(InvalidConfig, "token"):
        validate(Tokens, {"token": {"file": path}}, {"environ": {}})
