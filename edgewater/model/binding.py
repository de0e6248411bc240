"""Binds a parsed expression to the columns of a stream: `Binder` checks types and builds functions of record batches.

The operators are in `expressions`, `text_functions` and `time_functions`. Each operator is a function of the binder and
the node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from sqlglot import exp

from edgewater.base.errors import InvalidQuery
from edgewater.base.streams import COLUMN_TYPES, type_name
from edgewater.model import arithmetic
from edgewater.model.arithmetic import Value
from edgewater.model.record_functions import CallFailures
from edgewater.model.syntax import SUPPORTED_SYNTAX

Evaluate = Callable[[pa.RecordBatch], Value]
Operator = tuple[Any, Callable[["Binder", Any], "BoundExpression"], tuple[str, ...]]
"""An operator: the types of its syntax nodes, the function that binds such nodes, and the node arguments that the
function reads.
"""

NUMERIC = ("int64", "float64")


@dataclass(frozen=True, slots=True)
class BoundExpression:
    """An expression bound to a schema.

    Attributes:
        evaluate: returns the values of a batch: an array, or a scalar for all records.
        encode: returns the values of a batch as `encoded` does; None if `evaluate` is used.
    """

    type: pa.DataType
    evaluate: Evaluate
    encode: Callable[[pa.RecordBatch], pa.DictionaryArray] | None = None

    def encoded(self, batch: pa.RecordBatch) -> pa.Array:
        """Returns the same values as `array`, dictionary-encoded if they are computed per distinct text.

        A value may be in the dictionary several times.
        """
        return self.array(batch) if self.encode is None else self.encode(batch)

    def array(self, batch: pa.RecordBatch) -> pa.Array:
        """Returns the value of each record, one array of length ``batch.num_rows``."""
        value = self.evaluate(batch)
        if isinstance(value, pa.Scalar):
            return pa.repeat(value, batch.num_rows)
        if isinstance(value, pa.ChunkedArray):
            return value.combine_chunks()
        return value


class Binder:
    """Type-checks a syntax tree and compiles it into a closure over Arrow kernels.

    Args:
        field: the field of the query that has the expression, for errors.
        failures: counts failed calls of plugin functions.
        operators: the operators, which are tried in this order.
        read_once_per_text: operators that take more time per text than finding the distinct texts of a batch.
    """

    def __init__(
        self,
        columns: Mapping[str, pa.DataType],
        field: str,
        failures: CallFailures,
        operators: Sequence[Operator],
        read_once_per_text: tuple[type[exp.Expression], ...],
    ) -> None:
        self.columns = columns
        self.field = field
        self.failures = failures
        self._operators = operators
        self._read_once_per_text = read_once_per_text
        self._reads_distinct = False

    def bind(self, node: exp.Expression) -> BoundExpression:
        """Binds an expression of any type.

        Raises:
            InvalidQuery: the expression has an unknown column or operator, or an operand of the wrong type.
        """
        column = None if self._reads_distinct else self._only_text(node)
        if column is None:
            return self._bind(node)
        self._reads_distinct = True
        bound = self._bind(node)
        self._reads_distinct = False
        return _over_distinct(bound, column)

    def _only_text(self, node: exp.Expression) -> str | None:
        """Returns the text column of an expression that is faster to evaluate once per distinct text; None otherwise.

        Such an expression reads no other column. Plugin functions are called for each record, because their failed
        calls count per record.
        """
        names = {column.name for column in node.find_all(exp.Column)}
        if len(names) != 1 or not pa.types.is_string(self.columns.get(name := names.pop(), pa.null())):
            return None
        return name if node.find(*self._read_once_per_text) and not node.find(exp.Anonymous) else None

    def _bind(self, node: exp.Expression) -> BoundExpression:
        for base, bind, clauses in self._operators:
            if isinstance(node, base):
                # The parser accepts clauses that the method would ignore, as in TRIM('x' FROM s).
                if any(value for name, value in node.args.items() if name not in clauses):
                    raise self.error(node, "the operator or function with plain arguments only")
                return bind(self, node)
        raise self.error(node, SUPPORTED_SYNTAX, "unsupported expression")

    def error(self, node: exp.Expression, accepted: str, reason: str = "") -> InvalidQuery:
        """Returns the error for a part of the expression, with the field of the query that has the expression."""
        return InvalidQuery(self.field, node.sql(), accepted, reason)

    def numeric(self, node: exp.Expression) -> BoundExpression:
        """Binds an expression that must be a number or NULL."""
        bound = self.bind(node)
        if type_name(bound.type) not in NUMERIC and not pa.types.is_null(bound.type):
            raise self.error(node, "a number", f"its type is {type_name(bound.type)}")
        return bound

    def condition(self, node: exp.Expression) -> BoundExpression:
        """Binds an expression that must be boolean."""
        bound = self.bind(node)
        if not pa.types.is_boolean(bound.type):
            raise self.error(node, "a boolean expression", f"its type is {type_name(bound.type)}")
        return bound

    def text(self, node: exp.Expression) -> BoundExpression:
        """Binds an expression that must be a text."""
        bound = self.bind(node)
        if not pa.types.is_string(bound.type):
            raise self.error(node, "a string", f"its type is {type_name(bound.type)}")
        return bound

    def same_type(
        self, nodes: list[exp.Expression], parent: exp.Expression
    ) -> tuple[list[BoundExpression], pa.DataType]:
        """Binds operands and casts them to a common type, as `cast_to_same_type` does."""
        return self.cast_to_same_type([self.bind(node) for node in nodes], parent)

    def cast_to_same_type(
        self, bounds: list[BoundExpression], parent: exp.Expression
    ) -> tuple[list[BoundExpression], pa.DataType]:
        """Casts operands to a common type. Integers mixed with floats become float64. Null fits every type."""
        types = {type_name(b.type) for b in bounds if not pa.types.is_null(b.type)}
        if len(types) > 1 and types != set(NUMERIC):
            raise self.error(parent, "operands of the same type", "they are " + " and ".join(sorted(types)))
        common = pa.float64() if len(types) > 1 else COLUMN_TYPES[types.pop()] if types else pa.null()
        return [cast(b, common) for b in bounds], common

    def text_literal(self, node: exp.Expression | None, parent: exp.Expression, accepted: str) -> str:
        """Returns the value of a literal text."""
        if not (isinstance(node, exp.Literal) and node.is_string):
            raise self.error(parent, accepted)
        return str(node.this)

    def whole_number(self, node: exp.Expression | None, parent: exp.Expression, accepted: str) -> int:
        """Returns the value of a literal whole number."""
        literal = node.this if isinstance(node, exp.Neg) else node
        if not (isinstance(literal, exp.Literal) and literal.is_int and len(literal.name) < 10):
            raise self.error(parent, accepted)
        return -int(literal.this) if isinstance(node, exp.Neg) else int(literal.this)

    def as_text(self, node: exp.Expression) -> BoundExpression:
        """Binds an operand of a function that builds texts. Numbers and booleans are accepted, too."""
        return cast(self.bind(node), pa.string())


def _over_distinct(bound: BoundExpression, column: str) -> BoundExpression:
    """Returns an expression of one text column that is evaluated once per distinct text of a batch."""

    def encode(batch: pa.RecordBatch) -> pa.DictionaryArray:
        texts = batch.column(column).dictionary_encode(null_encoding="encode")
        values = bound.array(pa.RecordBatch.from_arrays([texts.dictionary], [column]))
        return pa.DictionaryArray.from_arrays(texts.indices, values)

    def evaluate(batch: pa.RecordBatch) -> Value:
        encoded = encode(batch)
        return encoded.dictionary.take(encoded.indices)

    return BoundExpression(bound.type, evaluate, encode)


def cast(bound: BoundExpression, target: pa.DataType) -> BoundExpression:
    """Returns the expression with its values cast to a type."""
    if bound.type == target:
        return bound
    return BoundExpression(target, lambda b: arithmetic.cast(bound.evaluate(b), target))


def inverted(condition: BoundExpression) -> BoundExpression:
    """Returns the negation of a condition. Null remains null."""
    return BoundExpression(pa.bool_(), lambda b: pc.invert(condition.evaluate(b)))
