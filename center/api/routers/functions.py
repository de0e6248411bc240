"""The functions that a query's measures may call."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter

from center.api.access import READS
from center.api.measure_models import ApiModel
from edgewater.synopses import REQUIRED, Function, RowSampleStack, SampleStack, function_named, function_names, plugins

router = APIRouter(prefix="/v1/functions", tags=["queries"])


class FunctionParameter(ApiModel):
    name: str
    default: Any
    """Null: it is required."""
    accepted: str


class FunctionEntry(ApiModel):
    """A function that a query's measure may call."""

    name: str
    argument: Literal["none", "optional", "required", "rows"]
    types: list[str]
    """Of the argument."""
    parameters: list[FunctionParameter]
    goals: list[str]
    """Accuracy goals that it accepts in place of parameters."""
    interval: Literal["exact", "sketch", "sample"] | None
    """Where its own error comes from. `exact`: there is none but rounding. Null: unknown."""
    error_budget: Literal["sum", "extremum"] | None
    """How an error budget divides among edges: in shares, or each uses it in full. Null: it takes none."""
    origin: str


class FunctionList(ApiModel):
    functions: list[FunctionEntry]


@router.get("", dependencies=[READS], summary="The functions that measures may call")
def functions() -> FunctionList:
    """Lists the functions of this installation and its plugins.

    `edgewater synopses` also lists the questions of each synopsis.
    """
    found = (function_named(name) for name in function_names())
    return FunctionList(functions=[_entry(f) for f in found if f is not None and not f.unavailable])


_REQUIRING: dict[str, Literal["sample", "sketch"]] = {"bernoulli": "sample", "equi_width": "sketch"}
"""Interval kinds of functions with required parameters; their synopsis cannot be made without them."""


def _entry(function: Function) -> FunctionEntry:
    parameters = [
        FunctionParameter(name=n, default=None if p.default is REQUIRED else p.default, accepted=p.accepted)
        for n, p in function.parameters.items()
    ]
    return FunctionEntry(
        name=function.name,
        argument=function.argument,
        types=[] if function.argument == "none" else list(function.types),
        parameters=parameters,
        goals=list(function.goals),
        interval=_interval(function),
        error_budget=function.error,
        origin=str(plugins.INSTALLED.origins.get(function.name, "edgewater")),
    )


def _interval(function: Function) -> Literal["exact", "sketch", "sample"] | None:
    if function.exact:
        return "exact"
    if any(p.default is REQUIRED for p in function.parameters.values()):
        return _REQUIRING.get(function.name)
    stack = function.make(function.read_parameters([], {}, function.name), None)
    return "sample" if isinstance(stack, SampleStack | RowSampleStack) else "sketch"
