"""Checks whether the bytes of a partial can be what a registered query expects from its edges (`PartialCheck`).

Everything that is compared comes from the query, and nothing comes from earlier partials. The check reads the headers,
the lengths of arrays, and those numbers that are counts. Whether the other numbers are a valid state is checked when
the partial is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from edgewater.base.errors import CorruptSynopsis, IncompatibleSynopses, SynopsisError, UnsupportedVersion
from edgewater.base.streams import COLUMN_TYPES, type_name
from edgewater.model.expressions import columns_of
from edgewater.model.measure import Measure
from edgewater.model.query import BoundQuery, QuerySpec
from edgewater.model.syntax import parse_sql
from edgewater.synopses import GroupedAggregate, Stack
from edgewater.synopses.encoding import codec
from edgewater.synopses.encoding.layout import KEYS, STRINGS, Field, Layout, check_array, layout_for
from edgewater.wire.synopsis_pb2 import Array as ArrayMessage
from edgewater.wire.synopsis_pb2 import Synopsis as SynopsisMessage

MAX_RECORDS = 1 << 53  # limit: counts that float64 represents
MAX_GROUPS = 1 << 22
"""The largest number of groups of a partial."""
MAX_STATE_BYTES = 256 << 20
"""The largest memory of a partial's states of fixed size, in bytes. It does not depend on the partial's bytes."""

_NAMES = {STRINGS: "string", "<i8": "int64", "<f8": "float64", "|b1": "bool"}
_SHOWN = 200  # limit: length of a message
_SAMPLE_GROUPS = 4  # limit: CPU of the check
_MAX_MESSAGES = 1 << 12  # keys, measures and their arrays
_MAX_HEADERS = 64  # limit: memory of the cache


@dataclass(frozen=True, slots=True)
class PartialFacts:
    """The results of the check of a partial.

    Attributes:
        plain_bytes: the size of the partial in bytes.
        state_bytes: the memory of its decoded arrays and of its states of fixed size.
    """

    records: int
    groups: int
    plain_bytes: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class StackHeader:
    """The parts that are the same in every partial for one measure and one type of its argument."""

    kind: str
    version: int
    parameters: str
    seed: int
    layouts: tuple[Layout, ...]
    group_bytes: int

    @classmethod
    def of(cls, stack: Stack) -> Self:
        message = stack.to_message()
        layouts: tuple[Layout, ...] = getattr(stack, "layouts", ())
        empty = stack.nbytes
        stack.grow(_SAMPLE_GROUPS)
        group_bytes = -(-max(stack.nbytes - empty, 0) // _SAMPLE_GROUPS)
        strict = tuple(layout.strict() for layout in layouts)
        return cls(message.kind, message.version, message.parameters, message.seed, strict, group_bytes)

    def fits(self, message: SynopsisMessage) -> bool:
        return message.kind == self.kind and message.parameters == self.parameters and message.seed == self.seed

    def __str__(self) -> str:
        # Without the seed, because alarms and logs show this text, and the seed is a secret.
        return f"{self.kind} {self.parameters} with the query's seed"


def group_bytes(bound: BoundQuery) -> int:
    """Returns the memory of one group's states of fixed size, in bytes."""
    headers = (StackHeader.of(m.measure.stack(m.argument.type if m.argument else None)) for m in bound.measures)
    return sum(header.group_bytes for header in headers)


def max_groups(group_bytes: int) -> int:
    """Returns the largest number of groups of a partial, at least one."""
    return max(min(MAX_STATE_BYTES // max(group_bytes, 1), MAX_GROUPS), 1)


class PartialCheck:
    """The check of the partials of one query.

    Args:
        keys: name -> type of each column of `group_by`; None if the type is unknown.
        measures: name -> the headers that the measure's state may have, one per type of its argument.
        max_groups, max_state_bytes: bounds of a partial.
    """

    def __init__(
        self,
        keys: Mapping[str, pa.DataType | None],
        measures: Mapping[str, Sequence[StackHeader]],
        max_groups: int = MAX_GROUPS,
        max_state_bytes: int = MAX_STATE_BYTES,
    ) -> None:
        self._keys = {name: None if type_ is None else type_name(type_) for name, type_ in keys.items()}
        self._measures = {name: tuple(headers) for name, headers in measures.items()}
        self._max_groups = max_groups if keys else 1
        self._max_state_bytes = max_state_bytes
        self._headers: dict[tuple[str, ...], str] = {}
        counted = Field("number of groups", ("<i8",), ((1,),), total="groups")
        self._arrays = Layout.of(counted, *(Field(f"key {name}", (KEYS,), (("groups",),)) for name in keys))

    @classmethod
    def of(cls, spec: QuerySpec, columns: Mapping[str, pa.DataType] | None = None) -> Self:
        """Returns the check of a query's partials.

        Args:
            columns: the columns of the query's stream; None if unknown. Then all types are accepted that the query's
                functions accept.

        Raises:
            InvalidQuery: the query does not fit these columns.
        """
        if columns is None:
            types = {m.name: _argument_types(m) for m in spec.measures}
            keys: Mapping[str, pa.DataType | None] = dict.fromkeys(spec.group_by)
        else:
            bound = spec.bind(columns)
            types = {m.measure.name: [m.argument.type if m.argument else None] for m in bound.measures}
            keys = dict(zip(spec.group_by, bound.group_types, strict=True))
        measures = {
            m.name: list(dict.fromkeys(StackHeader.of(m.stack(t)) for t in types[m.name])) for m in spec.measures
        }
        return cls(keys, measures)

    def check(self, payload: bytes) -> PartialFacts:
        """Checks the bytes of a partial.

        Raises:
            CorruptSynopsis: the bytes are damaged or foreign, or arrays do not belong together.
            IncompatibleSynopses: the kind, the parameters, the seed, the keys or the measures differ from the query.
            UnsupportedVersion: a newer release has written the bytes.
        """
        message = codec.unseal(payload, _MAX_MESSAGES)
        kind = GroupedAggregate.kind
        if message.kind != kind:
            raise IncompatibleSynopses(f"kind: {message.kind[:_SHOWN]!r}; expected {kind!r}")
        _check_version("", message, GroupedAggregate.version)
        if message.records > MAX_RECORDS:
            raise CorruptSynopsis(f"records: {message.records}; expected 0 to {MAX_RECORDS}")
        found, wanted = (len(message.arrays), len(message.parts)), (len(self._keys) + 1, len(self._measures))
        if found != wanted:
            raise IncompatibleSynopses(
                f"{found[0]} arrays and {found[1]} measures; expected {wanted[0]} arrays, one per key and the number "
                f"of groups, and {wanted[1]} measures"
            )
        # The last array is the number of groups. All other arrays must have this length.
        lengths: dict[str, int] = {}
        state_bytes = self._arrays.check(kind, [message.arrays[-1], *message.arrays[:-1]], lengths)
        groups = lengths["groups"]
        if groups > self._max_groups:
            raise CorruptSynopsis(f"groups: {groups}; expected at most {self._max_groups}")
        self._check_parameters(message)
        fixed_bytes = 0
        for part, (name, headers) in zip(message.parts, self._measures.items(), strict=True):
            header = next((h for h in headers if h.fits(part)), None)
            if header is None:
                raise IncompatibleSynopses(
                    f"measures.{name}: {part.kind[:_SHOWN]} {part.parameters[:_SHOWN]} with "
                    f"{'the' if part.seed == headers[0].seed else 'another'} seed; expected "
                    f"{' or '.join(map(str, headers))}"
                )
            fixed_bytes += groups * header.group_bytes
            state_bytes += _check_stack(f"measures.{name}", header, part, groups)
        if fixed_bytes > self._max_state_bytes:
            raise CorruptSynopsis(
                f"groups: {groups} of {fixed_bytes // groups} bytes each; expected at most {self._max_state_bytes} "
                "bytes altogether"
            )
        return PartialFacts(message.records, groups, len(payload), state_bytes + fixed_bytes)

    def _check_parameters(self, message: SynopsisMessage) -> None:
        """Checks the names and types of keys, and the names of measures.

        It does not parse the parameters, because the types of the arrays determine them.
        """
        types = tuple(_key_type(array) for array in message.arrays[:-1])
        for (name, wanted), found in zip(self._keys.items(), types, strict=True):
            if wanted not in (None, found):
                raise IncompatibleSynopses(
                    f"group_by.{name}: keys of type {found}; expected {wanted}, the type of this key"
                    " (if a column of the stream has changed, register the query again)"
                )
        header = self._headers.get(types)
        if header is None:
            named = {name: COLUMN_TYPES[of] for name, of in zip(self._keys, types, strict=True)}
            empty = GroupedAggregate(named, {})
            header = codec.header("", 1, {**empty.parameters, "measures": list(self._measures)}).parameters
            if len(self._headers) < _MAX_HEADERS:
                self._headers[types] = header
        if message.parameters != header:
            raise IncompatibleSynopses(f"parameters: {message.parameters[:_SHOWN]}; expected {header}")


def _argument_types(measure: Measure) -> list[pa.DataType | None]:
    """Returns the types that a measure's argument may have."""
    if measure.argument is None:
        return [None]
    if measure.function.sample is not None:
        columns = columns_of(parse_sql(measure.argument, f"measures.{measure.name}"))
        return [pa.list_(pa.float64(), len(columns))]
    return [COLUMN_TYPES[name] for name in measure.function.types]


def _key_type(array: ArrayMessage) -> str:
    return _NAMES[STRINGS if array.encoding == ArrayMessage.UTF8 else array.type]


def _check_version(at: str, message: SynopsisMessage, version: int) -> None:
    if not 1 <= message.version <= version:
        raise UnsupportedVersion(f"{at}version: {message.version}; this release reads 1 to {version}")


def _check_stack(at: str, header: StackHeader, message: SynopsisMessage, groups: int) -> int:
    """Checks the state of a measure. Returns the bytes of its decoded arrays."""
    _check_version(f"{at}.", message, header.version)
    try:
        if header.layouts:
            if message.parts:
                raise CorruptSynopsis(f"{header.kind}: {len(message.parts)} nested synopses; expected none")
            layout = layout_for(header.kind, header.layouts, message.arrays)
            return layout.check(header.kind, message.arrays, {"groups": groups})
        # Each array of a third-party kind is checked alone.
        return sum(check_array(header.kind, str(i), array)[-1] for i, array in enumerate(message.arrays))
    except SynopsisError as exc:
        raise type(exc)(f"{at}: {exc}") from exc
