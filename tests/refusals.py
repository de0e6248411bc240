"""What is refused: by the class, the field and the value of the error, whatever its text is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edgewater.base.errors import InvalidInput

_ANY = object()


@contextmanager
def refused(error: type[InvalidInput], field: str, value: object = _ANY) -> Iterator[None]:
    """Expects an error whose field has this path, or ends with it, and whose value is this one."""
    with pytest.raises(error) as caught:
        yield
    assert caught.value.field == field or caught.value.field.endswith(f".{field}"), caught.value
    assert value is _ANY or caught.value.value == value, caught.value
