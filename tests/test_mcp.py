"""Tools of real MCP servers, over stdio and HTTP; whatever a server does, the model gets text and the run goes on."""

import asyncio
import base64
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from live import Process
from PIL import Image
from server_fixture import free_port

from config import ConfigError, TrainConfig
from envs import mcp
from envs.adapters import environment_maker
from envs.mcp import get_tools
from envs.tools import Call, run_calls
from network import secrets
from safety.calls import run_limited

START = 60.0  # seconds a server may take to start
SERVER = str(Path(__file__).parent / "mcp_server.py")


def children() -> set[int]:
    """The servers that this process has started, and that live."""
    found = (child for child in psutil.Process().children(recursive=True) if child.is_running())
    return {child.pid for child in found if SERVER in child.cmdline()}


@pytest.fixture(params=["stdio", "http"])
def toolbox(request, tmp_path):
    """The misbehaving server's tools, with a time limit of five seconds a call."""
    process = None
    if request.param == "stdio":
        settings = {"command": sys.executable, "args": [SERVER]}
    else:
        process, port = serve(tmp_path)
        settings = {"url": f"http://127.0.0.1:{port}/mcp"}
    box = make(write(tmp_path, test=settings), tool_timeout=5.0)
    box.transport = request.param
    yield box
    if process:
        process.kill()


def serve(folder: Path, *arguments: str) -> tuple[Process, int]:
    """The server over HTTP, and its port."""
    port = free_port()
    process = Process([sys.executable, SERVER, str(port), *arguments], folder / "server.log")
    process.answer(f"http://127.0.0.1:{port}/")
    return process, port


@pytest.fixture
def http(request, tmp_path):
    """Port of a server; the parameter is its transport and token."""
    process, port = serve(tmp_path, *request.param)
    yield port
    process.kill()


@pytest.fixture(autouse=True)
def ended():
    yield
    mcp.close_all()


def write(tmp_path, **servers) -> Path:
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    return path


def make(path, tool_timeout: float = START, **settings) -> SimpleNamespace:
    """tool_timeout: of calls; long, as other tests may run beside this one, except where a test waits for its end."""
    cfg = TrainConfig(mcp_config=str(path), max_tool_result=1000, tool_timeout=tool_timeout, **settings)
    return SimpleNamespace(tools=get_tools(replace(cfg, tool_timeout=START)), cfg=cfg)


def run(box: SimpleNamespace, *calls) -> list:
    messages, events = asyncio.run(run_calls([Call(name, arguments) for name, arguments in calls], box.tools, box.cfg))
    return [(message["content"], event["failed"]) for message, event in zip(messages, events, strict=True)]


def test_calls(toolbox):
    """Results, errors, pictures; answers by their calls, whichever comes first; hundreds of thousands of characters."""
    (text, failed), (error, error_failed), (picture, _) = run(
        toolbox, ("echo", {"text": "hi"}), ("fail", {"text": "go"}), ("look", {})
    )
    assert text.startswith("hi from ") and not failed
    assert "cannot go" in error and error_failed
    (part,) = [part for part in picture if part["type"] == "image"]
    assert Image.open(io.BytesIO(base64.b64decode(part["image"].removeprefix("data:image/png;base64,")))).size == (8, 8)
    calls = [("echo", {"text": f"number {n}", "seconds": (7 * n % 10) / 20}) for n in range(10)]
    results = run(toolbox, *calls)
    assert [text.split(" from")[0] for text, _ in results] == [f"number {n}" for n in range(10)]
    ((long, _),) = run(toolbox, ("megabyte", {}))
    assert long == "x" * 1000 + "... (999000 more characters)"

    (parts, _), (text, _) = run(toolbox, ("everything", {}), ("structured", {}))
    first, link, embedded, binary, picture, audio = parts
    assert first["text"] == "first" and link["text"] == "[resource hosts: file:///etc/hosts] the hosts"
    assert embedded["text"] == "[resource file:///etc/hosts]\n127.0.0.1 home" and picture["type"] == "image"
    assert "application/zip, not shown" in binary["text"] and "audio/wav, not shown" in audio["text"]
    assert text == '{"temperature": 21, "sky": "küstenklar"}'

    # Whatever it does, text to the model, in the time of one call; a server that was started here is started again.
    (hung, failed), (fine, _) = run(toolbox, ("hang", {}), ("echo", {"text": "hi"}))
    assert failed and "hang gave no answer within 5 s" in hung and fine.startswith("hi")
    ((died, failed),) = run(toolbox, ("die", {}))
    assert failed and died.startswith("Error: ") and "last words" not in died
    (again,) = run(toolbox, ("echo", {"text": "back"}))
    if toolbox.transport == "stdio":
        for _ in range(10):  # a start may take longer than the call that begins it
            (again,) = run(toolbox, ("echo", {"text": "back"})) if again[1] else (again,)
        assert again[0].startswith("back from")
    else:  # not ours to start
        assert again[1] and again[0].startswith("Error: ")


def test_nothing_is_left_running(tmp_path):
    before = children()
    make(write(tmp_path, test={"command": sys.executable, "args": [SERVER]}))
    assert len(children() - before) == 1
    mcp.close_all()
    assert not children() - before


OWN = """
import sys
from envs.mcp import Server


class Own:
    def reset(self, **row):
        self.server = Server("own", {"command": sys.executable, "args": [SERVER]}, seconds=60)

    async def echo(self, text: str) -> str:
        \'\'\'Says it.

        Args:
            text: what
        \'\'\'
        return await self.server.call("echo", text=text)

    async def close(self):
        await self.server.close()
"""


def test_a_server_for_each_trajectory(tmp_path):
    """As docs/tools-mcp.md writes it."""
    (tmp_path / "own.py").write_text(f"SERVER = {SERVER!r}\n{OWN}", encoding="utf-8")
    cfg, before, said = TrainConfig(env=f"{tmp_path}/own.py:Own", reward_funcs=["length"]), children(), []
    make = environment_maker(cfg)
    one, other = make(), make()
    for environment in (one, other, one):
        if not hasattr(environment.inner, "server"):
            environment.reset({"prompt": "?"}, 0)
        call = '<tool_call>{"name": "echo", "arguments": {"text": "hi"}}</tool_call>'
        (message,), *_ = asyncio.run(environment.step(call))
        said.append(message["content"])
    assert said[0] == said[2] != said[1] and len(children() - before) == 2
    for environment in (one, other):
        asyncio.run(run_limited(environment.close, {}, START))
    assert children() == before


@pytest.mark.parametrize(
    "content, message",
    [
        ("{]", "is no JSON"),
        ('{"mcpServers": {"a": {"command": "x", "args": ["${NO_SUCH}"]}}}', "the environment variable NO_SUCH"),
        ('{"mcpServers": {"a": {"command": "no-such-command"}}}', "server 'a' did not start"),
    ],
)
def test_mistakes_in_the_file(content, message, tmp_path):
    path = tmp_path / "servers.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        make(path)


@pytest.mark.parametrize("http", [("streamable-http", "t0ken"), ("sse", "t0ken")], indirect=True, ids=["http", "sse"])
def test_a_token_over_http_and_sse(http, tmp_path, request):
    url = f"http://127.0.0.1:{http}/" + ("sse" if "sse" in request.node.callspec.id else "mcp")
    box = make(write(tmp_path, test={"url": url, "headers": {"Authorization": "Bearer t0ken"}}))
    ((text, failed),) = run(box, ("echo", {"text": "hi"}))
    assert text.startswith("hi from") and not failed
    with pytest.raises(ConfigError, match="server 'test' did not start: .*401"):
        make(write(tmp_path, test={"url": url, "headers": {"Authorization": "Bearer wrong"}}))


def test_what_a_server_tells_of_its_secrets_is_masked(tmp_path, monkeypatch):
    """In the message that quotes its last lines."""
    monkeypatch.setattr(secrets, "_learned", set())
    monkeypatch.setenv("WIKI_AUTH", "wiki-word-1234")
    program = "import os, sys; print(*os.environ.values(), *sys.argv, file=sys.stderr); sys.exit(3)"
    settings = {"command": sys.executable, "args": ["-c", program], "env": {"A": "${WIKI_AUTH}", "B": "literal-567"}}
    path = write(tmp_path, test=settings)
    with pytest.raises(ConfigError, match="did not start") as caught:
        make(path)
    assert "***" in str(caught.value) and not re.search("wiki-word-1234|literal-567", str(caught.value))


def test_a_server_that_never_starts_is_ended(tmp_path):
    with pytest.raises(ConfigError, match="did not start: not within 1 s"):
        mcp.connect(write(tmp_path, test={"command": "sleep", "args": ["600"]}), 1.0)
    assert not [child for child in psutil.Process().children(recursive=True) if child.name() == "sleep"]
