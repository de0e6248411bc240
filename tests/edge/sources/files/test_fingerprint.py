"""Fingerprints of files: equal beginnings have equal ones, and of many files two edges report the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from edge.sources.files import FilePosition
from edge.sources.files.fingerprint import BEGINNING_BYTES, InputFingerprints


def written(path: Path, data: str) -> FilePosition:
    path.write_text(data)
    return FilePosition(str(path), path.stat().st_ino)


def beginning(number: int) -> str:
    return f"{number}\n".ljust(BEGINNING_BYTES, "x")


def test_files_with_one_beginning_have_one_fingerprint_wherever_they_lie(tmp_path: Path) -> None:
    one = written(tmp_path / "a.log", beginning(1))
    copy = written(tmp_path / "b.log", beginning(1) + "more")
    other = written(tmp_path / "c.log", beginning(2))
    first, again, different = (InputFingerprints().of(each, 9) for each in (one, copy, other))
    assert first == again != different
    assert all(0 <= fingerprint < 1 << 62 for fingerprint in (*first, *different))


def test_a_file_has_none_while_it_is_short_or_is_not_the_one_that_is_read(tmp_path: Path) -> None:
    fingerprints = InputFingerprints()
    short = written(tmp_path / "a.log", "carrier,distance\n")
    gone = FilePosition(str(tmp_path / "gone.log"), 7)
    replaced = FilePosition(str(written(tmp_path / "b.log", beginning(1)).file), short.inode)
    assert fingerprints.of(replace(short, others=(gone, replaced)), 9) == ()
    (tmp_path / "a.log").write_text(beginning(3))
    assert len(fingerprints.of(short, 9)) == 1


def test_of_many_files_two_edges_report_the_same(tmp_path: Path) -> None:
    files = [written(tmp_path / f"{n}.log", beginning(n)) for n in range(20)]
    position = FilePosition(files[0].file, files[0].inode, others=tuple(files[1:]))
    reported = InputFingerprints().of(position, 4)
    assert len(reported) == 4
    assert InputFingerprints().of(replace(files[-1], others=tuple(files[:-1])), 4) == reported
