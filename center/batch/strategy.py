"""Decides how a job is divided and computed. Condor's decision tree is evaluated on the synopsis' algebra.

Poepsel-Lemaitre et al., "In the Land of Data Streams where Synopses are Missing, One Framework to Bring Them All" (VLDB
2021), section 5 and figure 4:

- divide. `round_robin`: Spark's own even splits of the input, or a repartition into `partitions`. Each task summarises
  its part, so synopses are shuffled instead of records. `stratified`: all records of a stratum are in one task, so that
  a task has few synopses. `order_based`: records are numbered in event time first. `centralised`: one task.
- compute. `bucketing`: a record updates every window that contains it. `slicing`: a record updates one slice, and
  windows are merged from slices.
- merge. The algebra leaves no choice: the synopsis' own merge, or for a synopsis that depends on the order of values a
  manager, which has the parts by their place in the order and forwards questions to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from center.batch.windows import Family, family_of
from edgewater.base.errors import InvalidRequest
from edgewater.synopses import Properties

Divide = Literal["stratified", "round_robin", "order_based", "centralised"]
Compute = Literal["bucketing", "slicing"]

_FIELDS = {"divide": get_args(Divide), "compute": get_args(Compute)}
MAX_TASKS = 1 << 20
"""The most tasks of a phase. This limit protects Spark's driver, which plans each task."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """The strategy of a job.

    Attributes:
        partitions: number of tasks of the compute phase. If None, the number of the input's partitions for
            `round_robin`, or else `spark.sql.shuffle.partitions`.
        reason: why the strategy was chosen; empty if a user chose it.
    """

    divide: Divide
    compute: Compute
    partitions: int | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        for name, accepted in _FIELDS.items():
            if getattr(self, name) not in accepted:
                raise InvalidRequest(f"strategy.{name}", getattr(self, name), f"one of {', '.join(accepted)}")
        given = self.partitions
        if given is not None and (isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= MAX_TASKS):
            raise InvalidRequest("strategy.partitions", given, f"a whole number from 1 to {MAX_TASKS}")

    def explain(self) -> str:
        """Returns the strategy in one line, with its reason."""
        tasks = "" if self.partitions is None else f" over {self.partitions} partitions"
        text = f"divide: {self.divide}{tasks}; compute: {self.compute}"
        return f"{text} ({self.reason})" if self.reason else text


def choose(properties: Properties, window: object, *, stratified: bool) -> Strategy:
    """Returns the strategy for a synopsis with these properties.

    Raises:
        InvalidRequest: there is no strategy for these properties and this window.
    """
    rule = _rule(properties, window, stratified)
    return Strategy(rule.divides[0], rule.computes[0], reason=rule.reason)


def check(strategy: Strategy, properties: Properties, window: object, *, stratified: bool) -> None:
    """Checks a strategy against the properties of a synopsis.

    Raises:
        InvalidRequest: the properties do not allow the strategy. The error names the possible values.
    """
    rule = _rule(properties, window, stratified)
    if strategy.divide not in rule.divides:
        raise InvalidRequest("strategy.divide", strategy.divide, " or ".join(rule.divides), rule.why_divide)
    if strategy.compute not in rule.computes:
        raise InvalidRequest("strategy.compute", strategy.compute, " or ".join(rule.computes), rule.why_compute)


@dataclass(frozen=True, slots=True)
class _Rule:
    """The strategies that are possible. The first ones are chosen.

    Attributes:
        reason: why they are chosen.
        why_divide, why_compute: why others are not possible.
    """

    divides: tuple[Divide, ...]
    computes: tuple[Compute, ...]
    reason: str
    why_divide: str = ""
    why_compute: str = ""


def _rule(properties: Properties, window: object, stratified: bool) -> _Rule:
    family = family_of(window)
    computes: tuple[Compute, ...] = ("slicing", "bucketing")
    why_compute = ""
    if family in (Family.GLOBAL, Family.TUMBLING):
        computes = ("bucketing", "slicing")
    elif family in (Family.SESSION, Family.COUNT):
        computes, why_compute = ("slicing",), "the borders of such windows depend on their records"
    numbered = "records must be numbered"
    if properties.ordered and not properties.commutative:
        if family is Family.SESSION:
            raise _no_window(window, "depends on the order of values", family)
        why = "the synopsis depends on the order of values: parts are numbered and registered with a manager"
        return _Rule(("order_based",), computes, why, numbered, why_compute)
    if not properties.mergeable:
        if family in (Family.SESSION, Family.COUNT):
            raise _no_window(window, "does not merge", family)
        why = "the synopsis does not merge: one task reads every record, in every window that contains it"
        why_divide = "parts of a synopsis that does not merge cannot be combined"
        why_compute = "windows cannot be merged from slices of a synopsis that does not merge"
        return _Rule(("centralised",), ("bucketing",), why, why_divide, why_compute)
    if family is Family.COUNT:
        why = "the window counts records: they are numbered in event time"
        return _Rule(("order_based",), computes, why, numbered, why_compute)
    if stratified:
        why = "one synopsis per stratum: each stratum's records go to one task"
        return _Rule(("stratified", "round_robin", "centralised"), computes, why, why_compute=why_compute)
    why, why_divide = "the synopsis merges: every task summarises its part", "there are no strata: give stratify_by"
    return _Rule(("round_robin", "centralised"), computes, why, why_divide, why_compute)


def _no_window(window: object, about: str, family: Family) -> InvalidRequest:
    reason = f"a synopsis that {about} cannot be built over {family.value} windows"
    return InvalidRequest("window", window, "a time window or none", reason)
