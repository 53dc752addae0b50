"""Tools of MCP servers, over stdio, streamable HTTP or SSE, from the usual JSON (docs/tools-mcp.md has all of it):

    {"mcpServers": {"search": {"command": "python", "args": ["search_server.py"]},
                    "wiki":   {"url": "http://127.0.0.1:9000/mcp", "prefix": "wiki_", "instances": 4},
                    "shop":   {"command": "shop-server", "args": ["${TRAJECTORY_DIR}/my.db"], "isolate": true}}}

Ours beside the usual keys: `prefix` before the tools' names; `instances` of a server that answers one call at a time
(calls go to the least busy); `isolate`, a server for every trajectory, of which at most `instances` live at a time;
`concurrency` and `rate` as in tools.Tool. A server that died is started again by the next call.
All connections live on one event loop of their own. What servers write to stderr goes to `log_file()`.
"""

import asyncio
import atexit
import difflib
import json
import logging
import os
import re
import shlex
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cli import MOST_BYTES, NotNow, read_text
from config import ConfigError
from data import parse_json
from envs.mcp_connection import (
    LIVE,
    Connection,
    Refused,
    close_all,
    log_file,
    log_to,
    now,
    on_loop,
    reason,
    run_loop,
)
from envs.tools import Tool, named_tools
from plugins import require
from safety import secrets
from safety.calls import AT_END, start_thread

__all__ = ["TrajectoryServers", "close_all", "connect", "log_file", "log_to"]

ISOLATED = 64  # most live servers of an entry with "isolate", on each rank, if it has no "instances"
SAID_EVERY = 600.0  # seconds between two warnings about a server that fails
LONGEST_TIMEOUT = 3600  # a larger "timeout" is in milliseconds: programs that count seconds allow no more than an hour

EXPANDED = ("command", "args", "env", "cwd", "url", "headers")  # keys in which ${VAR} is replaced
USUAL = {*EXPANDED, "type", "timeout", "disabled"}
OURS = {"isolate", "instances", "prefix", "concurrency", "rate"}
TRANSPORTS = {"stdio": "stdio", "sse": "sse"}
TRANSPORTS |= dict.fromkeys(("http", "streamable-http", "streamable_http", "streamableHttp"), "http")
OWN_VARIABLES = ("TRAJECTORY_DIR", "TRAJECTORY_ID")  # of an isolated server

logger = logging.getLogger(__name__)


# ---- the file --------------------------------------------------------------------------------------------------------


def get_tools(cfg) -> dict[str, Tool]:
    """{name: Tool} of cfg.tools and of the servers of cfg.mcp_config, which are started."""
    found = named_tools(cfg)
    if cfg.mcp_config:
        found += connect(cfg.mcp_config, cfg.tool_timeout)
    tools = {}
    for tool in found:
        if tool.name in tools:
            raise ConfigError(f'two tools are named {tool.name!r}; rename one, or give its MCP server a "prefix".')
        tools[tool.name] = tool
    return tools


def connect(path: str, seconds: float) -> list[Tool]:
    """The tools of all servers that the file names, which start at the same time.

    seconds: a server may take to start and to list its tools, and for a call if its entry has no `timeout`.
    Raises ConfigError naming the server that is not as it should be, and quoting the last lines it wrote.
    """
    require("mcp", f"--mcp_config={path}")
    servers = read_servers(path, seconds)
    if run_loop():
        AT_END.append(close_all)
        atexit.register(close_all)  # of programs that do not end by AT_END
    tools, listings = [], [on_loop(server.list_tools()) for server in servers]
    starts = sum(len(server.shared) or 1 for server in servers)  # not more than some at a time
    for server, listing in zip(servers, listings, strict=True):
        try:
            tools += map(server.tool, listing.result(2 * server.start_seconds * starts))
        except Exception as error:
            close_all()
            if isinstance(error, Refused):
                raise ConfigError(f"--mcp_config={path}: {error}") from None
            text = f"server {server.name!r} did not start or list its tools ({reason(error)}); {server.advice()}"
            notes = getattr(error, "__notes__", ())
            raise NotNow(" ".join((f"--mcp_config={path}: {text}", *notes))) from None
    return tools


def read_servers(path: str, seconds: float) -> list["Server"]:
    """The servers of the file that are not disabled. ConfigError naming the entry that is wrong."""
    try:
        text = read_text(path, "JSON", MOST_BYTES)
    except ConfigError as error:
        raise ConfigError(f"--mcp_config={error}") from None
    try:
        loaded = parse_json(text, "")
    except ConfigError as error:
        raise ConfigError(f"--mcp_config={path}: cannot be read{error}") from None
    try:
        entries = dict(loaded["mcpServers"] if "mcpServers" in loaded else loaded["servers"])  # `servers`: VS Code
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'--mcp_config={path}: cannot be read ({error!r:.200}); give a JSON file {{"mcpServers": {{NAME: ...}}}}.'
        ) from None
    if not entries:
        raise ConfigError(f'--mcp_config={path}: names no server; give {{"mcpServers": {{NAME: ...}}}}.')
    servers, ignored = [], []
    for name, settings in entries.items():
        where = f"--mcp_config={path}, {name}"
        if not isinstance(settings, dict):
            raise ConfigError(f'{where}: must be an object, such as {{"command": ...}}, not {settings!r:.100}.')
        if unknown := sorted(settings.keys() - USUAL - OURS):
            for key in unknown:  # not of another program: one of ours in a wrong spelling would go unnoticed
                if close := difflib.get_close_matches(key, OURS, cutoff=0.85):
                    raise ConfigError(f"{where}: unknown {key}; did you mean {close[0]}?")
            ignored.append(f"{name}: {', '.join(unknown)}")
        learn_secrets(settings)
        if not settings.get("disabled"):
            servers.append(Server(name, settings, where, seconds))
    if ignored:
        known = ", ".join(sorted(USUAL | OURS))
        logger.warning("--mcp_config=%s: ignored keys, %s (known: %s)", path, "; ".join(ignored), known)
    return servers


def learn_secrets(settings: dict) -> None:
    """Have what a server is given in `env` and `headers` hidden, word by word: `Bearer VALUE`, ${VAR}."""
    for given in (settings.get("env"), settings.get("headers")):
        for value in given.values() if isinstance(given, dict) else ():
            words = os.path.expandvars(str(value).replace("${env:", "${")).split()
            for word in words:
                if word != "Bearer" and "${" not in word and not os.path.exists(word):  # such as of ${HOME}
                    secrets.learn(word)


def expand(value, where: str, own: dict[str, str]):
    """`value` with ${VAR}, ${env:VAR} and ${VAR:-default} in all its texts replaced, as a shell would.

    own: variables beside those of the environment. Raises ConfigError for a variable that is not set.
    """
    if isinstance(value, dict):
        return {key: expand(one, where, own) for key, one in value.items()}
    if isinstance(value, list):
        return [expand(one, where, own) for one in value]
    if not isinstance(value, str):
        return value

    def replaced(found: re.Match) -> str:
        name, has_default, default = found[1].removeprefix("env:").partition(":-")
        if not re.fullmatch(r"\w+", name):
            raise ConfigError(f"{where}: {found[0]} cannot be expanded; allowed: ${{VAR}}, ${{env:VAR}}, ${{VAR:-x}}.")
        text = own[name] if name in own else os.environ.get(name)
        if has_default:
            return text or default
        if text is None and name in OWN_VARIABLES:
            raise ConfigError(f'{where}: {found[0]} needs "isolate": true, a server for every trajectory.')
        if text is None:
            raise ConfigError(
                f"{where}: the environment variable {name} is not set; set it, or give {found[0][:-1]}:-x}}."
            )
        return text

    return re.sub(r"\$\{([^{}]*)\}", replaced, value)


# ---- a server ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OwnTool(Tool):
    """A tool of an isolated server. `call` fails until TrajectoryServers.bind puts a trajectory's own call there."""

    server: "Server"
    remote_name: str  # without the prefix


class Server:
    """An entry of the file: connections that all trajectories share, or places for such as they have for themselves.

    seconds: limit of a call, and of the wait for a place. start_seconds: of a start.
    """

    def __init__(self, name: str, settings: dict, where: str, seconds: float):
        self.name, self.settings, self.where, self.told = name, settings, where, -SAID_EVERY
        self.isolate, timeout = settings.get("isolate", False), settings.get("timeout")
        if not isinstance(self.isolate, bool):
            raise ConfigError(f"{where}: isolate must be true or false, not {self.isolate!r}.")
        self.count = settings.get("instances", ISOLATED if self.isolate else 1)
        if not isinstance(self.count, int) or self.count < 1:
            raise ConfigError(f"{where}: instances must be a whole number from 1, not {self.count!r}.")
        if timeout is not None and (not isinstance(timeout, (int, float)) or timeout <= 0):
            raise ConfigError(
                f"{where}: timeout must be a number of seconds (over 3600: milliseconds), not {timeout!r}."
            )
        self.timeout = timeout / 1000 if timeout and timeout > LONGEST_TIMEOUT else timeout  # seconds
        self.seconds = self.timeout or seconds
        self.start_seconds = max(self.seconds, seconds)
        self.transport = self._transport()
        tells_apart = any(f"${{{name}}}" in json.dumps(settings) for name in OWN_VARIABLES)  # trajectories, by itself
        self.needs_session = self.isolate and self.transport == "http" and not tells_apart
        expanded = self.expanded(dict.fromkeys(OWN_VARIABLES, "") if self.isolate else {})
        self.places = asyncio.Semaphore(self.count)
        self.shared = [] if self.isolate else [Connection(self, expanded) for _ in range(self.count)]

    def _transport(self) -> str:
        url, command, kind = (self.settings.get(key) for key in ("url", "command", "type"))
        if (command is None) == (url is None):
            raise ConfigError(f"{self.where}: give either a command (stdio) or a url (streamable HTTP, or SSE).")
        if kind is None:
            return "stdio" if command else "sse" if url.rstrip("/").endswith("/sse") else "http"
        if kind not in TRANSPORTS:
            raise ConfigError(f"{self.where}: type {kind!r} is none of {', '.join(TRANSPORTS)}.")
        wanted = "command" if TRANSPORTS[kind] == "stdio" else "url"
        if wanted not in self.settings:
            raise ConfigError(f"{self.where}: type {kind!r} wants a {wanted}.")
        return TRANSPORTS[kind]

    def expanded(self, own: dict[str, str]) -> dict:
        return {key: expand(self.settings[key], self.where, own) for key in EXPANDED if key in self.settings}

    async def list_tools(self) -> list:
        """On the loop of the connections. Starts all that are shared; of isolated ones one, which is ended again."""
        if not self.isolate:
            return (await asyncio.gather(*(connection.list_tools() for connection in self.shared)))[0]
        servers = TrajectoryServers()
        try:
            return await (await servers.start(self)).list_tools()
        finally:
            await servers.end()

    def tool(self, listed) -> Tool:
        given = (self.settings.get("prefix", "") + listed.name, listed.description or "", listed.input_schema)
        limits = (self.settings.get("concurrency"), self.settings.get("rate"), self.timeout)
        if self.isolate:
            return OwnTool(*given, self._not_bound, *limits, stateful=True, server=self, remote_name=listed.name)
        return Tool(*given, partial(self.call_least_busy, listed.name), *limits)

    def _not_bound(self, **arguments):
        raise RuntimeError(f"the MCP server {self.name!r} is isolated: only trajectories can call it")

    async def call_least_busy(self, tool: str, /, **arguments):
        connection = min(self.shared, key=lambda one: one.busy)
        connection.busy += 1
        try:
            return await asyncio.wrap_future(on_loop(connection.call(tool, arguments)))
        finally:
            connection.busy -= 1

    def advice(self) -> str:
        """What to look at when it does not start."""
        if "url" in self.settings:
            return f"is something listening at {self.shown_url()}?"
        if " " in self.settings["command"] and not Path(self.settings["command"]).exists():
            return '"command" is the program alone; what follows it belongs in "args", a list.'
        return f"run {shlex.join([self.settings['command'], *map(str, self.settings.get('args', ()))])} by hand to see."

    def shown_url(self) -> str:
        return self.settings["url"].partition("?")[0]  # what follows may hold a key

    def tell(self, failure: RuntimeError) -> None:
        """To people, and again when it goes on or comes back: the model reads of every failure itself."""
        if now() - self.told >= SAID_EVERY:
            self.told = now()
            text = ". ".join((str(failure), *getattr(failure, "__notes__", ())))
            text = text if repr(self.name) in text else f"MCP server {self.name!r}: {text}"
            logger.warning("%s (said every %g minutes; the model reads of every failure)", text, SAID_EVERY / 60)


class TrajectoryServers:
    """The isolated servers of one trajectory: each started by its first call, all ended by close()."""

    def __init__(self):
        self._connections: dict[Server, Connection] = {}
        self._folder: Path | None = None
        self._used = self._ended = False

    def bind(self, tool: OwnTool) -> OwnTool:
        """The tool, whose calls go to this trajectory's server."""
        return replace(tool, call=partial(self._call, tool.server, tool.remote_name))

    async def enter(self, server: Server) -> str | None:
        """Start the server if it does not run, after a wait for a free place. Returns what went wrong, or None."""
        self._used = True
        try:
            await asyncio.wrap_future(on_loop(self.start(server)))
        except RuntimeError as error:
            if not self._ended:
                server.tell(error)
            return str(error)

    async def close(self) -> None:
        """End the servers, if there are any; on any event loop, and to the end even if the caller is cancelled."""
        if (ending := self.abandon()) is not None:
            await asyncio.shield(asyncio.wrap_future(ending))

    def abandon(self):
        """As close(), without waiting: its future, or None if there is nothing to end."""
        self._ended = True
        return on_loop(self.end()) if self._used else None

    async def _call(self, server: Server, tool: str, /, **arguments):
        if self._ended:
            raise RuntimeError("this trajectory has ended")
        return await asyncio.wrap_future(on_loop(self._connections[server].call(tool, arguments)))

    # The rest runs on the loop of the connections.

    async def start(self, server: Server) -> "Connection":
        if server not in self._connections:
            try:
                async with asyncio.timeout(server.seconds):
                    await server.places.acquire()
            except TimeoutError:
                text = f"no free place on the MCP server {server.name!r}: all {server.count} instances belong to other "
                text += f"trajectories, and none ended within {server.seconds:g} s"
                failure = RuntimeError(text)
                failure.add_note('Raise "instances" in its entry.')
                raise failure from None
            try:
                if self._ended:
                    raise RuntimeError("this trajectory has ended")
                self._folder = self._folder or Path(tempfile.mkdtemp(prefix="trajectory-"))
                own = dict(zip(OWN_VARIABLES, (str(self._folder), self._folder.name), strict=True))
                self._connections[server] = Connection(server, server.expanded(own))
                LIVE.add(self)
            finally:
                if server not in self._connections:
                    server.places.release()
        connection = self._connections[server]
        await connection.client()
        if self._ended:  # meanwhile
            await connection.end()
            raise RuntimeError("this trajectory has ended")
        return connection

    async def end(self) -> None:
        self._ended = True
        connections, self._connections = self._connections, {}
        try:
            await asyncio.gather(*(connection.end() for connection in connections.values()))
            if self._folder:
                removal = start_thread(shutil.rmtree, self._folder, True)
                await asyncio.wrap_future(removal)  # asyncio.to_thread fails while the interpreter ends
        finally:
            for server in connections:
                server.places.release()
            LIVE.discard(self)
