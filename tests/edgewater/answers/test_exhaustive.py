"""mypy names each module that has to say something about a new phase, cause, shape of a cell, or shape of a kind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ADDED = {
    "edgewater/answers/facts.py": ('    EARLY = "early"\n', '    EARLY = "early"\n    NEW = "new"\n'),
    "edgewater/answers/causes.py": ('    LEFT = "left"\n', '    LEFT = "left"\n    NEW = "new"\n'),
    "edgewater/answers/cells.py": ("Part: TypeAlias = ", "class NewPart: ...\n\n\nPart: TypeAlias = NewPart | "),
    "edgewater/synopses/shapes.py": ("Shape: TypeAlias = ", "class NewShape: ...\n\n\nShape: TypeAlias = NewShape | "),
}
"""By module, the text to which a member is added."""
READERS = ("edgewater/answers/__init__.py", "center/api/prometheus/series.py", "center/serving/measures.py")


@pytest.mark.slow
def test_a_new_member_is_an_error_in_each_module_that_handles_it(tmp_path: Path) -> None:
    for name in (*ADDED, *READERS):
        text, (old, new) = (ROOT / name).read_text(), ADDED.get(name, ("", ""))
        assert not old or text.count(old) == 1, name
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace(old, new) if old else text)
    options = ("--explicit-package-bases", "--follow-imports=skip", "--ignore-missing-imports", "--config-file=")
    command = [sys.executable, "-m", "mypy", *options, "--cache-dir", str(tmp_path / "cache"), *ADDED, *READERS]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    never = re.findall(r'^(\S+?):\d+: error: Argument 1 to "assert_never" has incompatible type "(.+?)"', said, re.M)
    assert set(never) == {
        ("edgewater/answers/causes.py", "Literal[Cause.NEW]"),
        ("edgewater/answers/cells.py", "NewPart"),
        ("center/api/prometheus/series.py", "NewPart"),
        ("center/serving/measures.py", "NewShape"),
    }, said
