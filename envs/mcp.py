"""Tools of MCP servers, over stdio, streamable HTTP or SSE, from the usual JSON (docs/tools-mcp.md has all of it):

    {"mcpServers": {"search": {"command": "python", "args": ["search_server.py"]},
                    "wiki":   {"url": "http://127.0.0.1:9000/mcp", "prefix": "wiki_", "instances": 4},
                    "shop":   {"command": "shop-server", "args": ["${TRAJECTORY_DIR}/my.db"], "isolate": true}}}

Ours beside the usual keys: `prefix` before the tools' names; `instances` of a server that answers one call at a time
(calls go to the least busy); `isolate`, a server for every trajectory; `concurrency` and `rate` as in tools.Tool.
All connections live on one event loop of their own, each in one task, as the SDK's client wants it.
"""

import asyncio
import atexit
import contextlib
import functools
import json
import logging
import os
import re
import shutil
import tempfile
import threading
from functools import partial
from pathlib import Path

from config import ConfigError, require
from envs.tools import Tool, named_tools
from inputs.parts import text_part
from safety import secrets
from safety.calls import AT_END, warn_once

# The MCP SDK and what comes with it take a second, and are imported by connections.

END_SECONDS = 8.0  # the SDK gives a process 2 s to end, then sends SIGTERM and SIGKILL
LONGEST_TIMEOUT = 3600  # a larger "timeout" is in milliseconds: programs that count seconds allow no more than an hour
EXPANDED = ("command", "args", "env", "cwd", "url", "headers")  # keys in which ${VAR} is replaced
KEYS = {*EXPANDED, "type", "timeout", "disabled", "isolate", "instances", "prefix", "concurrency", "rate"}

logger = logging.getLogger(__name__)
_loop = asyncio.new_event_loop()
_live: set["Connection"] = set()
_starts = asyncio.Semaphore(2 * (os.cpu_count() or 1))  # all at once would each take longer than a start may


def get_tools(cfg) -> dict[str, Tool]:
    """{name: Tool} of cfg.tools and of the servers of cfg.mcp_config, which are started."""
    tools: dict[str, Tool] = {}
    for tool in named_tools(cfg) + (connect(cfg.mcp_config, cfg.tool_timeout) if cfg.mcp_config else []):
        if tool.name in tools:
            raise ConfigError(f'two tools are named {tool.name!r}; rename one, or give its MCP server a "prefix".')
        tools[tool.name] = tool
    return tools


def connect(path: str, seconds: float) -> list[Tool]:
    """The tools of all servers that the file names, which start at the same time.

    seconds: a server may take to start and to list its tools, and for a call if its entry has no `timeout`.
    Raises ConfigError naming the server that does not start, and quoting the last lines it wrote to stderr.
    """
    require("mcp", f"--mcp_config={path}")
    servers = read_servers(path, seconds)
    run_loop()
    tools, listings = [], [on_loop(server.list_tools()) for server in servers]
    try:
        for server, listing in zip(servers, listings, strict=True):
            tools += map(server.tool, listing.result())
    except Exception as error:  # whatever the SDK raises at a server that is not one
        close_all()
        raise ConfigError(f"--mcp_config={path}: {reason(error)}") from None
    return tools


def read_servers(path: str, seconds: float) -> list["Server"]:
    """The servers of the file that are not disabled. ConfigError naming what is wrong."""
    try:
        loaded = json.loads(Path(path).read_text(encoding="utf-8"))
        entries = loaded["mcpServers"] if "mcpServers" in loaded else loaded["servers"]  # `servers`: VS Code
        entries = {name: dict(settings) for name, settings in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'--mcp_config={path}: cannot be read ({error!r:.200}); give a JSON file {{"mcpServers": {{NAME: ...}}}}.'
        ) from None
    if unknown := {name: sorted(entry.keys() - KEYS) for name, entry in entries.items() if entry.keys() - KEYS}:
        logger.warning("--mcp_config=%s: ignored keys, %s (known: %s)", path, unknown, ", ".join(sorted(KEYS)))
    for entry in entries.values():
        for value in [*(entry.get("env") or {}).values(), *(entry.get("headers") or {}).values()]:
            for word in os.path.expandvars(str(value).replace("${env:", "${")).split():
                if word != "Bearer" and "${" not in word and not os.path.exists(word):  # such as of ${HOME}
                    secrets.learn(word)
    where = f"--mcp_config={path}, "
    return [Server(n, entry, where + n, seconds) for n, entry in entries.items() if not entry.get("disabled")]


def expand(value, own: dict[str, str]):
    """`value` with ${VAR}, ${env:VAR} and ${VAR:-default} in all its texts replaced, as a shell would. `own` variables
    stand beside those of the environment. KeyError for one that is not set."""
    if isinstance(value, dict):
        return {key: expand(one, own) for key, one in value.items()}
    if isinstance(value, list):
        return [expand(one, own) for one in value]
    if not isinstance(value, str):
        return value
    known = os.environ | own

    def replaced(found: re.Match) -> str:
        name, has_default, default = found[1].removeprefix("env:").partition(":-")
        return (known.get(name) or default) if has_default else known[name]

    return re.sub(r"\$\{([^{}]*)\}", replaced, value)


# ---- a server --------------------------------------------------------------------------------------------------------


class Server:
    """An entry of the file, with the connections that all trajectories share, if it is not isolated.

    seconds: limit of a call. start_seconds: of a start.
    """

    def __init__(self, name: str, settings: dict, where: str, seconds: float):
        self.name, self.settings = name, settings
        if ("command" in settings) == ("url" in settings):
            raise ConfigError(f"{where}: give either a command (stdio) or a url (streamable HTTP, or SSE).")
        timeout = settings.get("timeout")
        self.timeout = timeout / 1000 if timeout and timeout > LONGEST_TIMEOUT else timeout  # seconds
        self.seconds = self.timeout or seconds
        self.start_seconds = max(self.seconds, seconds)
        self.isolated = bool(settings.get("isolate"))
        url = settings.get("url", "").rstrip("/")
        self.over_sse = settings.get("type", "sse" if url.endswith("/sse") else "") == "sse"
        try:
            expand(settings, dict.fromkeys(("TRAJECTORY_DIR", "TRAJECTORY_ID"), "") if self.isolated else {})
        except KeyError as error:
            raise ConfigError(
                f"{where}: the environment variable {error.args[0]} is not set; set it, or give "
                f'${{{error.args[0]}:-x}}. TRAJECTORY_DIR and TRAJECTORY_ID are set with "isolate": true.'
            ) from None
        self.shared = [] if self.isolated else [Connection(self) for _ in range(settings.get("instances", 1))]

    async def list_tools(self) -> list:
        """On the loop of the connections. Starts all that are shared; of isolated ones one, which is ended again."""
        if self.shared:
            return (await asyncio.gather(*(connection.list_tools() for connection in self.shared)))[0]
        trial = TrajectoryServers()
        try:
            return await trial.connection(self).list_tools()
        finally:
            await trial.end()

    def tool(self, listed) -> Tool:
        limits = {key: self.settings.get(key) for key in ("concurrency", "rate")}
        own = {"server": self, "cacheable": False} if self.isolated else {}
        call = partial(self.call_own if self.isolated else self.call_shared, listed.name)
        name, text = self.settings.get("prefix", "") + listed.name, listed.description or ""
        return Tool(name, text, listed.input_schema, call, timeout=self.timeout, **limits, **own)

    async def call_shared(self, tool: str, /, **arguments):
        connection = min(self.shared, key=lambda one: one.busy)
        connection.busy += 1
        try:
            return await asyncio.wrap_future(on_loop(connection.call(tool, arguments)))
        finally:
            connection.busy -= 1

    async def call_own(self, tool: str, servers: "TrajectoryServers", /, **arguments):
        return await asyncio.wrap_future(on_loop(servers.connection(self).call(tool, arguments)))


class TrajectoryServers:
    """The isolated servers of one trajectory: each started by its first call, all ended by close()."""

    def __init__(self):
        self.connections: dict[Server, Connection] = {}
        self.folder: str | None = None
        self.ended = False

    def connection(self, server: Server) -> "Connection":
        if self.ended:
            raise RuntimeError("this trajectory has ended")
        if server not in self.connections:
            self.folder = self.folder or tempfile.mkdtemp(prefix="trajectory-")
            own = {"TRAJECTORY_DIR": self.folder, "TRAJECTORY_ID": Path(self.folder).name}
            self.connections[server] = Connection(server, own)
        return self.connections[server]

    async def start(self, servers: set[Server]) -> None:
        """Start those that do not run. One that fails says so to the call that wants it."""
        starts = [on_loop(self.connection(server).client()) for server in servers if not self.ended]
        await asyncio.gather(*map(asyncio.wrap_future, starts), return_exceptions=True)

    async def end(self) -> None:
        """On the loop of the connections."""
        self.ended = True
        await asyncio.gather(*(connection.end() for connection in self.connections.values()))
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def close(self) -> None:
        """End the servers; on any event loop, and to the end even if the caller is cancelled."""
        await asyncio.shield(asyncio.wrap_future(on_loop(self.end())))


class Connection:
    """One process or session of a server: started by the first call, and again by the next one after it was lost.
    own: variables of the trajectory that has it for itself."""

    def __init__(self, server: Server, own: dict[str, str] | None = None):
        self.server, self.own = server, own or {}
        self.busy, self.life, self.status = 0, None, ""
        self.stderr = tempfile.TemporaryFile("w+", encoding="utf-8")  # the server writes to it

    async def list_tools(self) -> list:
        client, tools, cursor = await self.client(), [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools, cursor = tools + page.tools, page.next_cursor
            if not cursor:
                return tools

    async def call(self, tool: str, arguments: dict):
        """Text of the result, or message parts if there is an image in it; RuntimeError with what went wrong."""
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST  # the latter: HTTP sessions that the server forgot

        try:
            client = await self.client()
            result = await client.call_tool(tool, arguments, read_timeout_seconds=self.server.seconds)
        except Exception as error:  # of the SDK, its transports and what the server did to them
            if getattr(error, "code", CONNECTION_CLOSED) in (CONNECTION_CLOSED, INVALID_REQUEST):
                await self.end()  # the next call starts it again
                warn_once(self.said(f"is gone ({reason(error)})"), kind=f"MCP server {self.server.name}")
            raise RuntimeError(f"MCP server {self.server.name!r}: {reason(error)}") from error
        parts = [as_part(content) for content in result.content]
        if not parts and result.structured_content is not None:  # else the same stands in the text
            parts = [text_part(json.dumps(result.structured_content, ensure_ascii=False))]
        if any(part["type"] == "image" for part in parts) and not result.is_error:
            return parts
        text = "\n".join(part.get("text", "") for part in parts)
        if result.is_error:
            raise RuntimeError(text)
        return text

    async def client(self):
        """The SDK's client, after the server has started; RuntimeError if it does not."""
        if self.life is None or self.life.done():
            self.ready, self.stop = _loop.create_future(), asyncio.Event()
            self.ready.add_done_callback(asyncio.Future.exception)  # no word of asyncio's if nobody asks any more
            self.life = _loop.create_task(self.live(self.ready, self.stop))
            _live.add(self)
        return await asyncio.shield(self.ready)

    async def live(self, ready: asyncio.Future, stop: asyncio.Event) -> None:
        from mcp import Client

        # The newest protocol has no sessions over HTTP; the one before it has.
        mode = "legacy" if self.own else "auto"
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with _starts, asyncio.timeout(self.server.start_seconds):
                    transport = await self.transport(stack)
                    client = Client(transport, read_timeout_seconds=self.server.start_seconds, mode=mode)
                    client = await stack.enter_async_context(client)
                ready.set_result(client)
                await stop.wait()
        except Exception as error:  # of the SDK, and what the server did to it
            if not ready.done():
                late = f"not within {self.server.start_seconds:g} s"
                why = late if isinstance(error, TimeoutError) else reason(error)
                ready.set_exception(RuntimeError(self.said(f"did not start: {why}{self.status}")))
        finally:
            _live.discard(self)

    def said(self, fault: str) -> str:
        """What to tell people, with the last lines that the server wrote to stderr."""
        lines = os.pread(self.stderr.fileno(), 1 << 20, 0).decode(errors="replace").splitlines()
        quoted = f"; its last lines: {' | '.join(lines[-5:])}" if lines else ""
        return secrets.hide(f"MCP server {self.server.name!r} {fault}{quoted}")

    async def transport(self, stack: contextlib.AsyncExitStack):
        import httpx2
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        given = {key: expand(value, self.own) for key, value in self.server.settings.items() if key in EXPANDED}
        if "command" in given:
            given["env"] = {key: str(value) for key, value in (given.get("env") or {}).items()}
            return stdio_client(StdioServerParameters(**given), errlog=self.stderr)
        if self.server.over_sse:
            return sse_client(given["url"], given.get("headers"), sse_read_timeout=3600.0)
        # A call has its own limit, and a stream may be silent until there is one.
        limits = httpx2.Timeout(30.0, read=3600.0)
        http_client = create_mcp_http_client(headers=given.get("headers"), timeout=limits)
        http_client.event_hooks["response"].append(self.look_at)
        return streamable_http_client(given["url"], http_client=await stack.enter_async_context(http_client))

    async def look_at(self, response) -> None:
        """The SDK does not say that a token is wrong."""
        self.status = f" (HTTP {response.status_code})" if response.status_code >= 400 else ""

    async def end(self) -> None:
        """End the process or session, in END_SECONDS whatever it does."""
        if self.life is None or self.life.done():
            return
        self.stop.set()
        if not self.ready.done():  # it has not started, and looks at nothing else
            self.life.cancel()
        await asyncio.wait({self.life}, timeout=END_SECONDS)
        self.life.cancel()


def as_part(content) -> dict:
    """A piece of an MCP result as a part of a chat message. Never a path or URL that would be read here."""
    resource = getattr(content, "resource", None)
    if content.type == "text":
        return text_part(content.text)
    kind = getattr(resource or content, "mime_type", None) or ""
    if kind.startswith("image/"):
        data = resource.blob if resource else content.data
        return {"type": "image", "image": f"data:{kind};base64,{data}"}
    if hasattr(resource, "text"):
        return text_part(f"[resource {resource.uri}]\n{resource.text}")
    if content.type == "resource_link":
        return text_part(f"[resource {content.name}: {content.uri}] {content.description or ''}".strip())
    return text_part(f"[{content.type} {kind}, not shown]")


def reason(error: BaseException) -> str:
    """The innermost of grouped errors, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}".strip(": ")


# ---- the loop of the connections -------------------------------------------------------------------------------------


@functools.cache
def run_loop() -> None:
    threading.Thread(target=_loop.run_forever, name="mcp", daemon=True).start()
    AT_END.append(close_all)
    atexit.register(close_all)  # of programs that do not end by AT_END


def on_loop(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, _loop)


def close_all() -> None:
    """End all servers that were started, at the same time."""

    async def end() -> None:
        await asyncio.gather(*(one.end() for one in list(_live)), return_exceptions=True)

    if _loop.is_running():
        with contextlib.suppress(TimeoutError):
            on_loop(end()).result(END_SECONDS + 1)
