"""The catalog and the result store as a pair: whether they are of one center and of one moment.

Each of them can be replaced by an older copy. With an older catalog, new frames would get positions that the job has
applied already, and would be skipped. With older results, frames that were applied and dropped would be in no answer,
and answers with other data would get the same revision numbers again.
"""

from __future__ import annotations

from collections.abc import Mapping

from center.catalog import Catalog
from center.results import ResultStore
from center.storage.lineage import Lineage
from edgewater.base.errors import InvalidConfig

REMEDY = (
    "both stores of one backup (`edgewater center restore`); without a backup, `edgewater center reconcile` goes on"
    " with these stores, and the answers state what may be missing"
)


def require_pair(catalog: Catalog, results: ResultStore, pair: int) -> None:
    """Compares the stores, which the center may be using, and pairs new ones.

    Args:
        pair: a random number for a new pair, above 0.

    Raises:
        InvalidConfig: the stores are of two centers, or one of them is older than the other.
    """
    before, of_results, of_catalog = catalog.backups.lineage(), results.lineage(), catalog.backups.lineage()
    if of_results.pair == 0 and of_catalog.mark == 0:  # both are new, or a crash came between the next two lines
        of_catalog = Lineage(of_catalog.pair or pair)
        catalog.backups.set_lineage(of_catalog)
        results.set_lineage(of_catalog)
        return
    if of_results.pair == 0:
        raise _refused("results_url", "the catalog has been in use, and the result store is new")
    if of_catalog.pair == 0:
        raise _refused("catalog_url", "the result store has been in use, and the catalog is new")
    if of_catalog.pair != of_results.pair:
        raise _refused("results_url", "the catalog and the result store are of two centers")
    if before.mark > of_results.mark + 1:
        raise _refused("results_url", "the result store is older than the catalog: one of them was replaced")
    if of_catalog.mark < of_results.mark:
        raise _refused("catalog_url", "the catalog is older than the result store: one of them was replaced")
    if behind := _behind(results.consumed(), catalog.frames.last_positions()):
        raise _refused(
            "catalog_url",
            f"the catalog is older than the result store: it has fewer frames of {behind} than were applied",
        )


def _behind(consumed: Mapping[str, int], last: Mapping[str, int]) -> str:
    return ", ".join(sorted(key for key, position in consumed.items() if position > last.get(key, position))[:5])


def _refused(field: str, reason: str) -> InvalidConfig:
    return InvalidConfig(field, None, REMEDY, reason)


def advance_mark(catalog: Catalog, results: ResultStore) -> None:
    """Marks both stores, so that an older copy of one of them is recognised. Raises StorageError.

    The catalog is marked first, so its mark is never lower. Several processes may do this at the same time.
    """
    lineage = results.lineage()
    if lineage.pair:
        catalog.backups.raise_mark(lineage.mark + 1)
        results.raise_mark(lineage.mark + 1)


def reconcile(catalog: Catalog, results: ResultStore, pair: int, now_ms: int) -> None:
    """Makes a pair of two stores of different moments. Called while the center does not run.

    After a crash on the way, `require_pair` refuses the stores. All windows that have begun and are not final state
    that they may lack records. Answers get revisions that were never given.
    """
    lineage = Lineage(pair, 1)
    catalog.backups.reconcile(lineage, results.consumed(), now_ms)
    results.begin_after_restore(lineage, now_ms)
