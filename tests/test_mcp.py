"""Tools of real MCP servers, over stdio and HTTP; whatever a server does, the model gets text and the run goes on."""

import asyncio
import base64
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from PIL import Image
from server_fixture import free_port

import mcp_tools
from config import ConfigError, TrainConfig
from tools import Call, Toolbox, get_tools

SERVER = str(Path(__file__).parent / "mcp_server.py")


def children() -> set[int]:
    found = subprocess.run(["pgrep", "-f", SERVER], capture_output=True, text=True).stdout.split()
    return {int(pid) for pid in found} - {os.getpid()}


@pytest.fixture(params=["stdio", "http"])
def toolbox(request, tmp_path):
    """The misbehaving server's tools, with a time limit of two seconds a call."""
    process = None
    if request.param == "stdio":
        settings = {"command": sys.executable, "args": [SERVER]}
    else:
        port = free_port()
        process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
        settings = {"url": f"http://127.0.0.1:{port}/mcp"}
        wait_for(port)
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": {"test": settings}}))
    box = make(path)
    box.transport = request.param
    yield box
    mcp_tools.close_all()
    if process:
        process.kill()
        process.wait()


def make(path, **settings) -> Toolbox:
    cfg = TrainConfig(mcp_config=str(path), **{"tool_timeout": 5.0, "max_tool_result": 1000} | settings)
    return Toolbox(get_tools(cfg), TrainConfig(mcp_config=str(path), tool_timeout=2.0, max_tool_result=1000))


def wait_for(port: int) -> None:
    for _ in range(200):
        try:
            requests.get(f"http://127.0.0.1:{port}/", timeout=1)
            return
        except requests.ConnectionError:
            time.sleep(0.1)
    raise TimeoutError(port)


def run(box: Toolbox, *calls) -> list:
    messages, events = asyncio.run(box.run([Call(name, arguments) for name, arguments in calls], box.tools))
    return [(message["content"], event["failed"]) for message, event in zip(messages, events, strict=True)]


def test_calls(toolbox):
    """Results, errors, pictures; answers by their calls, whichever comes first; hundreds of thousands of characters."""
    (text, failed), (error, error_failed), (picture, _) = run(
        toolbox, ("echo", {"text": "hi"}), ("fail", {"text": "go"}), ("look", {})
    )
    assert text.startswith("hi from ") and not failed
    assert "cannot go" in error and error_failed
    (part,) = [part for part in picture if part["type"] == "image"]
    assert Image.open(io.BytesIO(base64.b64decode(part["image"]))).size == (8, 8)
    calls = [("echo", {"text": f"number {n}", "seconds": (7 * n % 10) / 20}) for n in range(10)]
    start = time.perf_counter()
    results = run(toolbox, *calls)
    assert [text.split(" from")[0] for text, _ in results] == [f"number {n}" for n in range(10)]
    assert time.perf_counter() - start < 2  # together they would sleep 2.25 s
    ((long, _),) = run(toolbox, ("megabyte", {}))
    assert long == "x" * 1000 + "... (999000 more characters)"


def test_a_server_that_hangs_or_dies(toolbox):
    """Text to the model, in the time of one call; a server that was started here is started again."""
    start = time.perf_counter()
    (hung, failed), (fine, _) = run(toolbox, ("hang", {}), ("echo", {"text": "hi"}))
    assert failed and "hang gave no answer within 2 s" in hung and fine.startswith("hi")
    assert time.perf_counter() - start < 4
    if toolbox.transport == "stdio":
        (garbled,) = run(toolbox, ("garbage", {}))
        assert "after the garbage" in garbled[0] or garbled[1]
    start = time.perf_counter()
    ((died, failed),) = run(toolbox, ("die", {}))
    assert failed and died.startswith("Error: ") and time.perf_counter() - start < 4
    (again,) = run(toolbox, ("echo", {"text": "back"}))
    if toolbox.transport == "stdio":
        assert again[0].startswith("back from")
    else:  # not ours to start
        assert again[1] and again[0].startswith("Error: ")


def test_nothing_is_left_running(tmp_path):
    path = tmp_path / "servers.json"
    settings = {"command": sys.executable, "args": [SERVER], "instances": 3}
    path.write_text(json.dumps({"mcpServers": {"test": settings}}))
    before = children()
    box = make(path)
    started = children() - before
    assert len(started) == 3
    pids = {text.rpartition(" ")[2] for text, _ in run(box, *[("echo", {"text": "", "seconds": 0.3})] * 6)}
    assert {int(pid) for pid in pids} == started  # calls go to the least busy
    run(box, ("hang", {}))
    start = time.perf_counter()
    mcp_tools.close_all()
    assert time.perf_counter() - start < 12 and not children() - before


def test_a_public_server(tmp_path):
    path = tmp_path / "servers.json"
    servers = {"time": {"command": sys.executable, "args": ["-m", "mcp_server_time"], "prefix": "clock_"}}
    path.write_text(json.dumps({"mcpServers": servers}))
    box = make(path, tool_timeout=20.0)
    try:
        arguments = {"source_timezone": "Asia/Tokyo", "time": "16:30", "target_timezone": "Europe/London"}
        ((text, failed),) = run(box, ("clock_convert_time", arguments))
        assert not failed and "Europe/London" in text and "Asia/Tokyo" in text
    finally:
        mcp_tools.close_all()


@pytest.mark.parametrize(
    "content, message",
    [
        ("{]", "cannot be read"),
        ('{"servers": {}}', "cannot be read"),
        ('{"mcpServers": {"a": {}}}', "either a command"),
        ('{"mcpServers": {"a": {"command": "x", "colour": 1}}}', "unknown colour"),
        ('{"mcpServers": {"a": {"command": "no-such-command"}}}', "server 'a' did not start"),
        ('{"mcpServers": {"a": {"command": "python server.py"}}}', 'what follows it belongs in "args"'),
        ('{"mcpServers": {"a": {"url": "http://127.0.0.1:9/mcp"}}}', "is something listening at http"),
    ],
)
def test_mistakes_in_the_file(content, message, tmp_path):
    path = tmp_path / "servers.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        make(path)
    mcp_tools.close_all()
