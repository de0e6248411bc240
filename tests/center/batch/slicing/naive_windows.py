"""Windows worked out record by record."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from center.batch.slicing import SessionWindow, SlidingWindow


@dataclass
class Naive:
    """Keeps every record, and works all windows out anew whenever it is asked."""

    families: tuple
    lateness: int
    watermark: int = -1000
    kept: dict = field(default_factory=lambda: defaultdict(list))  # family -> (time, number, value)
    sessions: dict = field(default_factory=lambda: defaultdict(list))  # family -> [[records]], runs that are open
    sealed: dict = field(default_factory=lambda: defaultdict(lambda: -(10**6)))  # family -> end of a cut, final session
    answered: dict = field(default_factory=dict)  # (family, start, end) -> records
    number: int = 0

    def update(self, values: list[int], times: list[int]) -> tuple[int, ...]:
        rows = sorted((t, self.number + i, v) for i, (t, v) in enumerate(zip(times, values, strict=True)))
        self.number += len(rows)
        return tuple(self._add(i, family, rows) for i, family in enumerate(self.families))

    def _add(self, index: int, family: object, rows: list) -> int:
        final = self.watermark - self.lateness
        if isinstance(family, SessionWindow):
            late = [row for row in rows if row[0] < self.sealed[index]]
            return len(late) + self._add_sessions(index, family.gap_ms, rows[len(late) :], final)
        dropped = 0
        for row in rows:
            if isinstance(family, SlidingWindow):
                starts = range(
                    (row[0] - family.offset_ms) // family.every_ms * family.every_ms + family.offset_ms,
                    row[0] - family.size_ms,
                    -family.every_ms,
                )
                takes = [s for s in starts if s + family.size_ms > final]
                for s in takes:
                    self.kept[index, s, s + family.size_ms].append(row)
                dropped += not takes
            elif row[0] < final:
                dropped += 1
            else:
                self.kept[index].append(row)
        return dropped

    def _add_sessions(self, index: int, gap: int, rows: list, final: int) -> int:
        groups = [(True, rows) for rows in self.sessions[index]] + [(False, [row]) for row in rows]
        changed = True
        while changed:
            changed = False
            for a in range(len(groups)):
                for b in range(a + 1, len(groups)):
                    one, two = groups[a][1], groups[b][1]
                    if one[0][0] < two[-1][0] + gap and two[0][0] < one[-1][0] + gap:
                        groups[a] = (groups[a][0] or groups[b][0], sorted(one + two))
                        del groups[b]
                        changed = True
                        break
                if changed:
                    break
        keep = [g for old, g in groups if old or g[-1][0] + gap > final]
        dropped = sum(len(g) for old, g in groups if not old and g[-1][0] + gap <= final)
        self.sessions[index] = keep
        return dropped

    def windows(self) -> dict:
        """What stands in each window that the watermark has ended and that is not final."""
        found = {}
        for index, family in enumerate(self.families):
            if isinstance(family, SlidingWindow):
                keys = [k for k in self.kept if isinstance(k, tuple) and k[0] == index]
                found |= {k: sorted(self.kept[k]) for k in keys if k[2] <= self.watermark}
            elif isinstance(family, SessionWindow):
                cut = [part for run in self.sessions[index] for part in cut_up(run, family)]
                found |= {(index, part[0][0], end): part for part, end in cut if end <= self.watermark}
            else:
                size = family.count
                every = getattr(family, "every", size)
                rows = sorted(r for r in self.kept[index] if r[0] < self.watermark)
                for start in range(0, len(rows) - size + 1, every):
                    found[index, start, start + size] = rows[start : start + size]
        return found

    def advance(self, watermark: int) -> dict:
        """The windows whose contents are not what was answered last."""
        self.watermark = max(self.watermark, watermark)
        now = self.windows()
        news = {key: rows for key, rows in now.items() if self.answered.get(key) != rows}
        self.answered |= news
        final = self.watermark - self.lateness
        for index, family in enumerate(self.families):
            if isinstance(family, SessionWindow):
                self._forget(index, family, final)
        return news

    def _forget(self, index: int, family: SessionWindow, final: int) -> None:
        left = []
        for run in self.sessions[index]:
            parts = cut_up(run, family)
            rest = [row for part, end in parts if end > final for row in part]
            if rest:
                left.append(rest)
                self.sealed[index] = max([self.sealed[index], *(end for _, end in parts if end <= final)])
            elif len(parts) > 1:
                self.sealed[index] = max(self.sealed[index], parts[-2][1])
        self.sessions[index] = left


def cut_up(run: list, family: SessionWindow) -> list:
    """The sessions of a run of records and their ends."""
    gap, longest = family.gap_ms, family.max_ms // family.gap_ms * family.gap_ms
    begin = run[0][0] // gap * gap
    parts: dict = {}
    for row in run:
        parts.setdefault((row[0] - begin) // longest, []).append(row)
    assert list(parts) == list(range(len(parts))), "a run has records in each of its slices"
    last = len(parts) - 1
    return [(p, begin + (k + 1) * longest if k < last else p[-1][0] + gap) for k, p in parts.items()]
