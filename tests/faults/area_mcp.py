"""MCP servers that misbehave, as tools in real runs."""

import http.server
import json
import os
import sys
import threading

import psutil
import pyarrow.parquet
from case import HERE, Seen, alive, goes_on, named, wait_until
from PIL import Image
from server_fixture import free_port


def _mcp(at, tool: str, settings: dict | None = None, flags: str = "", arguments: dict | None = None, **how):
    settings = settings or {"command": sys.executable, "args": [str(HERE / "bad_mcp.py")]}
    path = at.file("mcp.json", json.dumps({"mcpServers": {"odd": settings}}))
    turn = f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments or {}})}</tool_call>"
    flags = f"--mcp_config {path} --reward_funcs tool_use length --max_steps 2 --tool_timeout 5 {flags}"
    return at.scripted([turn, "Well."], flags + at.known("--env_errors drop"), **how)


def mcp_dies(at):
    """an MCP server ends in the middle of a call -> survived: started again, the model is told"""
    return goes_on(_mcp(at, "die", flags="--max_steps 1 "), steps=1)


def mcp_hangs(at):
    """an MCP server never answers a call -> survived: the model is told after --tool_timeout"""
    return goes_on(_mcp(at, "hang", flags="--max_steps 1 "), steps=1)


def mcp_garbage(at):
    """an MCP server writes what is no message among its answers -> survived"""
    return goes_on(_mcp(at, "garbage", flags="--max_steps 1 "), steps=1)


def mcp_floods(at, limit=90):
    """an MCP server writes 50 MB to its standard error -> survived: not on the terminal, not blocked"""
    end = _mcp(at, "flood", flags="--max_steps 1 ")
    shown = len(end.text) >> 10
    return goes_on(end, f"{shown} kB of its chatter on the terminal" if shown > 200 else None, steps=1)


def mcp_megabytes(at):
    """an MCP server answers with 20 MB -> survived: cut"""
    return goes_on(_mcp(at, "megabytes", flags="--max_steps 1 --tool_timeout 20 "), steps=1)


def mcp_path_as_image(at, limit=90):
    """an MCP server gives the path of a local file as an image -> survived: the file is not opened"""
    import tiny_vlms

    picture, model = at.given / "private.png", tiny_vlms.make("idefics3", at.given / "vlm")
    Image.new("RGB", (8, 8)).save(picture)
    end = _mcp(at, "picture", flags=f"--max_steps 1 --model_id {model} ", arguments={"path": str(picture)})
    shown = "".join(str(pyarrow.parquet.read_table(p).to_pylist()) for p in end.run.glob("completions/*.parquet"))
    return Seen("leaked", "a local file was opened as a picture") if "[image]" in shown else goes_on(end, steps=1)


def mcp_unauthorized(at):
    """an MCP server over HTTP refuses the token (401) -> named: says so, not "is something listening?" """

    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_DELETE = do_POST

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = {"url": f"http://127.0.0.1:{server.server_port}/mcp", "headers": {"Authorization": "Bearer canary-mcp"}}
    return named(_mcp(at, "echo", settings), "401|unauthorized|refuse", "token|header|authorization")


def mcp_keys_copied(at):
    """an MCP configuration with keys in it -> survived: they are not copied to the run's folder"""

    settings = {
        "command": sys.executable,
        "args": [str(HERE / "bad_mcp.py")],
        "env": {"API_KEY": os.environ["OPENAI_API_KEY"]},
    }
    return goes_on(_mcp(at, "echo", settings, "--max_steps 1 "), steps=1)  # checked by every fault: secrets in runs/


def mcp_own_environment(at):
    """an MCP server's environment -> survived: without the trainer's keys"""
    end = _mcp(at, "environment", flags="--max_steps 1 ")

    shown = "".join(str(pyarrow.parquet.read_table(p).to_pylist()) for p in end.run.glob("completions/*.parquet"))
    return Seen("leaked", "the trainer's keys are in its environment") if "HAS KEYS" in shown else goes_on(end, steps=1)


def mcp_not_there(at):
    """an MCP command that does not exist, and an address where nothing listens -> named"""

    for number, settings in enumerate(
        ({"command": "/no/such/program"}, {"url": f"http://127.0.0.1:{free_port()}/mcp"})
    ):
        seen = named(_mcp(at, "echo", settings, f"--run_name r{number} "), "odd", "by hand|listening|start")
        if seen.verdict != "named":
            return seen
    return seen


def mcp_never_starts(at):
    """an MCP command that starts and says nothing -> named: after --tool_timeout"""
    return named(
        _mcp(at, "echo", {"command": "sleep", "args": ["600"]}, "--tool_timeout 2 ", limit=40),
        "odd",
        "by hand|did not start",
    )


def mcp_trainer_killed(at):
    """kill -9 of a trainer with MCP servers -> survived: they end with it"""

    settings = {"command": sys.executable, "args": [str(HERE / "bad_mcp.py")], "instances": 2}
    path = at.file("mcp.json", json.dumps({"mcpServers": {"odd": settings}}))
    run = at.start(f"--mcp_config {path} --reward_funcs length --max_prompt_length 900 --max_steps 400 ")
    if not at.reached(run, "step 1/"):
        return Seen("broken", run.text[-300:])
    servers = [p for p in run.children() if "bad_mcp.py" in " ".join(p.cmdline())]
    psutil.Process(run.members[0].pid).kill()
    wait_until(lambda: not any(map(alive, servers)), 8)
    left = [p for p in servers if alive(p)]
    return (
        Seen("leaked", f"{len(left)} of {len(servers)} live on") if left else Seen("survived", f"{len(servers)} ended")
    )
