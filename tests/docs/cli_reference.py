"""Writes `docs/reference/cli.md`: the `--help` of every command. `python -m tests.docs.cli_reference` renews it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import click

from edgewater.__main__ import GROUP, Commands, main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "cli.md"
HEAD = """\
# Reference: the commands

Every command ends with status 0 if it has done its work, 1 if it has failed, 2 for input that cannot be used, and says
why in one line on stderr. `--json` prints JSON on stdout, and nothing else there.

The commands that ask a center (`query`, `edges`, `sql`, `streams`, `top`) take its address from `EDGEWATER_URL` or
`--url`, and a token from `EDGEWATER_TOKEN` or from the file that `EDGEWATER_TOKEN_FILE` names. A token is never an
argument, which others on the machine see.

Agents and centers log to stderr: text, or with `--log-format json` (or `EDGEWATER_LOG_FORMAT=json`) a line of JSON per
record with `time`, `level`, `logger`, `message` and, of an error, `exception`. If nobody reads stderr, 10,000
lines wait. Further lines are left out, and a line in their place states how many.

**Completion.** bash: `eval "$(_EDGEWATER_COMPLETE=bash_source edgewater)"` in `~/.bashrc`; zsh: the same with
`zsh_source` in `~/.zshrc`; fish: `_EDGEWATER_COMPLETE=fish_source edgewater | source` in
`~/.config/fish/completions/edgewater.fish`.

## Install

Edgewater is not on PyPI. A package with this name on PyPI is another one. Install the wheel of a release, or
`pip install '.[center,client]'` in a clone of the repository. A command whose packages are missing names the extra.

| extra | what it adds |
|---|---|
| none | `edgewater edge` with files, pushes, syslog and standard input |
| `center` | `edgewater center` |
| `client` | the Python client; the commands that ask a center; `edgewater top`, `edge top` |
| `kafka`, `mqtt`, `otlp`, `remote-write` | sources of an edge; `kafka` is a sink of a center, too |
| `postgres` | PostgreSQL as the store of a center, and as a sink |
| `delta`, `iceberg` | sinks of a center |
| `sql` | `SELECT` over answers, at the center |
| `sim` | `edgewater plan` and `edgewater simulate` |
| `demo` | `edgewater demo`, and its flights |

This page is `python -m tests.docs.cli_reference`; a test compares it with the code.
"""


def commands() -> click.Group:
    """The `edgewater` command with the entry points of `pyproject.toml`, whatever is installed."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][GROUP]
    points = [EntryPoint(name, value, GROUP) for name, value in declared.items()]
    return Commands("edgewater", find=lambda: points, help=main.help, context_settings=main.context_settings)


def pages(command: click.Command, context: click.Context, path: str) -> Iterator[tuple[str, str]]:
    """The name and help of a command and of all below it."""
    command._help_option = None  # click keeps the one of the first context, which may be a test's without `-h`
    yield path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            _, child, _ = command.resolve_command(context, [name])  # `get_command` gives a summary
            assert child is not None
            if not child.hidden:
                settings = {**command.context_settings, **child.context_settings}
                below = click.Context(child, parent=context, info_name=name, terminal_width=100, **settings)
                yield from pages(child, below, f"{path} {name}")


def render() -> str:
    command = commands()
    context = click.Context(command, info_name="edgewater", terminal_width=100, **command.context_settings)
    parts = [HEAD]
    for path, text in pages(command, context, "edgewater"):
        lines = "\n".join(line.rstrip() for line in text.splitlines())
        parts.append(f"## {path}\n\n```text\n{lines}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render())
