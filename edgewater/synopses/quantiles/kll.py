"""KLL as a user holds it, and as a query names it. How it works: `kll_stack`."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import pyarrow as pa

from edgewater.errors import InvalidRequest
from edgewater.synopses.hashing import DEFAULT_SEED
from edgewater.synopses.items import check_share
from edgewater.synopses.quantiles.kll_stack import DEFAULT_K, MAX_K, MIN_K, KllStack
from edgewater.synopses.registry import Function, Parameter, Parameters, register_function, register_kind
from edgewater.synopses.single import SingleSynopsis

__all__ = ["DEFAULT_K", "MAX_K", "MIN_K", "Kll", "KllStack"]

K_ACCEPTED = f"a whole number from {MIN_K} to {MAX_K}"


class Kll(SingleSynopsis[KllStack]):
    """Quantiles within a rank: with k = 200, of a single pass, about ±1 % of the values at 95 %.

    Args:
        k: 8 to 65536; the error of ranks falls as 1/k.
        source: best another number for each part that will be merged.
        seed: of the coins. Only synopses of equal k and seed merge.
    """

    stack_type = KllStack
    types: ClassVar[tuple[str, ...]] = ("int64", "float64")

    def __init__(self, k: int = DEFAULT_K, *, source: int = 0, seed: int = DEFAULT_SEED) -> None:
        super().__init__(KllStack(1, k=k, source=source, seed=seed))

    @classmethod
    def for_error(cls, epsilon: float, *, source: int = 0, seed: int = DEFAULT_SEED) -> Self:
        """One whose ranks are within ±epsilon of the values at 95 %, however many there are.

        The worst case is many small merges, where V comes to 0.6·n²/k² and 2.1/k is reached (measured; 3/k is
        taken).
        """
        k = max(math.ceil(_WORST / check_share("epsilon", epsilon)), MIN_K)
        if k > MAX_K:
            raise InvalidRequest("epsilon", epsilon, f"at least {_WORST / MAX_K:.5f}")
        return cls(k, source=source, seed=seed)

    def rank_error(self, confidence: float = 0.95) -> float:
        """How far ranks may be off now, as a part of the values."""
        return float(self._stack.rank_errors(confidence)[0])


_WORST = 3.0


def _read_k(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not MIN_K <= value <= MAX_K:
        raise ValueError(K_ACCEPTED)
    return value


def _make(parameters: Parameters, _: pa.DataType | None) -> KllStack:
    return KllStack(**dict(parameters))


register_kind(KllStack)
register_function(Function("kll", _make, parameters={"k": Parameter(DEFAULT_K, _read_k, K_ACCEPTED)}))
