"""The command `edgewater tables`: tables of a center that queries look up columns in."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import click

from edgewater.base.errors import plain
from edgewater.client.center import Center
from edgewater.client.commands import asks_center, border_option, print_json, print_list
from edgewater.model.replies import TableInfo


@click.group()
def tables() -> None:
    """Show and change the tables of a center. A query adds their columns to its records with `lookup`.

    \b
      edgewater tables put halls halls.csv
      edgewater tables get halls > halls.csv

    \b
    In the query:
      lookup: {halls: {key: device}}   # the column `device` of the stream is the key of the table
      group_by: [hall]
    """


@tables.command("list")
@asks_center
def tables_list(center: Center, as_json: bool) -> None:
    """List the tables, and the running queries that use them."""

    def row(table: TableInfo) -> tuple[object, ...]:
        columns = ", ".join(f"{c['name']} {c['type']}" for c in table["columns"])
        return table["name"], table["version"], table["key"], columns, table["rows"], ", ".join(table["queries"])

    head = ("table", "version", "key", "columns", "rows", "queries")
    print_list(as_json, "tables", center.tables(), head, row, empty="there is no table")


@tables.command("get")
@click.argument("name")
@asks_center
def tables_get(center: Center, name: str, as_json: bool) -> None:
    """Print the rows of the table NAME as CSV."""
    table = center.table(name)
    if as_json:
        print_json(dict(table))
        return
    names = [column["name"] for column in table["columns"]]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    for row in table["data"]:
        cells = (row[name] for name in names)
        writer.writerow(str(cell).lower() if isinstance(cell, bool) else cell for cell in cells)


@tables.command("put")
@click.argument("name")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--key", metavar="COLUMN", help="The column that tells the rows apart. Default: the first column.")
@border_option
@asks_center
def tables_put(center: Center, name: str, file: Path, key: str | None, at: str | None, as_json: bool) -> None:
    """Make or change the table NAME from FILE: CSV with a header (.csv), NDJSON (.ndjson) or Parquet (.parquet).

    Each running query that uses the table gets a new version. Windows that start before its border keep the old rows.
    """
    table = center.put_table(name, file, key=key, at=at)
    if as_json:
        print_json(dict(table))
        return
    click.echo(f"{plain(name)} has {table['rows']} rows, version {table['version']}")
    if table["queries"]:
        click.echo(f"used by {plain(', '.join(table['queries']))}")


@tables.command("delete")
@click.argument("name")
@asks_center
def tables_delete(center: Center, name: str, as_json: bool) -> None:
    """Delete the table NAME. While a running query uses it, the center refuses."""
    center.delete_table(name)
    if as_json:
        print_json({"deleted": name})
