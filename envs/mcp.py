"""Tools of MCP servers, over stdio, streamable HTTP or SSE, from the usual JSON (all keys: docs/tools-mcp.md):

    {"mcpServers": {"search": {"command": "python", "args": ["search_server.py"]},
                    "wiki":   {"url": "http://127.0.0.1:9000/mcp", "prefix": "wiki_"}}}

One key is ours: `prefix` is put before the tools' names. All trajectories share a server's one connection. The
connection lives in one task, as the SDK's client requires, on the event loop of all async tools (safety/calls.py).
"""

import asyncio
import atexit
import contextlib
import json
import os
import re
import tempfile
from functools import partial
from pathlib import Path

from config import ConfigError, require
from envs.tools import Tool, named_tools
from inputs.parts import text_part
from network import secrets
from safety.calls import shared_loop
from safety.results import AT_END, warn_once
from safety.sandbox import check_contained

# The MCP SDK takes a second to import, so connections import it.

END_SECONDS = 8.0  # the SDK waits 2 s for a process to end, then sends SIGTERM and SIGKILL
_live: set["Server"] = set()


def get_tools(cfg) -> dict[str, Tool]:
    """{name: Tool} of cfg.tools and of the servers of cfg.mcp_config, which are started."""
    tools: dict[str, Tool] = {}
    for tool in named_tools(cfg) + (connect(cfg.mcp_config, cfg.tool_timeout) if cfg.mcp_config else []):
        if tool.name in tools:
            raise ConfigError(f'two tools are named {tool.name!r}; rename one, or give its MCP server a "prefix".')
        tools[tool.name] = tool
    check_contained([tool.call for tool in tools.values()], cfg)
    return tools


def connect(path: str, seconds: float) -> list[Tool]:
    """The tools of all servers in the file. The servers start at the same time.

    seconds: limit for a server to start and list its tools, and for a call if its entry has no `timeout`. ConfigError
    names a server that does not start, and quotes the last lines it wrote to stderr.
    """
    require("mcp", f"--mcp_config={path}")
    servers, loop = read_servers(path, seconds), shared_loop()
    tools, listings = [], [asyncio.run_coroutine_threadsafe(server.list_tools(), loop) for server in servers]
    try:
        for server, listing in zip(servers, listings, strict=True):
            tools += map(server.tool, listing.result())
    except Exception as error:  # the SDK may raise anything if it is no MCP server
        close_all()
        raise ConfigError(f"--mcp_config={path}: {reason(error)}") from None
    return tools


def read_servers(path: str, seconds: float) -> list["Server"]:
    """The servers in the file that are not disabled. ConfigError if it cannot be read."""

    def value_of(match: re.Match) -> str:  # ${VAR}, ${env:VAR} or ${VAR:-default}, as a shell would
        name, has_default, default = match[1].removeprefix("env:").partition(":-")
        if not has_default and name not in os.environ:
            raise ConfigError(f"--mcp_config={path}: the environment variable {name} is not set.")
        return json.dumps(os.environ.get(name, ""))[1:-1] or default

    try:
        loaded = json.loads(re.sub(r"\$\{([^{}]*)\}", value_of, Path(path).read_text(encoding="utf-8")))
        entries = loaded["mcpServers"] if "mcpServers" in loaded else loaded["servers"]  # `servers`: VS Code
        entries = {name: dict(entry) for name, entry in entries.items()}
    except (OSError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f'--mcp_config={path} is no JSON {{"mcpServers": {{NAME: ...}}}}: {error!r:.200}.') from None
    servers = []
    for name, entry in entries.items():
        for value in [*(entry.get("env") or {}).values(), *(entry.get("headers") or {}).values()]:
            if not os.path.exists(str(value)):  # a folder, such as HOME, is no secret
                secrets.learn(str(value).removeprefix("Bearer "))
        servers += [] if entry.get("disabled") else [Server(name, entry, seconds)]
    return servers


class Server:
    """An entry of the file and its connection, which the first call opens, and reopens after it was lost. Environments
    may use one of their own: `await server.call(TOOL, **arguments)` and, at the end, `await server.close()`.

    seconds: limit of a call. start_seconds: of a start.
    """

    def __init__(self, name: str, settings: dict, seconds: float):
        self.name, self.settings = name, settings
        self.seconds = settings.get("timeout") or seconds
        self.start_seconds = max(self.seconds, seconds)
        self.life, self.status = None, ""
        self.stderr = tempfile.TemporaryFile("w+", encoding="utf-8")  # a file, since the process writes to it

    def tool(self, entry) -> Tool:
        name, description = self.settings.get("prefix", "") + entry.name, entry.description or ""
        return Tool(name, description, entry.input_schema, partial(self.call, entry.name), self.settings.get("timeout"))

    async def list_tools(self) -> list:
        client, tools, cursor = await self.client(), [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools, cursor = tools + page.tools, page.next_cursor
            if not cursor:
                return tools

    async def call(self, tool: str, /, **arguments):
        """The result as text, or as message parts if it contains an image. RuntimeError if the call fails."""
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST  # the latter: HTTP sessions that the server forgot

        try:
            client = await self.client()
            result = await client.call_tool(tool, arguments, read_timeout_seconds=self.seconds)
        except Exception as error:  # from the SDK and its transports, whatever the server did to them
            if getattr(error, "code", CONNECTION_CLOSED) in (CONNECTION_CLOSED, INVALID_REQUEST):
                await self.close()  # the next call starts it again
                warn_once(self.message(f"is gone ({reason(error)})"), kind=f"MCP server {self.name}")
            raise RuntimeError(f"MCP server {self.name!r}: {reason(error)}") from error
        parts = [as_part(content) for content in result.content]
        if not parts and result.structured_content is not None:  # else the text says the same
            parts = [text_part(json.dumps(result.structured_content, ensure_ascii=False))]
        if any(part["type"] == "image" for part in parts) and not result.is_error:
            return parts
        text = "\n".join(part.get("text", "") for part in parts)
        if result.is_error:
            raise RuntimeError(text)
        return text

    async def client(self):
        """The SDK's client, after the server has started; RuntimeError if it does not."""
        loop = asyncio.get_running_loop()
        # Async tools get a new loop after something has blocked the old one.
        if self.life is None or self.life.done() or self.life.get_loop() is not loop:
            self.ready = loop.create_future()
            self.ready.add_done_callback(asyncio.Future.exception)  # no warning from asyncio if nobody awaits it
            self.life = loop.create_task(self.live(self.ready))
            _live.add(self)
        return await asyncio.shield(self.ready)

    async def live(self, ready: asyncio.Future) -> None:
        """Hold the connection until this task is cancelled."""
        from mcp import Client

        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self.start_seconds):
                    client = Client(await self.transport(stack), read_timeout_seconds=self.start_seconds)
                    client = await stack.enter_async_context(client)
                ready.set_result(client)
                await asyncio.Future()
        except Exception as error:  # from the SDK, whatever the server did to it
            if not ready.done():
                why = f"not within {self.start_seconds:g} s" if isinstance(error, TimeoutError) else reason(error)
                ready.set_exception(RuntimeError(self.message(f"did not start: {why}{self.status}")))
        finally:
            _live.discard(self)

    async def transport(self, stack: contextlib.AsyncExitStack):
        import httpx2
        from mcp import StdioServerParameters, stdio_client
        from mcp.client.sse import sse_client
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        settings = self.settings
        if "command" in settings:
            arguments = {key: settings[key] for key in ("command", "args", "env", "cwd") if settings.get(key)}
            return stdio_client(StdioServerParameters(**arguments), errlog=self.stderr)
        url, headers = settings["url"], settings.get("headers")
        if settings.get("type", "sse" if url.rstrip("/").endswith("/sse") else "") == "sse":
            return sse_client(url, headers, sse_read_timeout=3600.0)
        # Calls have their own limit; between calls a stream may be silent.
        http_client = create_mcp_http_client(headers=headers, timeout=httpx2.Timeout(30.0, read=3600.0))
        http_client.event_hooks["response"].append(self.look_at)
        return streamable_http_client(url, http_client=await stack.enter_async_context(http_client))

    async def look_at(self, response) -> None:
        """Note the HTTP status for the message: the SDK does not report that a token is wrong."""
        self.status = f" (HTTP {response.status_code})" if response.status_code >= 400 else ""

    def message(self, fault: str) -> str:
        """A message for people, with the last lines that the server wrote to stderr."""
        lines = os.pread(self.stderr.fileno(), 1 << 20, 0).decode(errors="replace").splitlines()
        quoted = f"; its last lines: {' | '.join(lines[-5:])}" if lines else ""
        return secrets.hide(f"MCP server {self.name!r} {fault}{quoted}")

    async def close(self) -> None:
        """End the process or session, within END_SECONDS whatever it does."""
        if self.life is not None and not self.life.done():
            self.life.cancel()
            await asyncio.wait({self.life}, timeout=END_SECONDS)


def as_part(content) -> dict:
    """A piece of an MCP result as a part of a chat message, never a path or URL that would be read here."""
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
    """The innermost of grouped errors as one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}".strip(": ")


def close_all() -> None:
    """End all servers that were started, at the same time."""

    async def end() -> None:
        await asyncio.gather(*(server.close() for server in list(_live)), return_exceptions=True)

    if _live:
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(end(), shared_loop()).result(END_SECONDS + 1)


AT_END.append(close_all)
atexit.register(close_all)  # for programs that do not run AT_END
