"""What exact results would have cost: an error budget costs no more sends than they do, in expectation.

An early send pays with the risk that it has to be repeated: with the gain γ (`eviction`) it adds 1 − γ to the expected
number of sends of its slice. An exact query runs that risk too, so for each open slice of an error-bound query the edge
follows what an exact query would have sent at the same pulls. With

    X  the number of its sends so far,
    D  the groups with a record since it last sent them,
    B  the number of sends of the error-bound query so far,

the exact query is expected to take X + |D| + Σ P(another record comes) over the groups that are not in D, and the
error-bound one B + Σ P(the group is above its limit at the close). `policy.rank_open` spends the difference, what the
budget *spares*, on early sends, less what earlier slices have overspent (`GroupHistory.overspent`).

A bound in place of an expectation would forbid early sends of groups that have records until the slice ends, which are
those that a budget makes fresh (`docs/decisions/0062-what-a-budget-spares.md`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from edge.cache.entries import SliceEntries
from edge.cache.send_queue import SendQueue
from edgewater.synopses import FloatArray
from edgewater.synopses.encoding.state import State


@dataclass(slots=True)
class ExactSends:
    """The sends of an exact query of one open slice. D is `SliceEntries.unsent_if_exact`.

    Attributes:
        sends: X.
        queue: the order in which the exact query sends; never ranked before the slice's first pull under an error
            budget, so that what was sent until then counts as sent by both.
    """

    sends: int = 0
    queue: SendQueue = field(default_factory=SendQueue)

    @property
    def has_begun(self) -> bool:
        return self.queue.newest_batch >= 0

    def begin(self, entries: SliceEntries) -> None:
        """Starts the account, unless it has been started."""
        if not self.has_begun:
            self.sends = int(entries.sends.sum())
            entries.unsent_if_exact[:] = entries.has_pending

    def pull(self, entries: SliceEntries, count: int) -> None:
        """Sends up to `count` groups as the exact query would."""
        groups = self.queue.draw(entries, count, entries.unsent_if_exact).groups
        entries.unsent_if_exact[groups] = False
        self.sends += len(groups)

    def expected(self, entries: SliceEntries, any_arrival: FloatArray) -> float:
        """Returns how many sends the exact query is expected to have made in the end if it sends no more early.

        Args:
            any_arrival: P(at least one more record arrives), per group of the slice.
        """
        return self.sends + float(np.where(entries.unsent_if_exact, 1.0, any_arrival).sum())

    def to_state(self) -> State:
        return State([self.sends], {}, {"queue": self.queue.to_state()})

    @classmethod
    def from_state(cls, state: State) -> ExactSends:
        return cls(state.numbers[0], SendQueue.from_state(state.components["queue"]))
