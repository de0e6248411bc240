"""The command `edgewater sql`: statements in SQL from the command line, a file, or a prompt with history and
completion.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgewater.client.center import Center
from edgewater.client.commands import asks_center, print_json
from edgewater.client.interval import shown
from edgewater.model.errors import EdgewaterError, plain
from edgewater.model.key_texts import key_text
from edgewater.model.replies import DryRun
from edgewater.model.sql import LISTS, split_statements
from edgewater.runtime.terminal import print_table

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

KEYWORDS = (
    "CREATE OR REPLACE MATERIALIZED VIEW", "CREATE MATERIALIZED VIEW", "DROP MATERIALIZED VIEW", "IF EXISTS", "WITH",
    "AS", "SELECT", "FROM", "WHERE", "GROUP BY", "ORDER BY", "LIMIT", "TUMBLE", "HOP", "SESSION", "INTERVAL", "EXPLAIN",
    "DESCRIBE", "SHOW CREATE", *(f"SHOW {what.upper()}" for what in LISTS), "AND", "OR", "NOT", "CASE", "WHEN", "THEN",
    "ELSE", "END", "window_start", "window_end", "phase", "revision", "completeness", "given_at", "contract",
    "withheld",
)  # fmt: skip
_COMPLETED = {"FUNCTIONS": ("function",), "STREAMS": ("stream", "columns"), "QUERIES": ("query", "keys", "measures")}
ENDS = ("exit", "quit", "\\q")


class _StatementFile(click.Path):
    """A file of statements. If there is no such file, and the text may be a statement, the error names the option."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            if " " in str(value):
                self.fail("there is no such file; to run a statement, write -c before it", param, ctx)
            raise


@click.command()
@click.argument(
    "file", required=False, type=_StatementFile(allow_dash=True, exists=True, dir_okay=False, path_type=Path)
)
@click.option("--command", "-c", "commands", multiple=True, metavar="SQL", help="Run SQL and end; may be repeated.")
@asks_center
def sql(center: Center, file: Path | None, commands: tuple[str, ...], as_json: bool) -> None:
    """Run statements in SQL: from FILE, from -c, from the standard input, or as you type them.

    Several statements run in order, and the first error ends the command. At the prompt, the tab key completes
    keywords, streams, columns, queries and functions. A semicolon ends a statement, and exit ends the prompt.

    \b
      edgewater sql -c "SHOW QUERIES"
      edgewater sql queries.sql
      edgewater sql -c "SELECT window_start, host, bytes FROM bytes_by_host ORDER BY bytes DESC LIMIT 5"
    """
    if commands and file is not None:
        raise click.UsageError("FILE and --command exclude each other")
    if not commands and file is None and sys.stdin.isatty():
        _converse(center, as_json)
        return
    texts = commands or [sys.stdin.read() if file is None or str(file) == "-" else file.read_text()]
    for statement in [part for text in texts for part in split_statements(text)]:
        _run(center, statement, as_json)


def _run(center: Center, statement: str, as_json: bool) -> None:
    """Runs a statement, and prints the reply."""
    reply = center.sql(statement)
    if as_json:
        print_json(reply)
    elif "rows" in reply:
        _print_rows([column["name"] for column in reply["columns"]], reply["rows"])
    elif "dropped" in reply:
        name = reply["dropped"]
        click.echo("no query has that name" if name is None else f"{plain(name)} is deleted, with its answers")
    elif "version" in reply:
        click.echo(f"{plain(reply['name'])} is registered, version {reply['version']}")
        _print_notes(reply.get("notes"))
    else:
        _print_explanation(reply)


def _print_rows(names: list[str], rows: list[list[Any]]) -> None:
    if names == ["query", "sql"]:
        for _, text in rows:
            click.echo("\n".join(plain(line) for line in str(text).splitlines()))
        return
    print_table(names, [[_cell(value) for value in row] for row in rows], empty="no rows")


def _cell(value: Any) -> str:
    return shown(value) if isinstance(value, float) else key_text(value)


def _print_notes(notes: Iterable[str | None] | None) -> None:
    for note in filter(None, notes or ()):
        click.echo(f"note: {plain(note)}")


def _print_explanation(reply: DryRun) -> None:
    import yaml

    click.echo(plain_lines(yaml.safe_dump(reply["spec"], sort_keys=False, allow_unicode=True)))
    _print_notes([reply["refused"], *reply["notes"]])
    if reply["registered"]:
        click.echo("the same query is registered already")
    print_table(("column", "type"), [(c["name"], c["type"]) for c in reply["columns"]], empty="no columns")
    accepted = {True: "accepts it", False: "refuses it", None: "has never connected"}
    edges = [(e["edge"], accepted[e["accepted"]], e["message"] or "") for e in reply["edges"]]
    print_table(("edge", "would", "reason"), edges, empty="no edge serves the stream")


def plain_lines(text: str) -> str:
    """Returns a text without control characters except line feeds."""
    return "\n".join(plain(line) for line in text.splitlines())


def _converse(center: Center, as_json: bool) -> None:
    """Reads and runs statements until the user ends the prompt."""
    words = _words(center)
    session = _session(words)
    click.echo(f"{center.url}: a statement ends with a semicolon; exit or Ctrl-D ends the prompt")
    while True:
        try:
            text = session.prompt("edgewater> ").strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if text.rstrip("; ").lower() in ENDS:
            return
        try:
            for statement in split_statements(text):
                _run(center, statement, as_json)
            words[:] = _words(center)
        except EdgewaterError as exc:
            click.echo(f"edgewater: {plain(exc.message)}", err=True)


def _session(words: list[str]) -> PromptSession[str]:
    """Returns a prompt that completes words. A semicolon or an empty line ends the input."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.lexers import PygmentsLexer
    from pygments.lexers.sql import SqlLexer

    keys = KeyBindings()

    @keys.add("enter")
    def _enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        text = buffer.text.strip()
        if text.endswith(";") or not text or text.lower() in ENDS:
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    return PromptSession(
        history=FileHistory(str(history_file())),
        completer=WordCompleter(lambda: words, ignore_case=True),
        lexer=PygmentsLexer(SqlLexer),
        multiline=Condition(lambda: True),
        key_bindings=keys,
        complete_while_typing=False,
    )


def history_file() -> Path:
    """Returns the file of the statements that were typed. Only its owner may read it."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state) / "edgewater" / "sql_history"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    return path


def _words(center: Center) -> list[str]:
    """Returns the words that the prompt completes: keywords, and names at the center."""
    words = list(KEYWORDS)
    for listed, columns in _COMPLETED.items():
        try:
            reply = center.sql(f"SHOW {listed}")
        except EdgewaterError:
            continue  # the user's own statement will show the error
        names = [column["name"] for column in reply["columns"]]
        for row in reply["rows"]:
            values = dict(zip(names, row, strict=True))
            words += [part.split(" ")[0] for c in columns for part in str(values[c]).split(", ") if part]
    return list(dict.fromkeys(words))
