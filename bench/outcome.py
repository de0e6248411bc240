"""Where benches leave their results, and what they do with the center that they have started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from sim.demo.run import Demo

OUT = Path("bench/out")


def store_result(path: Path, result: Any) -> str:
    """Writes a result as JSON, into a folder that may not exist yet. Returns the text."""
    text = json.dumps(result, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    return text


@contextmanager
def logs_kept_on_failure(demo: Demo) -> Iterator[Demo]:
    """Stops a demonstration at the end. Its directory is removed, unless an exception needs its logs."""
    try:
        yield demo
    except BaseException:
        click.echo(f"logs: {demo.directory}", err=True)
        raise
    finally:
        demo.stop()
    shutil.rmtree(demo.directory, ignore_errors=True)
