"""What a route requires of its caller. Each route states it; `unguarded` finds those that do not.

A query that a caller may not read does not exist for it (404), so that names reveal nothing. One that it may read but
not change is forbidden to it (403).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from center.api.audit import begin_change
from center.api.problems import HttpProblem
from center.api.services import Services
from center.api_access import Principal, Role
from edgewater.model.errors import NotFound, Unauthenticated
from edgewater.model.query import QuerySpec

BEARER = HTTPBearer(auto_error=False, description="A token of the center's configuration, or a JWT of its issuer.")
Scope = Literal["query", "some", "all"]


@dataclass(frozen=True)
class Requires:
    """A dependency that lets principals with a role pass, at a limited rate.

    Attributes:
        role: None: everyone passes.
        scope: the role is needed on the query that the path names; on some query, where the endpoint looks at the
            query itself; or on everything.
    """

    role: Role | None
    scope: Scope = "some"

    async def __call__(
        self, request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)] = None
    ) -> None:
        if self.role is None:
            return
        center: Services = request.app.state.services
        principal = await center.authenticator.identify(request.headers.get("authorization"))
        request.state.principal = principal
        request.state.is_change = is_change = self.role != "reader"
        await center.rates.spend(principal, "changes" if is_change else "reads")
        if is_change:
            await begin_change(request, center.audit)
        if self.scope == "query":
            require(request, self.role, request.path_params["name"])
        elif not (principal.has(self.role) if self.scope == "some" else principal.may(self.role, None)):
            raise _forbidden(principal, self.role, "" if principal.has(self.role) else None)


async def begin_edit(request: Request, query: str) -> None:
    """Counts and records a request as a change of a query that its body names, as `EDITS` does before the body is read.

    Raises HttpProblem: the caller has sent too many changes.
    """
    center: Services = request.app.state.services
    request.state.is_change, request.state.target = True, f"/v1/queries/{query}"
    await center.rates.spend(caller(request), "changes")
    await begin_change(request, center.audit)


def require(request: Request, role: Role, query: str) -> None:
    """Raises NotFound for a query that the caller may not read, HttpProblem where it lacks the role."""
    principal = caller(request)
    if principal.may(role, query):
        return
    if role == "reader" or (not principal.may("reader", query) and request.method != "POST"):
        request.state.refused = "another's query"
        raise NotFound(f"query {query} is not registered")
    raise _forbidden(principal, role, query)


def require_inputs(request: Request, spec: QuerySpec) -> None:
    """Raises HttpProblem unless a grant of the caller names the query, and the stream and columns that it reads."""
    principal = caller(request)
    if not principal.may_register(spec.name, spec.stream, spec.columns):
        inputs = f"stream {spec.stream}" + (f" with columns {', '.join(spec.columns)}" if spec.columns else "")
        raise HttpProblem(
            "forbidden",
            f"{principal.name} may not register {spec.name} over {inputs}: no grant of the role editor names them in"
            " streams and columns; a grant with queries and without streams names no stream",
        )


async def require_still(request: Request) -> None:
    """Raises Unauthenticated if the credential of a long request is no longer accepted, or grants something else."""
    center: Services = request.app.state.services
    if await center.authenticator.identify(request.headers.get("authorization")) != caller(request):
        raise Unauthenticated("the credential is no longer accepted")


def _forbidden(principal: Principal, role: Role, query: str | None) -> HttpProblem:
    what = "" if query is None else f" for {query}" if query else " for all queries"
    return HttpProblem("forbidden", f"{principal.name} does not have the role {role}{what}")


async def _turn(request: Request) -> AsyncIterator[None]:
    center: Services = request.app.state.services
    async with center.turns.taken(caller(request)):
        yield


def caller(request: Request) -> Principal:
    """The principal that `Requires` has identified."""
    principal: Principal = request.state.principal
    return principal


Caller = Annotated[Principal, Depends(caller)]
OPEN = Depends(Requires(None))
"""For everyone."""
READS_QUERY = Depends(Requires("reader", "query"))
IN_TURN = Depends(_turn, scope="function")
"""For requests that read the stores, until the response is rendered; after what the route requires."""
READS = Depends(Requires("reader"))
READS_ALL = Depends(Requires("reader", "all"))
EDITS = Depends(Requires("editor"))
EDITS_QUERY = Depends(Requires("editor", "query"))
ADMINISTERS = Depends(Requires("admin", "all"))


def unguarded(router: APIRouter) -> Iterator[str]:
    """The paths of routes that do not state what they require."""
    for route in router.routes:
        if not (isinstance(route, APIRoute) and any(isinstance(d.dependency, Requires) for d in route.dependencies)):
            yield str(getattr(route, "path", route))
