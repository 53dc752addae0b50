"""Servers that are frozen, killed, not there, or none."""

import contextlib
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
from case import ROOT, Seen, alive, goes_on, named, shorten, wait_until
from server_fixture import TINY, free_port

LONG = "--max_completion_length 400 --min_completion_length 400 --prompts_per_step 1 --num_generations 2 "
LONG += "--max_steps 50 "


# ---- frozen, killed, not there ---------------------------------------------------------------------------------------


def _generating(at, flags: str = "", steps: int = 1):
    """A trainer on the shared server with long completions, in the generation of a step after `steps`."""
    run = at.served(f"{LONG}{flags}")
    if not at.reached(run, f"step {steps}/"):
        raise RuntimeError(f"no step: {run.text[-300:]}")
    return run


def frozen_for_a_while(at, server):
    """the server's processes are stopped for 6 s, the trainer waits 20 -> survived"""
    run = _generating(at, "--server_timeout 20 --max_steps 3 --max_completion_length 150 --min_completion_length 100 ")
    family = at.family()
    for process in family:
        process.suspend()
    time.sleep(6)
    for process in family:
        process.resume()
    return goes_on(at.ended(run), steps=3)


def frozen_for_good(at, server):
    """the server's processes are stopped for good -> named: within --server_timeout"""
    run = _generating(at, "--server_timeout 3 ")
    family = at.family()
    for process in family:
        process.suspend()
    end = at.ended(run, 40)
    for process in family:
        process.resume()
    return named(end, "no answer", "terminal|time limit")


def _killed(at, victim: psutil.Process, words: str = "is gone|engine died") -> Seen:
    run = _generating(at)
    family = at.family()
    victim.kill()
    end = at.ended(run, 40)
    wait_until(lambda: not any(map(alive, family)), 10)
    left = [p for p in family if alive(p)]
    for process in left:
        process.kill()
    if left:
        return Seen("leaked", f"{len(left)} of the server's processes live on ({end.tail})")
    return named(end, words, "start it again|resume|terminal")


def http_killed(at, doomed):
    """kill -9 of the server's HTTP process while it generates -> named: and its engine ends with it"""
    return _killed(at, at.family()[0])


def engine_killed(at, doomed):
    """kill -9 of the server's engine while it generates -> named: and the HTTP process ends"""
    engines = [p for p in at.family()[1:] if "Engine" in p.name() or "Engine" in " ".join(p.cmdline())] or at.family()[
        -1:
    ]
    return _killed(at, engines[0])


def server_terminated(at, doomed):
    """SIGTERM to the server while it generates -> named: and no folder of it is left"""
    base = at.folder.parent
    run = _generating(at)
    family = at.family()
    began = family[0].create_time()
    os.kill(family[0].pid, signal.SIGTERM)
    end = at.ended(run, 40)
    wait_until(lambda: not any(map(alive, family)), 15)
    left = [p.name for p in base.glob("vllm_server_*") if p.stat().st_ctime > began]
    left += [p.name() for p in family if alive(p)]
    return (
        Seen("leaked", f"left: {', '.join(left)}")
        if left
        else named(end, "is gone|503|shut|cut", "start it again|resume|terminal")
    )


def server_terminated_while_loading(at):
    """SIGTERM to a server that is loading -> survived: it ends with its processes, and no folder of it is left"""
    run = at.command(sys.executable, "vllm_server.py", "--model", TINY, "--port", free_port())
    at.reached(run, "loading")
    wait_until(lambda: run.children(), 30)
    os.kill(run.members[0].pid, signal.SIGTERM)
    end = at.ended(run, 20)
    return (
        Seen("hung", "still running 20 s after SIGTERM")
        if end.status is None
        else Seen("survived", f"status {end.status}")
    )


def _refuses(at, *arguments, **env):
    return at.ended(at.command(sys.executable, "vllm_server.py", *map(str, arguments), **env), 40)


def port_taken(at):
    """a server on a port that is taken -> named"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return named(
            _refuses(at, "--model", TINY, "--port", taken.getsockname()[1]), "cannot listen|in use", "another --port"
        )


def open_without_token(at):
    """a server for other machines without a token -> named"""
    command = [sys.executable, "vllm_server.py", "--model", TINY, "--host", "0.0.0.0", "--port", str(free_port())]
    env = {k: v for k, v in os.environ.items() if k != "VLLM_SERVER_TOKEN"}
    end = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=40, encoding="utf-8")
    words = "0.0.0.0" in end.stderr and "--token" in end.stderr
    return Seen("named" if end.returncode and words else "ended", shorten(end.stderr[-300:]))


def unsafe_arguments(at):
    """a server with --api-key, an empty token, a port of 99999 -> named: each"""
    for arguments, words in (
        (["--api-key", "x"], "--token"),
        (["--token", " "], "empty"),
        (["--port", "99999"], "65535"),
    ):
        seen = named(_refuses(at, "--model", TINY, *arguments), words)
        if seen.verdict != "named":
            return seen
    return seen


def no_such_model(at, limit=90):
    """a server of a folder that is not there -> named"""
    return named(_refuses(at, "--model", "models/none", "--port", free_port()), "models/none", "folder|hub|exist")


def wrong_model(at, server):
    """a trainer of another model than the server's -> named"""
    code = "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer\n"
    code += f"c = AutoConfig.from_pretrained({str(TINY)!r}, hidden_size=64, num_hidden_layers=1)\n"
    code += f"AutoModelForCausalLM.from_config(c).save_pretrained({str(at.given / 'other')!r})\n"
    code += f"AutoTokenizer.from_pretrained({str(TINY)!r}).save_pretrained({str(at.given / 'other')!r})\n"
    exec(compile(code, "other model", "exec"))
    return named(at.ended(at.served(f"--model_id {at.given / 'other'} ")), "serves", "--model")


def short_window(at, server):
    """a trainer that needs a longer window than the server's -> named"""
    return named(at.ended(at.served("--max_completion_length 500 ")), "window of 512", "max-model-len")


def nothing_listens(at):
    """a trainer whose server is not there -> named: within --server_timeout"""
    end = at.train(f"--generator vllm --server_urls http://127.0.0.1:{free_port()} --server_timeout 3 ")
    return named(end, "not ready within 3 s", "started|address")


# ---- servers that are none -------------------------------------------------------------------------------------------


def _fake(at, answer, flags: str = "--server_timeout 3 --request_timeout 5 ") -> object:
    """A trainer on an HTTP server of ours that answers everything with `answer(handler)`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer(self)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return at.train(f"--generator vllm --server_urls http://127.0.0.1:{server.server_port} {flags}", limit=50)


def _send(handler, body: bytes, kind: str = "application/json", length: int | None = None) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    handler.wfile.write(body)


def answers_html(at):
    """the address is another program's, which answers everything with a page -> named: no vllm_server.py"""
    end = _fake(at, lambda handler: _send(handler, b"<html>It works!</html>", "text/html"))
    return named(end, "127.0.0.1:", "vllm_server|address|right")


def answers_garbage(at):
    """a server that answers everything with JSON of the wrong form -> named"""
    return named(_fake(at, lambda handler: _send(handler, b"[1, 2]")), "127.0.0.1:", "vllm_server|terminal|address")


def answers_without_end(at):
    """a server whose answer never ends (here after 300 MB) -> named: without taking the memory"""
    used = []

    def memory() -> int:
        return max(psutil.Process(run.members[0].pid).memory_info().rss for run in at.started) >> 20

    def flood(handler):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(300):
            handler.wfile.write(b"x" * 10**6)
            used.append(memory())

    end = _fake(at, flood)
    grown = max(used) - used[0] if used else 0
    return Seen("leaked", f"+{grown} MiB in the trainer") if grown > 150 else named(end, "127.0.0.1:", "")


def answers_in_drops(at):
    """a server that sends a byte a second -> named: within --server_timeout"""

    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(60):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(1)

    return named(_fake(at, drip), "127.0.0.1:|not ready", "")
