"""A virtual network: gRPC calls between edges and gateways, that are slow, cut, or left half open.

A call is ordered in each direction, as TCP is. What the network can do to it: delay messages, lose everything from
some moment on with or without telling either end, and deliver what was sent in an old call after a new one was opened.
"""

from __future__ import annotations

import asyncio
import random  # noqa: TID251  (a generator of its own per seed, whose draws are cheap)
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc.aio import EOF, AioRpcError, Metadata

from edgewater.wire import uplink_pb2 as pb
from tests.simulation.lies import Liar
from tests.simulation.virtual import Process, VirtualLoop, this_process

KEEPALIVE_S = 5.0
"""After this time an end of a call that the other end has left without a word finds out."""


class Pipe:
    """One direction of a call: messages in order, each after a delay."""

    def __init__(self, loop: VirtualLoop, delay_s: Callable[[], float]) -> None:
        self._loop = loop
        self._delay_s = delay_s
        self._last_s = 0.0
        self._sent: deque[Callable[[], None]] = deque()
        self._received: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self.lost = False
        self.ended = False
        self.error: Exception | None = None

    def send(self, message: bytes) -> None:
        if not self.lost:
            self._later(lambda: self._received.append(message))

    def end(self, error: Exception | None = None) -> None:
        """Ends the direction after what has been sent."""
        if not self.lost:
            self._later(lambda: self._end(error))

    def _later(self, deliver: Callable[[], None]) -> None:
        self._last_s = max(self._last_s, self._loop.time() + self._delay_s())
        self._sent.append(deliver)
        self._loop.call_at(self._last_s, self._deliver_next)

    def _deliver_next(self) -> None:
        deliver = self._sent.popleft()  # timers that are due at the same moment fire in any order
        if not (self.ended or self.error):
            deliver()
            self._changed.set()

    def _end(self, error: Exception | None) -> None:
        self.ended, self.error = error is None, error

    def fail(self, error: Exception) -> None:
        """Ends the direction now; what is on its way is lost."""
        if not (self.ended or self.error):
            self.error = error
            self._received.clear()
            self._changed.set()

    async def receive(self) -> bytes | None:
        """The next message; None: there are none left. Raises the error of the call."""
        while not self._received:
            if self.error is not None:
                raise self.error
            if self.ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._received.popleft()


def broken(details: str) -> AioRpcError:
    return AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details=details)


class Call:
    """One call of the `Session` RPC: the edge's end is `EdgeEnd`, the gateway's `GatewayEnd`."""

    def __init__(self, network: Network, edge: Process, gateway: Process) -> None:
        self.network, self.edge, self.gateway = network, edge, gateway
        link = network.link(edge.name)
        self.up = Pipe(network.loop, link.delay_s)
        self.down = Pipe(network.loop, link.delay_s)
        self.status = grpc.StatusCode.OK
        self.details = ""
        self.trailing: Any = ()
        self.serving: asyncio.Task[Any] | None = None
        self.open = True

    def cut(self, *, tell_edge: bool, tell_gateway: bool, flush: bool, gateway_s: float = KEEPALIVE_S) -> None:
        """Breaks the call. An end that is not told finds out later; with `flush`, what was sent up still arrives.

        Args:
            gateway_s: after this time the gateway finds out, if it is not told.
        """
        if not self.open:
            return
        self.open = False
        self.up.lost = self.down.lost = True
        loop, rng = self.network.loop, self.network.rng
        edge_s = rng.uniform(0, 0.05) if tell_edge else 4 * KEEPALIVE_S
        gateway_s = rng.uniform(0, 0.05) if tell_gateway else gateway_s
        if flush:
            gateway_s = max(gateway_s, self.up._last_s - loop.time() + 0.001)
        else:
            self.up.fail(broken("cut"))
        loop.call_later(edge_s, lambda: self.down.fail(broken("cut")))
        loop.call_later(gateway_s, self._stop_serving)

    def _stop_serving(self) -> None:
        if self.serving is not None:
            self.serving.cancel()

    # The edge's end

    async def write(self, message: pb.FromEdge) -> None:
        self.edge.step("send")
        if self.edge.name in self.network.liars:
            message = self.network.liars[self.edge.name].altered(message)
        if self.down.error is not None:
            raise self.down.error
        self.up.send(message.SerializeToString())
        await asyncio.sleep(0)

    async def read(self) -> Any:
        data = await self.down.receive()
        self.edge.step("receive")
        return EOF if data is None else pb.ToEdge.FromString(data)

    async def done_writing(self) -> None:
        self.up.end()

    def cancel(self) -> None:
        rng = self.network.rng
        self.cut(tell_edge=True, tell_gateway=rng.random() < 0.7, flush=rng.random() < 0.5)


class EdgeEnd:
    """What `edge.uplink` sees of a call."""

    def __init__(self, call: Call | None) -> None:
        self._call = call

    def _open(self) -> Call:
        if self._call is None:
            raise broken("failed to connect to all addresses")
        return self._call

    async def write(self, message: pb.FromEdge) -> None:
        await self._open().write(message)

    async def read(self) -> Any:
        return await self._open().read()

    async def done_writing(self) -> None:
        await self._open().done_writing()

    async def code(self) -> grpc.StatusCode:
        return self._open().status

    async def details(self) -> str:
        return self._open().details

    def done(self) -> bool:
        return self._call is None or self._call.down.ended or self._call.down.error is not None

    def cancelled(self) -> bool:
        return False

    async def trailing_metadata(self) -> Any:
        return () if self._call is None else self._call.trailing

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()


class GatewayEnd:
    """What `center.ingest` sees of a call: its context."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def invocation_metadata(self) -> tuple[Any, ...]:
        return ()

    def auth_context(self) -> dict[str, Any]:
        return {}

    async def write(self, message: pb.ToEdge) -> None:
        self._call.gateway.step("send")
        self._call.down.send(message.SerializeToString())
        await asyncio.sleep(0)

    def set_code(self, code: grpc.StatusCode) -> None:
        self._call.status = code

    def set_details(self, details: str) -> None:
        self._call.details = details

    def set_trailing_metadata(self, trailing: Any) -> None:
        self._call.trailing = trailing


class Link:
    """The way between one edge and the center."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.up = True
        self.latency_s = rng.choice((0.001, 0.01, 0.05, 0.2))
        self.slow = 1.0

    def delay_s(self) -> float:
        return self.slow * self.latency_s * self._rng.uniform(0.5, 1.5)


class Network:
    """All links and calls."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop, self.rng = loop, rng
        self._links: dict[str, Link] = {}
        self._calls: list[Call] = []
        self.server: Server | None = None
        self.liars: dict[str, Liar] = {}

    def link(self, edge: str) -> Link:
        if edge not in self._links:
            self._links[edge] = Link(self.rng)
        return self._links[edge]

    def connect(self) -> EdgeEnd:
        """Opens a call from the edge that runs now to the gateway."""
        edge, server = this_process(), self.server
        self._calls = [c for c in self._calls if c.open]
        if server is None or not server.process.alive or not self.link(edge.name).up:
            return EdgeEnd(None)
        call = Call(self, edge, server.process)
        self._calls.append(call)
        self.loop.call_later(self.link(edge.name).delay_s(), lambda: self._serve(call, server))
        return EdgeEnd(call)

    def _serve(self, call: Call, server: Server) -> None:
        if not server.process.alive or not call.open:
            return
        call.serving = server.process.spawn(self._session(call, server), f"session {call.edge.name}")

    async def _session(self, call: Call, server: Server) -> None:
        async def requests() -> AsyncIterator[pb.FromEdge]:
            while True:
                try:
                    data = await call.up.receive()
                except AioRpcError:
                    await asyncio.Event().wait()  # gRPC cancels the handler of a call that was cut
                if data is None:
                    return
                call.gateway.step("receive")
                yield pb.FromEdge.FromString(data)

        try:
            await server.serve(requests(), GatewayEnd(call))
            if call.status is grpc.StatusCode.OK:
                call.down.end()
            else:
                call.down.end(AioRpcError(call.status, Metadata(), Metadata(), details=call.details))
        except asyncio.CancelledError:
            pass
        except Exception as exc:  # gRPC ends the call; the gateway goes on
            server.process.report_failure(exc)
            call.down.end(AioRpcError(grpc.StatusCode.UNKNOWN, Metadata(), Metadata(), details=str(exc)))

    def cut(self, edge: str, **how: Any) -> None:
        """Breaks the edge's calls, as `Call.cut`."""
        for call in list(self._calls):
            if call.edge.name == edge:
                call.cut(**how)

    def on_death(self, process: Process) -> None:
        """The kernel of a killed process ends its calls; that of a machine without power does not."""
        told = self.rng.random() < 0.7
        for call in list(self._calls):
            if process in (call.edge, call.gateway):
                call.cut(tell_edge=told, tell_gateway=told, flush=process is call.edge and self.rng.random() < 0.5)


class Channel:
    """Stands for a gRPC channel at an edge."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        return None

    def stream_stream(self, _method: str, **_options: Any) -> Callable[..., EdgeEnd]:
        return lambda metadata=(): self._network.connect()


class Server:
    """Stands for the gRPC server of a gateway."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self.process = network, process
        self._session: Any = None

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_registered_method_handlers(self, _service: str, handlers: Any) -> None:
        self._session = handlers["Session"].stream_stream

    def add_insecure_port(self, _address: str) -> int:
        return 7400

    async def start(self) -> None:
        self._network.server = self

    async def stop(self, _grace_s: float) -> None:
        self._network.server = None

    async def serve(self, requests: AsyncIterator[pb.FromEdge], context: GatewayEnd) -> None:
        await self._session(requests, context)
