"""What a request meets before vLLM's server does: limits on what a stranger costs, the token, the state of the weights.

`LimitedProtocol` reads connections: a header of at most MAX_HEADER_BYTES in MAX_HEADERS lines within HEADER_SECONDS, a
body that goes on arriving, at most MAX_CONNECTIONS, of which MAX_STRANGERS have not sent a whole header yet. uvicorn's
own options do not do that: its limit on headers is of another parser (h11), its limit on connections counts after the
header.

`Gate` is the outermost layer of the app. No request passes without the token. While a push replaces the weights, what
would sample waits for its end, and what would change the engine's state is refused; after a push that broke off, both
are refused until a whole one has arrived.
"""

import asyncio
import contextlib
import json
import time

from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from safety import credentials

MAX_BODY = 256 << 20  # bytes a request
MAX_HEADER_BYTES = 32 << 10  # request line included
MAX_HEADERS = 100
HEADER_SECONDS = 10.0  # from the connection, or from the first byte of a further request, to the end of the header
BODY_SECONDS = 30.0  # without a byte of a body that is not complete
MAX_STRANGERS = 1024  # connections without a whole header for GRACE seconds; the oldest are closed for new ones
GRACE = 2.0  # seconds in which what a connection sent may wait to be read
MAX_CONNECTIONS = 8192
PUSH_WAIT = 30.0  # seconds a request of vLLM's own routes waits for a push to end

# They look at the state themselves, and answer at any moment.
PUSH_ROUTES = {f"/{step}_weight_update" for step in ("start", "finish", "abort")} | {
    *(f"/adapters/{step}" for step in ("check", "connect", "start", "bucket", "finish", "abort", "lease", "release")),
    "/init_weight_transfer_engine",
    "/update_weights",
    "/sleep",
    "/wake_up",
}
# vLLM's routes that change the engine's state. In mid-push /resume would sample from weights that are not there yet.
CONTROL_ROUTES = {
    "/pause",
    "/resume",
    "/release_kv_cache_memory",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/scale_elastic_ep",
    "/fault_tolerance/apply",
    "/start_profile",
    "/stop_profile",
    "/shutdown_weight_transfer_engine",
    "/start_draft_weight_update",
    "/update_weight_version",
    "/weight_checker",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}
READING = {"GET", "HEAD", "OPTIONS"}


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, one object a connection. Which bytes cost what is known only here: uvicorn keeps headers as
    they come, and calls the app when they are complete."""

    strangers: dict["LimitedProtocol", float] = {}  # connections without a whole header, since when; the oldest first
    max_strangers, max_connections = MAX_STRANGERS, MAX_CONNECTIONS

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.received = 0  # bytes since the end of the last request, while no header was complete
        self.header_bytes = self.header_lines = 0  # of what the parser made of them
        self.in_header = self.in_body = self.too_large = False
        self.alarm: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections and not self.make_room():
            return self.refuse(503, f"the server has {self.max_connections} connections open already")
        self.expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self.settle()
        super().connection_lost(exc)

    def expect_header(self) -> None:
        """A header is to come, or to go on."""
        if self in self.strangers or self.transport.is_closing():
            return
        self.strangers[self] = self.loop.time()
        self.alarm = self.loop.call_later(HEADER_SECONDS, self.too_slow)
        while len(self.strangers) > self.max_strangers and self.make_room():
            pass

    def make_room(self) -> bool:
        """Close the oldest connection without a whole header; False where that might be on its way."""
        oldest, since = next(iter(self.strangers.items()), (None, 0.0))
        if oldest is None or self.loop.time() - since < GRACE:
            return False  # a burst of requests, such as a trainer's, whose headers are to be read yet
        oldest.settle()
        oldest.transport.close()
        return True

    def settle(self) -> None:
        """Nothing is waited for."""
        self.strangers.pop(self, None)
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None

    def too_slow(self, last_call: bool = False) -> None:
        if not last_call:  # the loop itself may have been late: what has arrived meanwhile is read first
            self.alarm = self.loop.call_later(0.1, self.too_slow, True)
        elif self.in_body and self.flow.read_paused:  # it is the app that does not read
            self.alarm = self.loop.call_later(BODY_SECONDS, self.too_slow)
        elif self.in_body or self.received:
            what, limit = ("body", BODY_SECONDS) if self.in_body else ("header", HEADER_SECONDS)
            self.refuse(408, f"waited {limit:g} s for the request's {what}")
        else:  # it has asked for nothing
            self.settle()
            self.transport.close()

    def refuse(self, status: int, message: str) -> None:
        """Answer without the app, and close."""
        self.settle()
        if self.transport.is_closing():
            return
        body = json.dumps({"error": {"message": message, "code": status}}).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What the parser raised on, our own complaint included."""
        if self.too_large:
            self.refuse(431, f"the request's header has more than {MAX_HEADER_BYTES} bytes or {MAX_HEADERS} lines")
        else:
            self.settle()
            super().send_400_response(msg)

    def data_received(self, data: bytes) -> None:
        between = not self.in_body
        super().data_received(data)
        if self.transport.is_closing() or self.transport.get_protocol() is not self:  # or it is a websocket now
            return
        if self.in_body:
            self.settle()
            self.alarm = self.loop.call_later(BODY_SECONDS, self.too_slow)
        elif self.in_header or self.cycle is None or self.cycle.response_complete:
            self.received += len(data) if between else 0
            if self.received > MAX_HEADER_BYTES:  # the parser does not announce a line before its end
                self.too_large = True
                self.send_400_response("")
            else:
                self.expect_header()

    # -- what the parser announces ------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.in_header, self.header_bytes, self.header_lines = True, 0, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self.count(len(url), 0)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.count(len(name) + len(value), 1)
        super().on_header(name, value)

    def count(self, size: int, lines: int) -> None:
        self.header_bytes += size
        self.header_lines += lines
        if self.header_bytes > MAX_HEADER_BYTES or self.header_lines > MAX_HEADERS:
            self.too_large = True
            raise ValueError("header too large")  # the parser stops, and send_400_response is called

    def on_headers_complete(self) -> None:
        self.settle()
        self.received = self.header_bytes = self.header_lines = 0  # there may be lines behind a body, too
        self.in_header, self.in_body = False, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.settle()
        self.in_body = False
        super().on_message_complete()


class Gate:
    """Outermost layer of the app (plain ASGI, so that no route and no websocket can be added past it)."""

    def __init__(self, app, token: str, pushes):
        self.app, self.pushes = app, pushes
        self.known = credentials.digests(token)

    def refusal(self, scope) -> tuple[int, str] | None:
        """Of what may not come in whatever the server does."""
        headers = dict(scope["headers"])
        if not credentials.presented(headers.get(b"authorization", b""), self.known):
            return 401, "this server wants the header 'Authorization: Bearer TOKEN' with the token it was started with"
        length = headers.get(b"content-length", b"0")
        if b"transfer-encoding" in headers:
            return 411, "send the request with Content-Length instead of in chunks"
        if not length.isdigit() or int(length) > MAX_BODY:
            return 413, f"the request has {length.decode('latin-1')[:20]} bytes, at most {MAX_BODY} are taken"
        return None

    async def __call__(self, scope, receive, send):
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        refusal = self.refusal(scope)
        if refusal is None and scope.get("method") not in READING and path not in PUSH_ROUTES:
            if path in CONTROL_ROUTES and not self.unsound(path):
                async with self.pushes.lock:  # no push begins meanwhile
                    if not self.unsound(path):
                        if path in ("/pause", "/resume"):
                            self.pushes.may_be_paused = path == "/pause"
                        return await self.app(scope, receive, send)
            elif path not in CONTROL_ROUTES and path != "/generate":
                with contextlib.suppress(TimeoutError):  # what follows says so
                    await asyncio.wait_for(self.pushes.settled.wait(), PUSH_WAIT)
            refusal = self.unsound(path)
        if refusal is None:
            return await self.app(scope, receive, send)
        if scope["type"] == "websocket":
            await receive()
            code = 1013 if refusal[0] == 503 else 1008  # try again later; against the rules
            return await send({"type": "websocket.close", "code": code, "reason": refusal[1][:120]})
        return await failure(*refusal)(scope, receive, send)

    def unsound(self, path: str) -> tuple | None:
        """Why the engine cannot be used now: arguments of `failure`. /generate waits for the end of a push by itself,
        as long as its client does, since it has to know which weights it began with."""
        if self.pushes.active and path != "/generate":
            seconds = time.monotonic() - self.pushes.since
            return 503, f"a weight push is under way since {seconds:.0f} s; try {path} again after its end", 5
        return (503, self.pushes.broken) if self.pushes.broken else None


def failure(status: int, message: str, retry_after: int | None = None) -> JSONResponse:
    """An error in the form of the OpenAI API, not passed through vLLM's handlers, which blot out tracebacks.

    retry_after: seconds after which it makes sense to ask again. Our client and OpenAI's then do so by themselves; with
    a 503 that has none, they are told that it makes no sense.
    """
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    if status == 503 and retry_after is None:
        headers["x-should-retry"] = "false"
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (401, 411, 413):
        headers["Connection"] = "close"  # the body is not worth reading
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status, headers=headers)
