"""Statements in the documents: each one is read, and describes the query beside it in YAML."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from center.api.sql_select import check_select
from edgewater.model import sql
from edgewater.model.sql import CreateQuery, SelectRows, parse_statement
from tests.written_queries import written_queries

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "reference" / "sql.md").read_text()
STATEMENTS = {
    f"{path.name}#{number}": text
    for path in sorted(DOCS.rglob("*.md"))
    for number, text in enumerate(re.findall(r"^```sql\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE))
    if re.match("SELECT|CREATE MATERIALIZED", text)  # the others are for PostgreSQL
}


@pytest.mark.parametrize("text", STATEMENTS.values(), ids=STATEMENTS)
def test_a_statement_in_the_documents_is_the_query_beside_it(text: str) -> None:
    statement = parse_statement(text)
    if isinstance(statement, SelectRows):
        assert check_select(text).tables
        return
    assert isinstance(statement, CreateQuery)
    assert statement.spec() in written_queries().values()


def test_the_documents_have_statements() -> None:
    assert len(STATEMENTS) >= 2


def test_the_page_has_every_option() -> None:
    missing = [name for name in sql._OPTIONS if not re.search(rf"`[^`]*\b{name}\b[^`]*`", PAGE)]
    assert missing == []
