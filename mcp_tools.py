"""Tools of MCP servers, over stdio or streamable HTTP, from the usual JSON:

    {"mcpServers": {"search": {"command": "python", "args": ["search_server.py"], "env": {}},
                    "wiki":   {"url": "http://127.0.0.1:9000/mcp", "prefix": "wiki_", "instances": 4}}}

Ours beside the usual keys: `prefix` before the tools' names, `instances` of a server that answers one call at a time
(calls go to the least busy), `concurrency` and `rate` as in tools.Tool. A server that died is started again by the next
call, at most RESTARTS times. All connections live on one event loop of their own.
"""

import asyncio
import contextlib
import json
import shlex
import sys
import threading
from functools import partial
from pathlib import Path

from config import ConfigError
from limits import AT_END
from tools import Tool

RESTARTS = 3
KEYS = {
    "command",
    "args",
    "env",
    "cwd",
    "url",
    "headers",
    "type",
    "prefix",
    "instances",
    "concurrency",
    "rate",
    "disabled",
}

_loop = asyncio.new_event_loop()
_connections: list["Connection"] = []


def connect(path: str, seconds: float) -> list[Tool]:
    """The tools of all servers that the file names; ConfigError naming the one that does not answer in `seconds`."""
    try:
        servers = json.loads(Path(path).read_text())["mcpServers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'--mcp_config={path}: cannot be read ({error!r:.200}); give a JSON file {{"mcpServers": {{NAME: ...}}}}.'
        ) from None
    if not _loop.is_running():
        threading.Thread(target=_loop.run_forever, name="mcp", daemon=True).start()
        AT_END.append(close_all)
    tools = []
    for name, settings in servers.items():
        if unknown := settings.keys() - KEYS:
            raise ConfigError(
                f"--mcp_config={path}, {name}: unknown {', '.join(sorted(unknown))}; known: {', '.join(sorted(KEYS))}."
            )
        if settings.get("disabled"):
            continue
        if ("command" in settings) == ("url" in settings):
            raise ConfigError(f"--mcp_config={path}, {name}: give either a command (stdio) or a url (streamable HTTP).")
        instances = [Connection(name, settings, seconds) for _ in range(settings.get("instances", 1))]
        _connections.extend(instances)
        try:
            listed = [on_loop(instance.list_tools()).result(2 * seconds) for instance in instances][0]
        except Exception as error:
            command = shlex.join([settings.get("command", ""), *settings.get("args", [])])
            look = (
                f"is something listening at {settings['url']}?"
                if "url" in settings
                else f"run {command} by hand to see."
            )
            if " " in settings.get("command", "") and not Path(settings["command"]).exists():
                look = '"command" is the program alone; what follows it belongs in "args", a list.'
            message = f"--mcp_config={path}: server {name!r} did not start or list its tools ({reason(error)}); {look}"
            raise ConfigError(message) from None
        for tool in listed:
            tools.append(
                Tool(
                    settings.get("prefix", "") + tool.name,
                    tool.description or "",
                    tool.input_schema,
                    partial(call_least_busy, instances, tool.name),
                    settings.get("concurrency"),
                    settings.get("rate"),
                )
            )
    return tools


def on_loop(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, _loop)


async def call_least_busy(instances: list["Connection"], tool: str, **arguments):
    instance = min(instances, key=lambda one: one.busy)
    instance.busy += 1
    try:
        return await asyncio.wrap_future(on_loop(instance.call(tool, arguments)))
    finally:
        instance.busy -= 1


def close_all(seconds: float = 5.0) -> None:
    """End the servers that were started; none is waited for longer than `seconds`."""
    for connection in _connections:
        with contextlib.suppress(Exception):
            on_loop(connection.close()).result(seconds)
    _connections.clear()


def reason(error: BaseException) -> str:
    """The innermost of grouped errors, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".strip(": ")


class Connection:
    """One server: started by the first call, and again after it died."""

    def __init__(self, name: str, settings: dict, seconds: float):
        self.name, self.settings, self.seconds = name, settings, seconds
        self.busy = self.starts = 0
        self._client = self._task = self._stop = None
        self._starting = None

    async def list_tools(self) -> list:
        return (await (await self._connected()).list_tools()).tools

    async def call(self, tool: str, arguments: dict):
        """Text of the result, or message parts if there is an image in it; RuntimeError with what went wrong."""
        client = await self._connected()
        try:
            result = await client.call_tool(tool, arguments, read_timeout_seconds=self.seconds)
        except Exception as error:
            if self._task.done() or "closed" in str(error).lower():
                await self.close()  # the next call starts it again
                raise RuntimeError(f"MCP server {self.name!r} is gone ({reason(error)})") from error
            raise RuntimeError(reason(error)) from error
        parts = [as_part(part) for part in result.content]
        text = "\n".join(part["text"] for part in parts if part["type"] == "text")
        if result.is_error:
            raise RuntimeError(text)
        return parts if any(part["type"] == "image" for part in parts) else text

    async def _connected(self):
        if self._starting is None:
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._task is None or self._task.done():
                if self.starts > RESTARTS:
                    raise RuntimeError(f"MCP server {self.name!r} died {self.starts} times and is not started again")
                self.starts += 1
                ready, self._stop = _loop.create_future(), asyncio.Event()
                self._task = _loop.create_task(self._live(ready, self._stop))
                self._client = await asyncio.wait_for(ready, self.seconds)
        return self._client

    async def _live(self, ready: asyncio.Future, stop: asyncio.Event) -> None:
        """From start to end in one task, as the client's task groups want it."""
        from mcp import Client, StdioServerParameters, stdio_client

        try:
            async with contextlib.AsyncExitStack() as stack:
                if "url" in self.settings:
                    server = await self._http(stack)
                else:
                    keys = ("command", "args", "env", "cwd")
                    process = {key: self.settings[key] for key in keys if key in self.settings}
                    server = stdio_client(StdioServerParameters(**process), errlog=sys.stderr)
                client = await stack.enter_async_context(Client(server, read_timeout_seconds=self.seconds))
                ready.set_result(client)
                await stop.wait()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(RuntimeError(reason(error)))
            elif isinstance(error, asyncio.CancelledError):
                raise

    async def _http(self, stack):
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        http = await stack.enter_async_context(create_mcp_http_client(headers=self.settings.get("headers")))
        return streamable_http_client(self.settings["url"], http_client=http)

    async def close(self) -> None:
        if self._task is not None and not self._task.done():
            self._stop.set()
            done, _ = await asyncio.wait({self._task}, timeout=4)
            if not done:
                self._task.cancel()
        self._task = None


def as_part(part) -> dict:
    """A piece of an MCP result as a part of a chat message."""
    if part.type == "image":
        return {"type": "image", "image": part.data}  # base64
    return {"type": "text", "text": part.text if part.type == "text" else part.model_dump_json()}
