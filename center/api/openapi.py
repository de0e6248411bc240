"""OpenAPI responses that are not JSON models: problems, and answers in three forms."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from types import ModuleType
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from typing_extensions import get_original_bases, is_typeddict

from center.api import models
from center.api.access import IN_TURN, READS_QUERY, Requires
from center.api.models import ProblemDetails
from center.api.problems import HTTP_PROBLEMS, PROBLEMS
from edgewater.model import replies
from edgewater.model.json_types import Document
from edgewater.model.table_texts import ARROW, CSV, JSON
from edgewater.runtime.problems import MEDIA_TYPE

_TITLES = {p.status: p.title for p in (*PROBLEMS.values(), *HTTP_PROBLEMS.values())} | {
    404: "Not found",
    422: "Invalid input; `field`, `value` and `accepted` say why",
}


OpenApi = dict[str, Any]
"""A part of the OpenAPI document, as FastAPI takes it."""
_PROBLEM: OpenApi = {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{ProblemDetails.__name__}"}}}
Responses = dict[int | str, OpenApi]
"""FastAPI's `responses` argument."""


def json_body(example: Document) -> OpenApi:
    """Returns the `openapi_extra` of an endpoint that reads a document."""
    content = {"application/json": {"schema": {"type": "object"}, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


def _describe_members(schemas: OpenApi) -> None:
    """Adds the docstrings of the members of replies, inherited ones too.

    pydantic would parse the whole module for each type, when the API starts.
    """
    docs = _member_docs(replies) | _member_docs(models)
    for kind in (models.Answer, *(each for each in vars(replies).values() if is_typeddict(each))):
        members = schemas.get(kind.__name__, {}).get("properties", {})
        kinds = [kind]
        for each in kinds:
            kinds += [base for base in get_original_bases(each) if is_typeddict(base)]
            for name, text in docs.get(each.__name__, {}).items():
                if name in members:
                    members[name].setdefault("description", text)


def _member_docs(module: ModuleType) -> dict[str, dict[str, str]]:
    """Returns the docstrings of the members of a module's classes, by class and member."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for member, text in pairwise(node.body):
            match member, text:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(said))):
                    found.setdefault(node.name, {})[name] = inspect.cleandoc(said)
    return found


def problems(*statuses: int) -> Responses:
    """Returns the `responses` of an endpoint that can fail with these statuses, besides those that `describe` adds."""
    return {s: {"description": _TITLES[s], "content": _PROBLEM} for s in statuses}


def describe(app: FastAPI) -> None:
    """Completes the OpenAPI document: the members of replies, and the problems that follow from what a route is."""
    original = app.openapi

    def openapi() -> OpenApi:
        if app.openapi_schema is not None:
            return app.openapi_schema
        document = original()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        _describe_members(schemas)
        schemas["ProblemDetails"] = ProblemDetails.model_json_schema()
        for route in app.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                for method in route.methods or ():
                    _add_problems(document["paths"][route.path_format][method.lower()], route, method)
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _add_problems(operation: OpenApi, route: APIRoute, method: str) -> None:
    responses, has_body, in_path = operation["responses"], "requestBody" in operation, bool(route.param_convertors)
    roles = [d.dependency.role for d in route.dependencies if isinstance(d.dependency, Requires)]
    statuses = [403] if {"editor", "admin"}.intersection(roles) else []
    statuses += [404] if in_path and method != "PUT" else []  # PUT makes what is not there
    statuses += [408, 413, 415] if has_body else []
    statuses += [422] if has_body or "parameters" in operation else []
    for status in statuses:
        responses[str(status)] = {"description": _TITLES[status], "content": _PROBLEM}
    responses["default"] = {"description": "Any other problem.", "content": _PROBLEM}


def answering(model: type[Any], *statuses: int) -> dict[str, Any]:
    """Returns the options of the route of an endpoint that returns answers of a query, by ``Accept``."""
    ok = {
        "model": model,
        "description": "By `format` or `Accept`: JSON, CSV (a row per group), or an Arrow IPC stream whose schema"
        " metadata `edgewater.answers` has the quality of each answer.",
        "content": {
            JSON: {},
            CSV: {"schema": {"type": "string"}},
            ARROW: {"schema": {"type": "string", "format": "binary"}},
        },
        "headers": {"ETag": {"description": "Strong; send it as If-None-Match.", "schema": {"type": "string"}}},
    }
    responses = {200: ok, 304: {"description": "The client's copy is current."}, **problems(404, 406, *statuses)}
    return {"dependencies": [READS_QUERY, IN_TURN], "response_model": None, "responses": responses}
