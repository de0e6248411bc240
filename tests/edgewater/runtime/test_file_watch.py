"""A changed file is read when it is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgewater.runtime.configuration import FileWatch


def test_a_change_counts_when_two_looks_in_a_row_find_the_same(tmp_path: Path) -> None:
    file, absent = tmp_path / "tokens.yaml", tmp_path / "absent.pem"
    file.write_text("jfk: a\n")
    watch = FileWatch(file, absent, None)
    assert watch.read(file.read_text) is None and watch.is_settled
    for text in ("", "jfk: b", "jfk: bc\n"):
        file.write_text(text)
        assert watch.read(file.read_text) is None and not watch.is_settled
    assert watch.read(file.read_text) == "jfk: bc\n" and watch.is_settled
    assert watch.read(file.read_text) is None
    absent.write_text("now it is there")
    assert watch.read(file.read_text) is None and not watch.is_settled
    file.unlink()
    assert watch.read(lambda: "") is None and not watch.is_settled
    assert watch.read(lambda: "gone") == "gone"


def test_what_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text("jfk: a\n")
    watch = FileWatch(file)
    file.write_text("")

    def emptied() -> str:
        text = file.read_text()
        file.write_text("jfk: b\n")
        return text

    assert watch.read(file.read_text) is None
    assert watch.read(emptied) is None and not watch.is_settled
    assert watch.read(file.read_text) == "jfk: b\n"


def test_a_failed_attempt_is_repeated(tmp_path: Path) -> None:
    watch = FileWatch(tmp_path / "tokens.yaml")
    with pytest.raises(OSError):
        watch.read((tmp_path / "tokens.yaml").read_text, again=True)
    assert watch.read(lambda: 1) is None
    assert watch.read(lambda: 1, again=True) == 1
