"""The `edgewater` command. Its sub-commands belong to the two sides and are looked up when they are used.

The kernel may not import edge or center, so commands are found through the entry-point group
`edgewater.commands` (`pyproject.toml`). Loading one late also keeps `edgewater edge` free of what only
the center installs: a package that is missing becomes one line that says how to get it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from edgewater import __version__
from edgewater.errors import EdgewaterError, InvalidInput

GROUP = "edgewater.commands"
OWN_PACKAGES = frozenset({"edgewater", "edge", "center", "examples", "sim"})
DISTRIBUTIONS = {
    "center": "edgewater[center]",
    "demo": "edgewater[demo]",
    "plan": "edgewater[sim]",
    "simulate": "edgewater[sim]",
}
"""What to install for a command; the others come with plain `edgewater`."""


class Failure(click.ClickException):
    """An error of ours as a command line shows it: one line, no traceback. Exit code 1."""

    def show(self, file: Any = None) -> None:
        click.echo(f"edgewater: {self.message}", file=file or sys.stderr, err=file is None)


class BadInput(Failure):
    """What was asked for cannot be done as asked: exit code 2, as click has it for wrong flags."""

    exit_code = 2


def not_installed(command: str, missing: str) -> Failure:
    distribution = DISTRIBUTIONS.get(command, "edgewater")
    return Failure(f"`{command}` needs the package {missing}, which is not installed: pip install '{distribution}'")


class Commands(click.Group):
    """A group whose sub-commands are entry points, each loaded when it is named or listed."""

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
            raise TypeError(f"{GROUP}: {point.value} is no click command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as exc:
            missing = (exc.name or "").partition(".")[0]
            if not missing or missing in OWN_PACKAGES:
                raise  # a fault of ours, not a package that somebody left out
            raise not_installed(ctx.invoked_subcommand or "edgewater", missing) from exc
        except InvalidInput as exc:
            raise BadInput(exc.message) from exc
        except EdgewaterError as exc:
            raise Failure(exc.message) from exc


def _unavailable(name: str, missing: str) -> click.Command:
    """Stands in for a command that cannot be loaded, whatever arguments it is given."""

    def say(ignored: tuple[str, ...]) -> None:
        raise not_installed(name, missing)

    return click.Command(
        name,
        callback=say,
        params=[click.Argument(["ignored"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        short_help=f"(not installed: pip install '{DISTRIBUTIONS.get(name, 'edgewater')}')",
    )


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="edgewater")
def main() -> None:
    """Answers about data that is born in many places.

    Edges aggregate next to the sources and ship small synopses; a center merges them and serves
    answers that state their error, completeness and age.

    \b
      edgewater center run             start a center: gateway, Spark job and REST API
      edgewater edge run edge.yaml     start an agent next to a source
      edgewater COMMAND --help         what a command does, and an example
    """


if __name__ == "__main__":
    main(prog_name="edgewater")
