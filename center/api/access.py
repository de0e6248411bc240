"""What a route requires of its caller. Each route states it; `unguarded` finds routes that do not.

If a caller may not read a query, it gets 404, so that names reveal nothing. If it may read the query but not change it,
it gets 403.
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
from edgewater.base.errors import NotFound, Unauthenticated
from edgewater.model.query import QuerySpec

BEARER = HTTPBearer(auto_error=False, description="A token of the center's configuration, or a JWT of its issuer.")
Scope = Literal["query", "some", "all"]


@dataclass(frozen=True)
class Requires:
    """A dependency that lets principals with a role pass, at a limited rate.

    Attributes:
        role: None: everyone passes.
        scope: what the role must cover: the query that the path names; some query, if the endpoint checks the query
            itself; or all queries.
        noun: what the path names. Grants name tables in the same way as queries.
    """

    role: Role | None
    scope: Scope = "some"
    noun: str = "query"

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
            require(request, self.role, request.path_params["name"], self.noun)
        elif not (principal.has(self.role) if self.scope == "some" else principal.may(self.role, None)):
            raise _forbidden(principal, self.role, "" if principal.has(self.role) else None)


async def begin_edit(request: Request, query: str) -> None:
    """Counts and records a request as a change of a query that its body names.

    `EDITS` does so before the body is read.

    Raises HttpProblem: the caller has sent too many changes.
    """
    center: Services = request.app.state.services
    request.state.is_change, request.state.target = True, f"/v1/queries/{query}"
    await center.rates.spend(caller(request), "changes")
    await begin_change(request, center.audit)


def require(request: Request, role: Role, query: str, noun: str = "query") -> None:
    """Raises NotFound if the caller may not read the query or table, HttpProblem if it lacks the role."""
    principal = caller(request)
    if principal.may(role, query):
        return
    if role == "reader" or (not principal.may("reader", query) and request.method != "POST"):
        request.state.refused = "another's query"
        raise NotFound(f"{noun} {query} is not registered")
    raise _forbidden(principal, role, query)


def require_inputs(request: Request, spec: QuerySpec) -> None:
    """Raises HttpProblem unless a grant of the caller covers the query, and the stream and columns that it reads."""
    principal = caller(request)
    if not principal.may_register(spec.name, spec.stream, spec.columns):
        inputs = f"stream {spec.stream}" + (f" with columns {', '.join(spec.columns)}" if spec.columns else "")
        raise HttpProblem(
            "forbidden",
            f"{principal.name} may not register {spec.name} over {inputs}: no grant of the role editor names them in"
            " streams and columns; a grant with queries and without streams names no stream",
        )


async def require_still(request: Request) -> None:
    """Raises Unauthenticated if the credential of a long request is no longer accepted, or grants other rights."""
    center: Services = request.app.state.services
    if await center.authenticator.identify(request.headers.get("authorization")) != caller(request):
        raise Unauthenticated("the credential is no longer accepted")


def _forbidden(principal: Principal, role: Role, query: str | None) -> HttpProblem:
    scope = "" if query is None else f" for {query}" if query else " for all queries"
    return HttpProblem("forbidden", f"{principal.name} does not have the role {role}{scope}")


async def _turn(request: Request) -> AsyncIterator[None]:
    center: Services = request.app.state.services
    async with center.turns.taken(caller(request)):
        yield


def caller(request: Request) -> Principal:
    """Returns the principal that `Requires` has identified."""
    principal: Principal = request.state.principal
    return principal


Caller = Annotated[Principal, Depends(caller)]
OPEN = Depends(Requires(None))
"""For everyone."""
READS_QUERY = Depends(Requires("reader", "query"))
READS_TABLE = Depends(Requires("reader", "query", "table"))
EDITS_TABLE = Depends(Requires("editor", "query", "table"))
IN_TURN = Depends(_turn, scope="function")
"""For requests that read the stores. The turn ends when the response is rendered. It follows the route's own
requirement."""
READS = Depends(Requires("reader"))
READS_ALL = Depends(Requires("reader", "all"))
EDITS = Depends(Requires("editor"))
EDITS_QUERY = Depends(Requires("editor", "query"))
ADMINISTERS = Depends(Requires("admin", "all"))


def unguarded(router: APIRouter) -> Iterator[str]:
    """Yields the paths of routes that do not state what they require."""
    for route in router.routes:
        if not (isinstance(route, APIRoute) and any(isinstance(d.dependency, Requires) for d in route.dependencies)):
            yield str(getattr(route, "path", route))
