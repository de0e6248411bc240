"""`edgewater sql`, against a real server and on a real terminal."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from edgewater.client import AsyncCenter, Center
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
        assert [q["query"] for q in _rows(said(run(url, "sql", "--json", "-c", "SHOW QUERIES")))] == ["flights"]
        assert said(run(url, "sql", "--json", input="DROP MATERIALIZED VIEW flights;")) == {"dropped": "flights"}
        explained = run(url, "sql", "-c", f"EXPLAIN {CREATE}")
        assert explained.exit_code == 0, explained.output
        assert "tumbling: 1h" in explained.stdout
        assert "ewr" in explained.stdout


def test_a_statement_without_its_option_is_not_taken_for_the_name_of_a_file(run: Any) -> None:
    result = run("http://127.0.0.1:1", "sql", "SHOW QUERIES")
    assert result.exit_code == 2 and "-c" in result.stderr


def _rows(reply: dict[str, Any]) -> list[dict[str, Any]]:
    names = [column["name"] for column in reply["columns"]]
    return [dict(zip(names, row, strict=True)) for row in reply["rows"]]


def test_the_client_runs_statements(desk: Any) -> None:
    async def again(url: str) -> Any:
        async with AsyncCenter(url) as center:
            return await center.sql("SHOW EDGES")

    desk.connect("ewr")
    with desk.served() as url:
        with Center(url) as center:
            reply = center.sql("SHOW EDGES")
        assert [row["edge"] for row in _rows(reply)] == ["ewr"]
        assert asyncio.run(again(url)) == reply


@pytest.mark.slow
def test_a_terminal_has_a_prompt_with_completion_and_history(desk: Any, tmp_path: Path) -> None:
    desk.connect("ewr")
    desk.register()
    with desk.served() as url:
        terminal, other = pty.openpty()
        environment = {**os.environ, "EDGEWATER_URL": url, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
        process = subprocess.Popen(
            [sys.executable, "-m", "edgewater", "sql"], stdin=other, stdout=other, stderr=other, env=environment
        )
        os.close(other)
        try:
            _read_until(terminal, "edgewater>")
            os.write(terminal, b"DESCRIBE STREAM flig\t")
            _read_until(terminal, "hts")
            os.write(terminal, b";\r")
            assert "dep_delay" in _read_until(terminal, "dep_delay")
            os.write(terminal, b"SHOW NOTHING;\r")
            _read_until(terminal, "SHOW with one of")
            os.write(terminal, b"exit\r")
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.wait()
            os.close(terminal)
    history = tmp_path / "edgewater" / "sql_history"
    assert "DESCRIBE STREAM flights;" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def _read_until(terminal: int, text: str) -> str:
    """Returns what the terminal shows until `text` is in it."""
    seen = ""
    while text not in seen:
        readable, _, _ = select.select([terminal], [], [], 30)
        assert readable, seen
        seen += os.read(terminal, 65_536).decode(errors="replace")
    return seen
