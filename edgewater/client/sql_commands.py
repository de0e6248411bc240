"""The command `edgewater sql`: statements in SQL from the command line, a file, or the standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from edgewater.base.errors import plain
from edgewater.client.center import Center
from edgewater.client.commands import asks_center, print_edges, print_json
from edgewater.client.interval import shown
from edgewater.model.key_texts import key_text
from edgewater.model.replies import DryRun
from edgewater.model.sql import split_statements
from edgewater.runtime.terminal import print_table


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
    """Run statements in SQL: from FILE, from -c, or from the standard input.

    A semicolon ends a statement. Several statements run in order, and the first error ends the command.

    \b
      edgewater sql -c "DESCRIBE bytes_by_host"
      edgewater sql queries.sql
      edgewater sql -c "SELECT window_start, host, bytes FROM bytes_by_host ORDER BY bytes DESC LIMIT 5"
    """
    if commands and file is not None:
        raise click.UsageError("FILE and --command exclude each other")
    if not commands and file is None and sys.stdin.isatty():
        raise click.UsageError("write -c 'SELECT …', a file, or - for the standard input")
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
    print_edges(reply["edges"])


def plain_lines(text: str) -> str:
    """Returns a text without control characters except line feeds."""
    return "\n".join(plain(line) for line in text.splitlines())
