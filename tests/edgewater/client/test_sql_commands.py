"""`edgewater sql`, against a real server and on a real terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgewater.client import Center
from edgewater.model.query import QuerySpec
from edgewater.model.sql import to_sql
from tests.center.api.conftest import SPEC
from tests.edgewater.client.test_commands import run, said

__all__ = ["run"]
CREATE = to_sql(QuerySpec.from_mapping(SPEC))


def test_statements_of_a_file_run_in_order_until_the_first_error(desk: Any, run: Any, tmp_path: Path) -> None:
    desk.connect("ewr")
    file = tmp_path / "all.sql"
    file.write_text(
        f"{CREATE}; -- a comment; with a semicolon\nSHOW CREATE flights; SHOW NOTHING; DROP MATERIALIZED VIEW flights"
    )
    with desk.served() as url:
        result = run(url, "sql", str(file))
        assert result.exit_code == 2
        assert "flights is registered, version 1" in result.stdout
        assert CREATE.strip() in result.stdout
        assert "NOTHING" in result.stderr
        described = _rows(said(run(url, "sql", "--json", "-c", "DESCRIBE flights")))
        assert "carrier" in [column["column"] for column in described]
        assert said(run(url, "sql", "--json", input="DROP MATERIALIZED VIEW flights;")) == {"dropped": "flights"}
        explained = run(url, "sql", "-c", f"EXPLAIN {CREATE}")
        assert explained.exit_code == 0, explained.output
        assert "tumbling: 1h" in explained.stdout
        assert "ewr" in explained.stdout


def test_a_statement_without_its_option_is_not_taken_for_the_name_of_a_file(run: Any) -> None:
    result = run("http://127.0.0.1:1", "sql", "DESCRIBE flights")
    assert result.exit_code == 2 and "-c" in result.stderr


def _rows(reply: dict[str, Any]) -> list[dict[str, Any]]:
    names = [column["name"] for column in reply["columns"]]
    return [dict(zip(names, row, strict=True)) for row in reply["rows"]]


def test_the_client_runs_statements(desk: Any) -> None:
    desk.connect("ewr")
    with desk.served() as url:
        with Center(url) as center:
            reply = center.sql("DESCRIBE STREAM flights")
        assert "carrier" in [row["column"] for row in _rows(reply)]
