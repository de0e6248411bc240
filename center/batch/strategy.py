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
    family = family_of(window)
    compute: Compute = "bucketing" if family in (Family.GLOBAL, Family.TUMBLING) else "slicing"
    if properties.ordered and not properties.commutative:
        why = "the synopsis depends on the order of values: parts are numbered and registered with a manager"
        chosen = Strategy("order_based", compute, reason=why)
    elif not properties.mergeable:
        why = "the synopsis does not merge: one task reads every record, in every window that contains it"
        chosen = Strategy("centralised", "bucketing", reason=why)
    elif family is Family.COUNT:
        why = "the window counts records: they are numbered in event time"
        chosen = Strategy("order_based", "slicing", reason=why)
    elif stratified:
        why = "one synopsis per stratum: each stratum's records go to one task"
        chosen = Strategy("stratified", compute, reason=why)
    else:
        why = "the synopsis merges: every task summarises its part"
        chosen = Strategy("round_robin", compute, reason=why)
    check(chosen, properties, window, stratified=stratified)
    return chosen


def check(strategy: Strategy, properties: Properties, window: object, *, stratified: bool) -> None:
    """Checks a strategy against the properties of a synopsis.

    Raises:
        InvalidRequest: the properties do not allow the strategy. The error names the possible values.
    """
    family = family_of(window)
    by_order = properties.ordered and not properties.commutative
    divides = _divides(properties, family, stratified)
    if not divides:
        raise InvalidRequest("window", window, "a time window or none", _why_no_window(by_order, family))
    _require("divide", strategy.divide, divides, _why_divide(properties, family, stratified))
    computes = ["bucketing", "slicing"]
    why = ""
    if not properties.mergeable and not by_order:
        computes, why = ["bucketing"], "windows cannot be merged from slices of a synopsis that does not merge"
    elif family in (Family.SESSION, Family.COUNT):
        computes, why = ["slicing"], "the borders of such windows depend on their records"
    _require("compute", strategy.compute, computes, why)


def _divides(properties: Properties, family: Family, stratified: bool) -> list[str]:
    if properties.ordered and not properties.commutative:
        return ["order_based"] if family is not Family.SESSION else []
    if family is Family.COUNT:
        return ["order_based"] if properties.mergeable else []
    if not properties.mergeable:
        return ["centralised"] if family is not Family.SESSION else []
    return ["round_robin", *(["stratified"] if stratified else []), "centralised"]


def _why_divide(properties: Properties, family: Family, stratified: bool) -> str:
    if family is Family.COUNT or (properties.ordered and not properties.commutative):
        return "records must be numbered"
    if not properties.mergeable:
        return "parts of a synopsis that does not merge cannot be combined"
    return "" if stratified else "there are no strata: give stratify_by"


def _why_no_window(by_order: bool, family: Family) -> str:
    about = "depends on the order of values" if by_order else "does not merge"
    return f"a synopsis that {about} cannot be built over {family.value} windows"


def _require(name: str, given: str, accepted: list[str], why: str) -> None:
    if given not in accepted:
        raise InvalidRequest(f"strategy.{name}", given, " or ".join(accepted), why)
