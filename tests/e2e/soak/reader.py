"""Reads every revision of every answer, again and again, as users do."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpx
import pyarrow as pa

from tests.e2e.soak.system import Center
from tests.simulation.checkers import Answer, Falsehood, RevisionWatch

PERIOD_S = 0.7
ARROW, CSV = "application/vnd.apache.arrow.stream", "text/csv"


class Reader:
    """Polls the newest answers in a thread.

    Attributes:
        answers: query -> window start -> revision -> answer.
        false: what changed that may not change.
        reads: number of answers read, repeated ones included.
    """

    def __init__(self, center: Center, queries: Sequence[str]) -> None:
        self._center = center
        self.queries = list(queries)
        self.answers: dict[str, dict[str, dict[int, Answer]]] = {}
        self.false: list[Falsehood] = []
        self.reads = 0
        self._watch = RevisionWatch()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(60)

    def _run(self) -> None:
        while not self._stopping.is_set():
            for query in list(self.queries):
                self._poll(query)
            self._stopping.wait(PERIOD_S)

    def _poll(self, query: str) -> None:
        cursor = None
        while True:
            params = {"limit": 500} | ({"cursor": cursor} if cursor else {})
            reply = self._center.get(f"/v1/queries/{query}/windows", **params)
            if reply is None or reply.status_code != 200:
                return
            for answer in reply.json()["answers"]:
                self._note(answer)
            cursor = reply.json()["next_cursor"]
            if not cursor:
                return

    def _note(self, answer: Answer) -> None:
        self.reads += 1
        self.false += self._watch.note(answer, int(answer["version"]))
        revisions = self.answers.setdefault(answer["query"], {}).setdefault(answer["window"]["start"], {})
        revisions[int(answer["revision"])] = answer  # a final answer states what has come since

    def newest(self, query: str) -> dict[str, Answer]:
        """The newest answer read, by the window's start."""
        return {start: r[max(r)] for start, r in list(self.answers.get(query, {}).items())}

    def read_all_revisions(self) -> None:
        """Reads every revision of every window; call it when polling has stopped."""
        for query in self.queries:
            self._poll(query)
            for start in list(self.answers.get(query, {})):
                path = f"/v1/queries/{query}/windows/{start}"
                listed = self._center.request("GET", f"{path}/revisions").json()["revisions"]
                read = set(self.answers[query][start])
                if missing := read - set(listed):
                    text = f"revisions {sorted(missing)} were read and are not listed: {listed}"
                    self.false.append(Falsehood("revision-gone", query, start, max(missing), text))
                for revision in listed:
                    self._note(self._center.request("GET", path, params={"revision": revision}).json())

    def compare_forms(self, starts: Mapping[str, Iterable[str]]) -> int:
        """Compares CSV and Arrow with JSON for the newest answers of these windows; returns the number of cells."""
        cells = 0
        for query, windows in starts.items():
            for start in windows:
                answer = self.newest(query)[start]
                params = {"revision": answer["revision"]}
                path = f"/v1/queries/{query}/windows/{start}"
                for form in (ARROW, CSV):
                    reply = self._center.request("GET", path, params=params, headers={"Accept": form})
                    differing, compared = differences(answer, *_columns(reply, form))
                    cells += compared
                    self.false += [
                        Falsehood("forms", query, start, int(answer["revision"]), f"{form}: {d}") for d in differing[:3]
                    ]
        return cells


def _columns(reply: httpx.Response, form: str) -> tuple[dict[str, list[Any]], int]:
    """The columns of a table, and its number of rows; those of CSV as text, so that no digit is lost."""
    if form == ARROW:
        table = pa.ipc.open_stream(reply.content).read_all()
        return {name: table.column(name).to_pylist() for name in table.column_names}, table.num_rows
    header, *rows = csv.reader(io.StringIO(reply.text))
    return {name: [row[i] if row[i] else None for row in rows] for i, name in enumerate(header)}, len(rows)


def differences(answer: Answer, columns: dict[str, list[Any]], rows: int) -> tuple[list[str], int]:
    """What differs between an answer's rows and a table, and the number of compared cells."""
    if rows != len(answer["data"]) and (answer["data"] or rows != 1):  # no group at all: a row of nulls in a table
        return [f"{rows} rows; JSON has {len(answer['data'])}"], 0
    compared, differing = 0, []
    for i, row in enumerate(answer["data"]):
        expected = dict(row["group"])
        for measure, cell in row.items():
            if measure == "group":
                continue
            points = {f"_{q}": c for q, c in cell["quantiles"].items()} if "quantiles" in cell else {"": cell}
            for suffix, point in points.items():
                for bound, name in (("estimate", ""), ("lower", "_lower"), ("upper", "_upper")):
                    expected[f"{measure}{suffix}{name}"] = point[bound]
                if "not_finite" in point:  # JSON has no such number
                    expected[f"{measure}{suffix}"] = float(point["not_finite"])
        for name, value in expected.items():
            compared += 1
            if name not in columns:
                differing.append(f"no column {name}")
            elif not _equal(columns[name][i], value):
                differing.append(f"{name} of {row['group']} is {columns[name][i]}, JSON has {value}")
    return differing, compared


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, str) and isinstance(other, int | float):
        value = int(value) if isinstance(other, int) and value.lstrip("-").isdigit() else float(value)
    both_nan = value != value and other != other
    return bool(value == other) or both_nan or (value is None and other is None)
