"""``python -m bench.frame_work``: the CPU that the largest frames and answers cost the job, by kind.

One edge sends one frame that asks for far more than a frame may have. The gateway's check cuts it, and the job merges
and applies the rest, without a JVM. All queries wait for one
transaction. So the greatest CPU time of a transaction is the time by which a frame can delay other queries' answers. It
is also given per unit of work, which limits frames (`edgewater/guard/frame_work.py`).

The second table is about earlier frames: an edge of a query that an editor may register has sent slices, and closes all
slices at once. The table has the greatest CPU time of a transaction until all windows are answered.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import pyarrow as pa

from bench.plans import JobCenter
from center.catalog import UnindexedFrame
from center.ingest.frame_check import CheckedFrame, FrameCheck
from center.storage.frame_log import StoredFrame
from edgewater.base.streams import EdgeId
from edgewater.guard.frame_work import MAX_FRAME_WORK
from edgewater.model.query import QuerySpec
from edgewater.synopses import GroupedAggregate
from edgewater.wire import Frame, FrameBody, Partial, Rest, SliceClose, Withheld

NOW_MS, EDGE = 1_790_000_000_000, EdgeId("evil")
COLUMNS = {"key": pa.string(), "x": pa.int64()}
ONE = {"m": "sum(x)"}
SUMS = {f"m{i}": "sum(x)" for i in range(32)}
MIXED = {
    "n": "count()", "least": "min(x)", "most": "max(x)", "mean": "mean(x)", "var": "var(x)",
    "q": "quantiles(x)", "d": "distinct(x)", "top": "top_k(x, 10)",
}  # fmt: skip
GOAL_S = 1.0


def spec(measures: Mapping[str, str], window: Mapping[str, str]) -> QuerySpec:
    return QuerySpec.from_mapping(
        {"name": "q", "from": "s", "group_by": ["key"], "measures": dict(measures), "window": dict(window)}
    )


def partial(query: QuerySpec, groups: int = 1) -> bytes:
    """Returns a partial of a query with one record in each group."""
    measures = query.bind(COLUMNS).measures
    stacks = {m.measure.name: m.measure.stack(pa.int64()) for m in measures}
    aggregate = GroupedAggregate({"key": pa.string()}, stacks)
    columns = {m.measure.name: None if m.measure.function.name == "count" else pa.array([5] * groups) for m in measures}
    aggregate.update([pa.array([f"key-{i:07d}" for i in range(groups)])], columns, groups)
    return aggregate.to_bytes()


def partials(measures: Mapping[str, str], count: int, every_ms: int, groups: int = 1) -> Callable[..., FrameBody]:
    def body(query: QuerySpec) -> FrameBody:
        data = partial(query, groups)
        return FrameBody(0, tuple(Partial(NOW_MS - every_ms * i, data) for i in range(1, count + 1)))

    return body


def closes(count: int, every_ms: int, *, withheld: int = 0, session: bool = False) -> Callable[..., FrameBody]:
    def body(query: QuerySpec) -> FrameBody:
        report = tuple(Withheld(f"m{i}", 1.0, 0.0, 1, rest=Rest(1, (1.0,))) for i in range(withheld))
        starts = [NOW_MS - every_ms * i for i in range(1, count + 1)]
        return FrameBody(0, (), tuple(SliceClose(s, 1, 0, report, *((s, s) if session else ())) for s in starts))

    return body


TUMBLING, SLIDING, SESSION = {"tumbling": "1s"}, {"sliding": "500s", "every": "1s"}, {"session": "1s"}
KINDS: dict[str, tuple[Mapping[str, str], Mapping[str, str], Callable[..., FrameBody]]] = {
    "partials": (ONE, TUMBLING, partials(ONE, 20_000, 1_000)),
    "partials, 32 sums": (SUMS, TUMBLING, partials(SUMS, 2_000, 1_000)),
    "partials, 8 functions": (MIXED, TUMBLING, partials(MIXED, 3_000, 1_000)),
    "partial, 1 M groups": (ONE, TUMBLING, partials(ONE, 1, 1_000, groups=1_000_000)),
    "partials, sliding": (ONE, SLIDING, partials(ONE, 2_000, 500_000)),
    "closes": (ONE, TUMBLING, closes(60_000, 1_000)),
    "closes, withheld": (SUMS, TUMBLING, closes(1_900, 1_000, withheld=32)),
    "closes, sliding": (ONE, SLIDING, closes(60_000, 1_000)),
    "closes, sessions": (ONE, SESSION, closes(60_000, 2_000, session=True)),
}


# measures, slices of a window, slices that are closed at once, groups of each slice
ANSWERS: dict[str, tuple[Mapping[str, str], int, int, int]] = {
    "tumbling, few groups": (ONE, 1, 500, 10),
    "tumbling, 20,000 groups": (ONE, 1, 100, 20_000),
    "tumbling, 200,000 groups": (ONE, 1, 10, 200_000),
    "sliding, 500 slices of 10": (ONE, 500, 500, 10),
    "sliding, 500 slices of 1,000": (ONE, 500, 40, 1_000),
    "sliding, 60 slices of 20,000": (ONE, 60, 60, 20_000),
    "sliding, 60, 8 functions": (MIXED, 60, 60, 200),
}


class Center(JobCenter):
    """The gateway's check and the job, for the frames of one edge and one query."""

    def __init__(self, directory: Path, query: QuerySpec) -> None:
        super().__init__(directory, [query], [EDGE], COLUMNS, lambda: NOW_MS)
        self.query, self._seq = query, 0

    def send(self, body: FrameBody) -> tuple[Frame, CheckedFrame, float]:
        """Sends a frame to the log. Returns it, the parts that the gateway keeps, and the CPU seconds of its check."""
        frame = Frame.pack(self._seq, self.refs[0], body)
        began_s = time.process_time()
        checked = FrameCheck(self.query, COLUMNS).check(frame, NOW_MS)
        check_s = time.process_time() - began_s
        (location,) = self.log.append([StoredFrame(self.refs[0], EDGE, "i", self._seq, checked.partials)])
        size = frame.wire_bytes, NOW_MS, location, frame.raw_bytes, checked.work
        row = UnindexedFrame(self.refs[0], EDGE, "i", self._seq, frame.crc32c, *size, facts=checked.facts)
        self.catalog.frames.index([row])
        self._seq += 1
        return frame, checked, check_s

    def run(self) -> list[float]:
        """Applies all sent frames, and gives the answers that are due. Returns the CPU seconds of each transaction."""
        taken = []
        while (run := self.next_run()) is not None:
            began_s = time.process_time()
            self.apply(run, self.merge(run))
            taken.append(time.process_time() - began_s)
        while (due_ms := self.ledger.next_deadline()) is not None and due_ms <= NOW_MS:
            began_s = time.process_time()
            self.writer.advance()
            taken.append(time.process_time() - began_s)
        return taken


def cost(kind: str, directory: Path) -> dict[str, Any]:
    """Sends a frame of a kind; returns its size, its work and CPU seconds."""
    measures, window, body_of = KINDS[kind]
    center = Center(directory, spec(measures, window))
    frame, checked, check_s = center.send(body_of(center.query))
    taken = max(center.run())
    center.close()
    return {
        "wire_kib": frame.wire_bytes >> 10,
        "work": checked.work,
        "refused": checked.reason or "",
        "gateway_s": check_s,
        "job_s": taken,
        "us_per_unit": 1e6 * taken / checked.work,
    }


def answers_cost(kind: str, directory: Path) -> dict[str, Any]:
    """Sends slices one by one, and then closes all of them. Returns the number of windows and CPU seconds."""
    measures, every, slices, groups = ANSWERS[kind]
    window = {"tumbling": "1s"} if every == 1 else {"sliding": f"{every}s", "every": "1s"}
    center = Center(directory, spec(measures, window))
    first = NOW_MS - (slices + 1) * 1_000
    data = partial(center.query, groups)
    for i in range(slices):
        center.send(FrameBody(first, (Partial(first + i * 1_000, data),)))
    center.run()
    starts = [first + i * 1_000 for i in range(slices)]
    center.send(FrameBody(NOW_MS, (), tuple(SliceClose(start, groups, 0) for start in starts)))
    taken = center.run()
    center.close()
    return {
        "slices": slices, "per_window": every, "groups": groups, "slice_kib": len(data) >> 10,
        "transactions": len(taken), "job_s": max(taken), "all_s": sum(taken),
    }  # fmt: skip


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{'frame of':24}{'wire KiB':>9}{'work':>8}{'gateway':>9}{'job':>8}{'per unit':>10}  refused"]
    for kind, r in rows.items():
        lines.append(
            f"{kind:24}{r['wire_kib']:>9}{r['work']:>8}{r['gateway_s']:>7.2f} s{r['job_s']:>6.2f} s"
            f"{r['us_per_unit']:>7.1f} µs  {r['refused']}"
        )
    worst = max(r["job_s"] for r in rows.values())
    return "\n".join([*lines, f"at most {MAX_FRAME_WORK} units; the worst delays others {worst:.2f} s, goal {GOAL_S}"])


def answers_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{'windows closed at once':32}{'slices':>7}{'KiB each':>9}{'transactions':>13}{'longest':>10}{'all':>9}"]
    lines += [
        f"{kind:32}{r['slices']:>7}{r['slice_kib']:>9}{r['transactions']:>13}{r['job_s']:>8.2f} s{r['all_s']:>7.1f} s"
        for kind, r in rows.items()
    ]
    worst = max(r["job_s"] for r in rows.values())
    return "\n".join([*lines, f"the worst delays others {worst:.2f} s, goal {GOAL_S}"])


@click.command()
@click.option("--smoke", is_flag=True, help="Two kinds of frames.")
def main(smoke: bool) -> None:
    """Measure the largest frames that the gateway accepts."""
    frames, answers = {}, {}
    for kind in ("partials", "closes, sliding") if smoke else KINDS:
        with tempfile.TemporaryDirectory(prefix="edgewater-frame-work-") as directory:
            frames[kind] = cost(kind, Path(directory))
    click.echo(table(frames))
    for kind in ("tumbling, 200,000 groups",) if smoke else ANSWERS:
        with tempfile.TemporaryDirectory(prefix="edgewater-frame-work-") as directory:
            answers[kind] = answers_cost(kind, Path(directory))
    click.echo(answers_table(answers))


if __name__ == "__main__":
    main()
