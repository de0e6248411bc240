"""The `edgewater` command, whose sub-commands are entry points of the group `edgewater.commands` (`pyproject.toml`).

The kernel may not import edge or center, so it finds their commands through entry points. They are loaded when they are
used, which keeps `edgewater edge` free of the center's dependencies; a missing dependency becomes an error message
with the command that installs it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from edgewater.errors import EdgewaterError, InvalidInput

GROUP = "edgewater.commands"
OWN_PACKAGES = frozenset({"edgewater", "edge", "center", "sim"})
DISTRIBUTIONS = {
    "center": "edgewater[center]",
    "demo": "edgewater[demo]",
    "plan": "edgewater[sim]",
    "simulate": "edgewater[sim]",
    "query": "edgewater[client]",
    "edges": "edgewater[client]",
    "streams": "edgewater[client]",
    "top": "edgewater[client]",
    "edge": "edgewater[client]",
}
"""The distribution that a command needs; the other commands need `edgewater` without extras. Of `edge`, only `top` and
`tap` need more than that."""
CLIENT_PACKAGES = frozenset({"httpx", "rich"})
"""Of `center`, only `top` needs them."""


class CommandError(click.ClickException):
    """An `EdgewaterError` on the command line: one line without a traceback, exit code 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"edgewater: {self.message}", file=file or sys.stderr, err=file is None)


class InvalidUsage(CommandError):
    """An `InvalidInput` on the command line: exit code 2, like click's own usage errors."""

    exit_code = 2


def not_installed(command: str, missing: str) -> CommandError:
    """Returns the error for a command whose dependency is missing."""
    distribution = "edgewater[client]" if missing in CLIENT_PACKAGES else DISTRIBUTIONS.get(command, "edgewater")
    return CommandError(
        f"`{command}` needs the package {missing}, which is not installed: pip install '{distribution}'"
    )


class Commands(click.Group):
    """A group whose sub-commands are entry points, loaded when they are invoked or listed."""

    def __init__(self, *args: Any, find: Callable[[], Iterable[EntryPoint]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._find = find or (lambda: entry_points(group=GROUP))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({point.name for point in self._find()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        point = next((p for p in self._find() if p.name == cmd_name), None)
        if point is None:
            return None
        try:
            command = point.load()
        except ModuleNotFoundError as exc:
            return _unavailable(cmd_name, exc.name or str(exc))
        if not isinstance(command, click.Command):
            raise TypeError(f"{GROUP}: {point.value} is not a click command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as exc:
            missing = (exc.name or "").partition(".")[0]
            if not missing or missing in OWN_PACKAGES:
                raise  # a bug, not a missing dependency
            raise not_installed(ctx.invoked_subcommand or "edgewater", missing) from exc
        except InvalidInput as exc:
            raise InvalidUsage(exc.message) from exc
        except EdgewaterError as exc:
            raise CommandError(exc.message) from exc


def _unavailable(name: str, missing: str) -> click.Command:
    """Returns a command that reports a missing dependency, with any arguments."""

    def fail(ignored: tuple[str, ...]) -> None:
        raise not_installed(name, missing)

    return click.Command(
        name,
        callback=fail,
        params=[click.Argument(["ignored"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        short_help=f"(not installed: pip install '{DISTRIBUTIONS.get(name, 'edgewater')}')",
    )


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="edgewater", prog_name="edgewater", message="%(prog)s %(version)s")
def main() -> None:
    """Streaming queries over distributed data, with a stated error for every answer.

    Edge agents aggregate records near their sources and ship small mergeable synopses. A center merges
    them and serves answers over REST that state their error, completeness and staleness.

    \b
      edgewater center run             start a center: gateway, Spark job and REST API
      edgewater edge run edge.yaml     start an edge agent near a source
      edgewater query add q.yaml       register a query; also ls, show, explain, tail, rm
      edgewater top                    show a center's queries, edges and alarms
      edgewater demo                   run a center and three edges on a year of flights
      edgewater COMMAND --help         describe a command, with an example
    """


if __name__ == "__main__":
    main(prog_name="edgewater")
