"""Keeps the losses of input that may affect windows of a query, until a frame states them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

from edge.core.dropped import MAX_SLICES, UnreportedDrops
from edge.core.slices import is_final
from edge.core.streams import MAX_LOSSES, add_loss
from edge.records import RejectedRecords
from edgewater.base.streams import MAX_TIME_MS, MIN_TIME_MS
from edgewater.model.byte_budget import AHEAD_SHARE, close_bytes, stated_bytes
from edgewater.model.query import QuerySpec
from edgewater.wire import InputLoss, LossReason, groups_of

MEMORY = "memory"
"""The source of a loss of records for which the query had no memory."""


class QueryLosses:
    """Losses of input and dropped records of one query that no frame has stated.

    Args:
        since_ms: event time from which the query counts records.

    Attributes:
        unsent: the losses of input.
        drops: the records that came too late, or were rejected.
    """

    def __init__(self, spec: QuerySpec, since_ms: int) -> None:
        self._spec, self._since_ms = spec, since_ms
        self.unsent: tuple[InputLoss, ...] = ()
        self.drops = UnreportedDrops(most=_most_slices(spec))

    def lose(self, loss: InputLoss, through_ms: int, *, apart: bool = False) -> None:
        """Adds a loss of input if the query may lack its records.

        Args:
            through_ms: event time up to which slices are closed.
            apart: the loss is never united with others, so that only its own windows lack records.
        """
        counted = self._not_final(loss, through_ms)
        if counted is not None:
            self.unsent = (*self.unsent, counted) if apart else add_loss(self.unsent, counted)

    def lose_memory(self, first: int, last: int) -> None:
        """Adds the loss of records of the slices from `first` to `last`. Adjacent slices get one statement."""
        loss = InputLoss(MEMORY, LossReason.QUERY_MEMORY, first, self._spec.window.slice_end(last))
        before = self.unsent[-1] if self.unsent else None
        continues = before is not None and before.reason == loss.reason and before.to_ms == loss.from_ms
        apart = not continues and len(self.unsent) < MAX_LOSSES
        self.unsent = (*self.unsent, loss) if apart else add_loss(self.unsent, loss)

    def reject(self, rejected: RejectedRecords, arrival_ms: int) -> None:
        """Adds rejected records if windows of the query may lack them.

        Args:
            arrival_ms: wall time.
        """
        window = self._spec.window
        from_ms = self._since_ms if rejected.from_ms is None else max(rejected.from_ms, self._since_ms)
        to_ms = MAX_TIME_MS if rejected.to_ms is None else rejected.to_ms
        if from_ms < to_ms:
            start = from_ms if from_ms == MIN_TIME_MS else window.slice_start(from_ms)
            until = to_ms if to_ms == MAX_TIME_MS else window.slice_end(window.slice_start(to_ms - 1))
            plain = groups_of(rejected.only).keys() <= set(self._spec.plain_keys)
            self.drops.add(start, rejected.reason, rejected.records, until, only=rejected.only if plain else "")
            self.drops.begin(arrival_ms)

    def _not_final(self, loss: InputLoss, through_ms: int) -> InputLoss | None:
        """Returns the part of a loss that may lie in windows that are not final here.

        Returns None if no part does. The lost records then count in no window of the query.
        """
        window, from_ms = self._spec.window, self._since_ms
        if through_ms > MIN_TIME_MS:
            passed_ms = window.slice_start(through_ms - self._spec.lateness_ms)
            if loss.to_ms is None or loss.to_ms > passed_ms:
                # Each of these windows that has a moment of the loss before `passed_ms` contains `passed_ms` too.
                from_ms = max(from_ms, passed_ms)
            elif is_final(self._spec, window.slice_start(loss.to_ms - 1), through_ms):
                return None
        if from_ms > MIN_TIME_MS:
            loss = replace(loss, from_ms=max(from_ms, loss.from_ms or MIN_TIME_MS))
        return None if _is_empty(loss) else loss

    def take(
        self, before_ms: int, through_ms: int, stated: Sequence[InputLoss], *, monitored: bool
    ) -> tuple[InputLoss, ...]:
        """Returns the losses that a frame states, and stores the parts that later frames state again.

        In a replay, this run may have noticed a loss that the recorded frame does not have. The next frame states it.
        The records of slices that the recorded frame closes are in that frame or in an earlier one.

        Args:
            before_ms, through_ms: event times up to which slices are closed, before the frame and with it.
            monitored: the query has early answers, so that the frame may omit an older slice.
            stated: the losses in the frame.
        """
        losses = self.unsent
        rest = (
            self._not_sent(loss, before_ms, through_ms, monitored=monitored) for loss in losses if loss not in stated
        )
        self.unsent = tuple(loss for loss in rest if not _is_empty(loss))
        return losses

    def _not_sent(self, loss: InputLoss, before_ms: int, through_ms: int, *, monitored: bool) -> InputLoss:
        """Returns the part of a loss after the slices that are closed through `through_ms`.

        The closed time advances only when all older slices have been sent, also slices with late records. With early
        answers, a frame may omit a slice.
        """
        from_ms = MIN_TIME_MS if loss.from_ms is None else loss.from_ms
        if through_ms <= before_ms or (monitored and from_ms < before_ms):
            return loss
        return replace(loss, from_ms=max(from_ms, self._spec.window.slice_start(through_ms)))

    def to_state(self) -> dict[str, Any]:
        return {"losses": [astuple(loss) for loss in self.unsent], "unreported_drops": self.drops.to_state()}

    def restore(self, numbers: dict[str, Any]) -> None:
        """Restores what `to_state` returned."""
        self.unsent = tuple(InputLoss(*loss) for loss in numbers["losses"])
        self.drops.restore(numbers["unreported_drops"])


def _most_slices(spec: QuerySpec) -> int:
    """Returns for how many slices a frame states dropped records: with more, a byte budget might never permit it."""
    if spec.byte_budget is None:
        return MAX_SLICES
    measures = [m.name for m in spec.measures]
    room = AHEAD_SHARE * spec.byte_budget.of_edge(spec.edges) - close_bytes(spec.name, measures)
    return min(max(int(room / stated_bytes(measures)), 1), MAX_SLICES)


def _is_empty(loss: InputLoss) -> bool:
    return loss.from_ms is not None and loss.to_ms is not None and loss.from_ms >= loss.to_ms
