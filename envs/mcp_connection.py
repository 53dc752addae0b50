"""A connection to an MCP server (mcp_tools.py has the servers of a file), the log of all of them, and their results.

All connections live on one event loop of their own, in a daemon thread; `on_loop` runs a coroutine there.
"""

import asyncio
import collections
import contextlib
import json
import logging
import os
import tempfile
import threading
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path

from inputs.parts import text_part
from inputs.pictures import PictureError, open_image, read_image
from safety import secrets
from safety.calls import to_thread

# The MCP SDK and what comes with it take a second, and are imported by connections.

LONGEST_PAUSE = 60.0  # seconds until a server that cannot be started, or dies in each first call, is started again
END_SECONDS = 7.0  # the SDK gives a process .5 s to read what is left, 2 s to end, and 2 each after SIGTERM and SIGKILL
LOG_BYTES = 10_000_000  # of the log, and as many of the one before
LIVE: set = set()  # Connections, and others with a coroutine `end`, to end with the process

now = time.monotonic
_sdk_logger = logging.getLogger("mcp")
_output_logger = logging.getLogger("mcp.output")  # lines that servers wrote to stderr
_log: list[RotatingFileHandler] = []  # none, or the open log
_loop = asyncio.new_event_loop()
_starts = asyncio.Semaphore(2 * (os.cpu_count() or 1))  # all at once would each take longer than a start may


# ---- a connection ----------------------------------------------------------------------------------------------------


class Refused(RuntimeError):
    """The server answered 401 or 403."""


class Connection:
    """One process or session of a server: started by the first call, and again by the next one after it died. From the
    second start on that brought no answer, calls get the last error for a pause, which doubles: a server that is away
    would be asked by each of hundreds of calls, and one that is back must be found, however long it was away.

    server:   the mcp_tools.Server, whose name, transport and limits hold for all its connections.
    settings: of its entry, with variables replaced.
    """

    def __init__(self, server, settings: dict):
        self.server, self.settings = server, settings
        self.busy = self.starts = 0  # starts: since it answered last
        self._fault, self._pause_ends = f"MCP server {server.name!r} is gone", 0.0
        self._last: collections.deque[str] = collections.deque(maxlen=10)  # lines on stderr
        self._refused = self._session = None  # HTTP: status 401 or 403, and the session's id
        self._lost = False  # HTTP: the server does not know the session any more
        self._task = self._stop = self._ready = None
        self._starting = asyncio.Lock()

    async def list_tools(self) -> list:
        client, tools, cursor = await self.client(), [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools, cursor, self.starts = tools + page.tools, page.next_cursor, 0
            if not cursor:
                return tools

    async def call(self, tool: str, arguments: dict):
        """Text of the result, or message parts if there is an image in it; RuntimeError with what went wrong."""
        try:
            client = await self.client()
            deadline = _loop.time() + self.server.seconds
            result = await client.call_tool(tool, arguments, read_timeout_seconds=self.server.seconds)
            self.starts = 0
        except Exception as error:
            if self._task is not None and self._ready.done() and (self._task.done() or self._lost or is_closed(error)):
                await self.end()  # the next call starts it again
                self._fault = f"MCP server {self.server.name!r} is gone ({reason(error)})"
                error = RuntimeError(self._fault)
                self.server.tell(self._failure(error))
            raise self._failure(error) from error
        try:  # pictures are decoded: not on the loop of all connections
            async with asyncio.timeout_at(deadline):
                parts = await to_thread(parts_of_result, result.content)
        except TimeoutError:
            what = f"MCP server {self.server.name!r}: no result that could be read"
            raise RuntimeError(f"{what} within {self.server.seconds:g} s") from None
        if not parts and result.structured_content is not None:  # else the same stands in the text
            parts = [text_part(json.dumps(result.structured_content, ensure_ascii=False, default=str))]
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if result.is_error:
            raise RuntimeError(text)
        return parts if any(part["type"] == "image" for part in parts) else text

    async def end(self) -> None:
        """End the process or session; whatever it does, in little more than END_SECONDS."""
        LIVE.discard(self)
        task, self._task = self._task, None
        if task is None:
            return
        self._stop.set()
        if not self._ready.done():  # it has not started, and looks at nothing else
            task.cancel()
        done, _ = await asyncio.wait({task}, timeout=END_SECONDS)
        if not done:
            task.cancel()

    async def client(self):
        """The SDK's client, after the server has started; RuntimeError if it does not."""
        async with self._starting:
            if self._task is None or self._task.done() or not self._ready.done():
                async with _starts:
                    if self._task is None or self._task.done():
                        self._start()
                    await asyncio.wait({self._ready}, timeout=self.server.start_seconds)
        if not self._ready.done():
            limit = f"{self.server.start_seconds:g} s"
            raise self._failure(RuntimeError(f"MCP server {self.server.name!r} did not start within {limit}"))
        return self._ready.result()

    def _start(self) -> None:
        if now() < self._pause_ends:
            raise RuntimeError(self._fault)
        self.starts += 1
        self._refused, self._lost = None, False
        self._ready, self._stop = _loop.create_future(), asyncio.Event()
        self._ready.add_done_callback(asyncio.Future.exception)  # no word of asyncio's if nobody asks for it any more
        self._task = _loop.create_task(self._run(self._ready, self._stop))
        LIVE.add(self)

    async def _run(self, ready: asyncio.Future, stop: asyncio.Event) -> None:
        """From start to end in one task, as the client's task groups want it."""
        from mcp import Client

        try:
            async with contextlib.AsyncExitStack() as stack:
                # The newest protocol has no sessions over HTTP; the one before it has.
                mode = "legacy" if self.server.needs_session else "auto"
                transport = await self._transport(stack)
                # A call names its own limit; the rest belongs to the start.
                client = Client(transport, read_timeout_seconds=self.server.start_seconds, mode=mode)
                client = await stack.enter_async_context(client)
                if self.server.needs_session and not self._session:
                    raise RuntimeError(
                        f"{self.server.shown_url()} gives no session that could be a trajectory's own; let it keep "
                        "sessions, or tell trajectories apart by ${TRAJECTORY_ID} in its url or headers"
                    )
                ready.set_result(client)
                await stop.wait()
        except BaseException as error:
            if not ready.done():
                failure = self._failure(error)
                self._fault = str(failure)
                ready.set_exception(failure)
            elif isinstance(error, asyncio.CancelledError):
                raise
            else:
                _output_logger.info("%s: ended with %s", self.server.name, reason(error))
        finally:
            pause = 2.0 ** min(self.starts - 2, 9) if self.starts > 1 else 0.0
            self._pause_ends = now() + min(pause, LONGEST_PAUSE)

    async def _transport(self, stack: contextlib.AsyncExitStack):
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import streamable_http_client

        if self.server.transport == "http":
            client = await stack.enter_async_context(self._http_client(self.settings.get("headers")))
            return streamable_http_client(self.settings["url"], http_client=client)
        if self.server.transport == "sse":
            return sse_client(
                self.settings["url"], self.settings.get("headers"), httpx_client_factory=self._http_client
            )
        process = {key: self.settings[key] for key in ("command", "args", "cwd") if key in self.settings}
        env = {key: str(value) for key, value in self.settings.get("env", {}).items() if value is not None}
        return stdio_client(StdioServerParameters(**process, env=env), errlog=self._stderr(stack))

    def _http_client(self, headers=None, timeout=None, auth=None):
        """A client whose responses are looked at. Arguments as the SDK passes them; `timeout` is ours."""
        import httpx2
        from mcp.client.streamable_http import create_mcp_http_client

        # A call has its own limit, and a stream may be silent until there is one.
        limits = httpx2.Timeout(30.0, read=max(3600.0, self.server.seconds))
        client = create_mcp_http_client(headers=headers, timeout=limits, auth=auth)
        client.event_hooks["response"].append(self._look_at)
        return client

    async def _look_at(self, response) -> None:
        self._refused = response.status_code if response.status_code in (401, 403) else None
        if response.status_code == 404 and "mcp-session-id" in response.request.headers:
            self._lost = True
        self._session = response.headers.get("mcp-session-id", self._session)

    def _stderr(self, stack: contextlib.AsyncExitStack):
        """A file for the process to write to. What it writes goes to the log, and its last lines to error messages."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        rest = b""

        def read() -> None:
            nonlocal rest
            with contextlib.suppress(BlockingIOError):
                while data := os.read(reader, 1 << 16):
                    *lines, rest = (rest + data)[-(1 << 20) :].split(b"\n")
                    for line in lines:
                        self._last.append(secrets.hide(line.decode(errors="replace"))[:500])
                        _output_logger.info("%s: %s", self.server.name, self._last[-1])

        def stop() -> None:
            read()  # what it wrote before it ended
            _loop.remove_reader(reader)
            os.close(reader)

        _loop.add_reader(reader, read)
        stack.callback(stop)
        return stack.enter_context(os.fdopen(writer, "w", encoding="utf-8"))

    def _failure(self, error: BaseException) -> RuntimeError:
        """What the model reads, with notes for people."""
        if self._refused:
            given = any(name.lower() == "authorization" for name in self.settings.get("headers", {}))
            how = "refused the token ({}); check" if given else "wants a token ({}); give"
            where = f"server {self.server.name!r} at {self.server.shown_url()}"
            return Refused(f"{where} {how.format(self._refused)} headers.Authorization")
        failure = error if isinstance(error, RuntimeError) else RuntimeError(reason(error))
        if self._last and not hasattr(failure, "__notes__"):
            failure.add_note(f"Its last lines (all are in {log_file()}): {' | '.join(self._last)}")
        return failure


def is_closed(error: BaseException) -> bool:
    """Whether the connection is, and not just the call failed."""
    import anyio
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED

    return isinstance(error, (anyio.ClosedResourceError, anyio.BrokenResourceError)) or (
        isinstance(error, MCPError) and error.code == CONNECTION_CLOSED
    )


def reason(error: BaseException) -> str:
    """The innermost of grouped errors, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}".strip(": ")


def run_loop() -> bool:
    """Start the loop of the connections, and a log if there is none; False if the loop ran already."""
    if not _log:
        log_to(Path(tempfile.gettempdir()) / f"mcp-{os.getpid()}.log")
    if _loop.is_running():
        return False
    threading.Thread(target=_loop.run_forever, name="mcp", daemon=True).start()
    return True


def on_loop(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, _loop)


def close_all(seconds: float = END_SECONDS + 1) -> None:
    """End all servers that were started, at the same time; none is waited for longer than `seconds`."""

    async def end() -> None:
        await asyncio.gather(*(one.end() for one in list(LIVE)), return_exceptions=True)

    if _loop.is_running():
        with contextlib.suppress(TimeoutError):
            on_loop(end()).result(seconds)
    LIVE.clear()


# ---- the log ---------------------------------------------------------------------------------------------------------


class Masked(logging.Formatter):
    def format(self, record) -> str:
        return secrets.hide(super().format(record))


class LogFile(RotatingFileHandler):
    def _open(self):
        return open(self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=private)


def private(path: str, flags: int) -> int:
    """Open a file that no other user may read, whatever was in its place: servers may write what nobody knows to be
    secret, and the name in the folder for temporary files can be guessed."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor


def log_file() -> Path:
    """Where what servers write to stderr goes, and what the SDK warns of."""
    return Path(_log[0].baseFilename)


def log_to(path: str | Path) -> None:
    """Write the log to `path` from now on, and move there what was written before. Holds LOG_BYTES at most, twice."""
    for old in _log:
        _sdk_logger.removeHandler(old)
        old.close()
    written = [Path(old.baseFilename) for old in _log if Path(old.baseFilename) != Path(path).absolute()]
    new = LogFile(path, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8", errors="replace", delay=True)
    new.setFormatter(Masked("%(asctime)s %(name)s %(message)s"))
    for old in filter(Path.exists, written):
        with open(path, "a", encoding="utf-8", opener=private) as file:
            file.write(old.read_text(errors="replace", encoding="utf-8"))
        old.unlink()
    _log[:] = [new]
    _output_logger.setLevel(logging.INFO)
    _sdk_logger.propagate = False  # not to the terminal
    _sdk_logger.addHandler(new)


# ---- results ---------------------------------------------------------------------------------------------------------


def parts_of_result(contents: list) -> list[dict]:
    return [part for content in contents for part in as_parts(content)]


def as_parts(content) -> list[dict]:
    """A piece of an MCP result as parts of a chat message: text, or an image that was looked at, as a data URL."""
    if content.type == "text":
        return [text_part(content.text)]
    if content.type == "image":
        return [image_part(content.data)]
    if content.type == "audio":
        return [text_part(f"[audio: {content.mime_type}, {size_of(content.data)}, not shown]")]
    if content.type == "resource_link":
        kind = f", {content.mime_type}" if content.mime_type else ""
        return [text_part(f"[resource {content.name}: {content.uri}{kind}] {content.description or ''}".strip())]
    resource = content.resource
    if hasattr(resource, "text"):
        return [text_part(f"[resource {resource.uri}]\n{resource.text}")]
    if (resource.mime_type or "").startswith("image/"):
        return [text_part(f"[resource {resource.uri}]"), image_part(resource.blob)]
    return [text_part(f"[resource {resource.uri}: {resource.mime_type}, {size_of(resource.blob)}, not shown]")]


def image_part(data: str) -> dict:
    """The base64 of an image as a part; as a text if it is no image. Never a path: "tmp/aaaa" is base64, too."""
    try:
        kind = open_image(data, local_files=False)[0].get_format_mimetype()
        read_image(data, local_files=False)
    except PictureError:
        return text_part("[an image that cannot be read, not shown]")
    return {"type": "image", "image": f"data:{kind};base64,{data}"}


def size_of(data: str) -> str:
    return f"{len(data.rstrip('=')) * 3 // 4:,} bytes"
