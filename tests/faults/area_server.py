"""The vLLM server: who may ask, hostile requests, pictures."""

import base64
import contextlib
import http.server
import io
import json
import os
import shutil
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import requests
from case import Seen, either, goes_on, lives, named, shorten, wait_until
from server_fixture import TINY, free_port

JSON = {"Content-Type": "application/json"}


def _raw(at, data: bytes, wait: float = 5) -> bytes:
    """Send bytes as they are; what comes back until the end, or for `wait` seconds."""
    host, port = at.server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connection:
        received = b""
        with contextlib.suppress(OSError):
            connection.sendall(data)
            while more := connection.recv(65536):
                received += more
        return received


def _memory(at) -> float:
    """MiB of the HTTP process."""
    return psutil.Process(at.server.process.pid).memory_info().rss / 2**20


# ---- access ----------------------------------------------------------------------------------------------------------


def routes_without_token(at, server):
    """every route of the server without a token, and with wrong ones -> survived: 401"""
    paths = at.request("GET", "/openapi.json").json()["paths"]
    routes = [(method, path) for path, methods in paths.items() for method in methods]
    routes += [("GET", path) for path in ("/docs", "/redoc", "/nowhere", "//generate", "/%2e%2e/generate")]
    let_in = []
    for method, path in routes:
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {server.token}"}):
            answer = requests.request(method, server.url + path, headers=header, timeout=10)
            let_in += [f"{method} {path}: {answer.status_code}"] if answer.status_code != 401 else []
    return Seen("leaked", f"let in: {let_in[:3]}") if let_in else lives(at, f"{3 * len(routes)} refusals")


def websocket_without_token(at, server):
    """a WebSocket and an h2c upgrade without a token -> survived: refused"""
    head = "GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: {}\r\nSec-WebSocket-Version: 13\r\n"
    head += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
    answers = [_raw(at, head.format(kind).encode(), 3)[:14] for kind in ("websocket", "h2c")]
    return Seen("leaked", str(answers)) if any(b" 101" in answer for answer in answers) else lives(at, str(answers))


def wrong_token(at, server):
    """a trainer with a wrong token -> named: the flag and the variable"""
    return named(at.ended(at.served("--server_token wrong-token ")), "refuses the token", "VLLM_SERVER_TOKEN")


def token_with_line_end(at, server):
    """VLLM_SERVER_TOKEN with a line end behind it, as from a file -> survived or named: never printed"""
    return either(
        at.ended(at.served("--server_timeout 10 ", VLLM_SERVER_TOKEN=server.token + "\n"), 25),
        "token",
        "line|white|space|stripped|VLLM_SERVER",
    )


def token_with_line_end_inside(at, server):
    """a token with a line end inside it -> named: never printed"""
    token = f"{server.token}\nX-Evil: 1"
    end = at.ended(at.served("--server_timeout 10 ", VLLM_SERVER_TOKEN=token), 25)
    return named(end, "token", "line|character|white|VLLM_SERVER")


def token_non_ascii(at, server):
    """a wrong token with letters beyond ASCII and an emoji -> named: as a wrong token"""
    for number, token in enumerate(("Schlüssel", "key\N{KEY}")):
        seen = named(
            at.ended(at.served(f"--run_name r{number} ", VLLM_SERVER_TOKEN=token)), "token", "VLLM_SERVER_TOKEN"
        )
        if seen.verdict != "named":
            return seen
    return seen


def token_right_but_odd(at, limit=150):
    """a server and a trainer with a token beyond ASCII that ends in a space -> survived: it is let in"""
    port, token = free_port(), f"Schl\u00fcssel {os.environ['JUDGE_TOKEN']} "
    command = [sys.executable, "vllm_server.py", "--model", TINY, "--port", port, "--dtype", "float32"]
    server = at.command(*command, "--max-model-len", 512, VLLM_SERVER_TOKEN=token)
    if not at.reached(server, "vllm_server: ready", 100):
        return named(at.ended(server, 1), "token", "ASCII|character|space")
    flags = f"--generator vllm --server_urls http://127.0.0.1:{port} --server_timeout 10 "
    end = at.train(flags, 40, VLLM_SERVER_TOKEN=token)
    _stop(at, server)
    return goes_on(end, steps=2)


def _stop(at, server) -> None:
    """End a server of the fault's own. What it leaves then is another fault's matter."""
    server.kill()
    for path in at.temp.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def token_in_ps(at):
    """a server started with --token -> survived or named: the token is not to be seen in ps, or a warning says so"""
    port, token = free_port(), os.environ["JUDGE_TOKEN"]
    run = at.command(sys.executable, "vllm_server.py", "--model", TINY, "--port", port, "--token", token)
    if not at.reached(run, "loading"):
        return named(at.ended(run, 5), "token", "VLLM_SERVER_TOKEN")
    shown = token in Path(f"/proc/{run.members[0].pid}/cmdline").read_text(encoding="utf-8")
    _stop(at, run)
    if shown and "VLLM_SERVER_TOKEN" not in run.text:
        return Seen("leaked", "ps shows it, nothing is said")
    return Seen("survived", shorten(run.text))


def token_in_workers(at, server):
    """the environment of the engine's processes -> survived: without the token"""
    holders = [p.name() for p in at.family()[1:] if server.token in "".join(p.environ().values())]
    return Seen("leaked", f"in {', '.join(holders)}") if holders else lives(at, "not there")


def proxies(at, server):
    """HTTP_PROXY and HTTPS_PROXY point nowhere -> survived: not used for the server"""
    where = f"http://127.0.0.1:{free_port()}"
    return goes_on(at.ended(at.served(HTTP_PROXY=where, http_proxy=where, ALL_PROXY=where)), steps=2)


# ---- requests --------------------------------------------------------------------------------------------------------


def headers_without_end(at, server):
    """40 MB of headers without an end and without a token -> survived: cut off early, no memory kept"""
    before = _memory(at)
    host, port = server.url.removeprefix("http://").split(":")
    sent, peak = 0, before
    with socket.create_connection((host, int(port)), timeout=5) as connection, contextlib.suppress(OSError):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        line = b"X-Header-%d: " % 7 + b"x" * 1000 + b"\r\n"
        for _ in range(640):
            connection.sendall(line * 64)
            sent += 64 * len(line)
            peak = max(peak, _memory(at))
    grown = peak - before
    if sent > 8 << 20 or grown > 60:
        return Seen("leaked", f"{sent >> 20} MB were taken, memory +{grown:.0f} MiB")
    return lives(at, f"cut after {sent >> 10} kB, memory +{grown:.0f} MiB")


def headers_many(at, server):
    """20,000 headers in a whole request -> survived: refused"""
    data = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(20000)) + b"\r\n"
    return lives(at, str(_raw(at, data)[:30]))


def half_open(at, server, limit=110):
    """connections that send nothing, half a header, or half a body -> survived: closed within 75 s"""
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\nContent-Length: 1000\r\n"
    host, port = server.url.removeprefix("http://").split(":")
    kinds = {"silent": b"", "half a header": head.encode(), "half a body": (head + '\r\n{"prompt_ids"').encode()}
    open_ones = {}
    for kind, data in kinds.items():
        open_ones[kind] = at.stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        open_ones[kind].sendall(data)
        open_ones[kind].setblocking(False)

    def closed(connection) -> bool:
        try:
            return connection.recv(65536) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def all_closed():
        for kind in [kind for kind, connection in open_ones.items() if closed(connection)]:
            del open_ones[kind]
        time.sleep(0.1)
        return not open_ones

    wait_until(all_closed, 75)
    return Seen("leaked", f"still open after 75 s: {', '.join(open_ones)}") if open_ones else lives(at, "all closed")


def half_open_many(at, server):
    """1,500 half-open connections while a request is answered -> survived"""
    host, port = server.url.removeprefix("http://").split(":")
    held = []
    with contextlib.suppress(OSError):
        for _ in range(1500):
            held.append(socket.create_connection((host, int(port)), timeout=5))
            held[-1].sendall(b"GET /he")
    seen = at.generates()
    for connection in held:
        connection.close()
    return Seen("ended", f"with {len(held)} open: {seen}") if seen else lives(at, f"{len(held)} open")


def parallel_requests(at, server, limit=120):
    """500 requests at once -> survived: all answered"""
    body = {"prompt_ids": [5, 6, 7], "max_tokens": 2}
    with ThreadPoolExecutor(250) as pool:
        codes = list(pool.map(lambda _: at.request("POST", "/generate", timeout=90, json=body).status_code, range(500)))
    return lives(at, "500 answers") if set(codes) == {200} else Seen("ended", f"{codes.count(200)} of 500 answered")


def clients_that_leave(at, server):
    """60 clients that ask for 450 tokens and go away -> survived: the engine is free again"""
    body = json.dumps({"prompt_ids": [5, 6, 7], "max_tokens": 450, "min_tokens": 450, "n": 8})
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
    head += "Content-Type: application/json\r\n"
    data = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(60):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(data)
    start = time.monotonic()
    wrong = at.generates()
    seconds = time.monotonic() - start
    return (
        Seen("ended", wrong or f"{seconds:.0f} s for four tokens")
        if wrong or seconds > 15
        else lives(at, f"{seconds:.1f} s")
    )


def odd_paths(at, server):
    """odd paths by seven methods, with the token -> survived: no answer of 500"""
    paths = [
        "/",
        "//",
        "/../../etc/passwd",
        "/%00",
        "/generate/",
        "/" + "a" * 20000,
        "/v1/models/../../x",
        "/?a=" + "%ff" * 900,
    ]
    broken = []
    for path in paths:
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            text = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
            text += "Content-Length: 0\r\nConnection: close\r\n\r\n"
            answer = _raw(at, text.encode())
            broken += [f"{method} {path[:20]}: {answer[9:12]}"] if answer[9:10] == b"5" else []
    return Seen("ended", f"{broken[:3]}") if broken else lives(at, f"{7 * len(paths)} requests")


def bodies(at, server):
    """bodies of 10^12 bytes (said), in chunks, of 100,000 nested brackets, and that are no JSON -> survived: refused"""
    codes = [at.request("POST", "/generate", headers={"Content-Length": str(10**12)}).status_code]
    codes.append(at.request("POST", "/generate", data=iter([b"{", b"}"])).status_code)
    for text in (
        "[" * 100_000,
        '{"prompt_ids": ' * 5000,
        "\x00\xff",
        '{"prompt_ids": [1], "max_tokens": NaN}',
        "",
        '{"prompt_ids": [' + "9" * 5000 + "]}",
    ):
        for path in ("/generate", "/v1/chat/completions", "/v1/completions", "/update_weights", "/tokenize"):
            codes.append(at.request("POST", path, data=text.encode("latin-1"), headers=JSON).status_code)
    wrong = [code for code in codes if not 400 <= code < 500]
    return Seen("ended", f"answers {sorted(set(wrong))}") if wrong else lives(at, f"{len(codes)} refusals")


def smuggling(at, server):
    """two lengths, a length and chunks, and a second request without a token behind the first -> survived: refused"""
    good = f"Host: x\r\nAuthorization: Bearer {server.token}\r\n"
    first = _raw(
        at, f"POST /generate HTTP/1.1\r\n{good}Content-Length: 2\r\nContent-Length: 40\r\n\r\n{{}}".encode(), 3
    )
    both = f"POST /generate HTTP/1.1\r\n{good}Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    both += "GET /server_info HTTP/1.1\r\nHost: x\r\n\r\n"
    second = _raw(at, both.encode(), 3)
    third = _raw(at, f"GET /health HTTP/1.1\r\n{good}\r\nGET /server_info HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 3)
    let_in = any(b"hidden_size" in answer for answer in (first, second, third))
    return Seen("leaked", "the second was answered") if let_in else lives(at, "refused")


def bad_generate_requests(at, server):
    """requests that no model can take (n of 10^9, unknown tokens, ...) -> survived: 4xx with a message"""
    base = {"prompt_ids": [5, 6, 7], "max_tokens": 4}
    wrong = [
        {"n": 0},
        {"n": 10**9},
        {"max_tokens": 10**9},
        {"prompt_ids": []},
        {"prompt_ids": "hello"},
        {"prompt_ids": [10**6]},
        {"prompt_ids": [-1]},
    ]
    wrong += [
        {"temperature": -1},
        {"top_p": 0},
        {"min_tokens": 5},
        {"temprature": 1.0},
        {"images": ["aGVsbG8="]},
        {"seed": 2**70},
        {"stop_token_ids": [1] * 5000},
    ]
    answers = [at.request("POST", "/generate", json=base | one) for one in wrong]
    bad = [a.status_code for a in answers if not 400 <= a.status_code < 500 or not a.json()["error"]["message"]]
    return Seen("ended", f"answers {bad}") if bad else lives(at, f"{len(answers)} refusals")


# ---- pictures, on a server of a vision model -------------------------------------------------------------------------


class _Listener(http.server.BaseHTTPRequestHandler):
    """Remembers who asked, answers with a redirect or a picture."""

    asked: list = []
    redirect = None

    def do_GET(self):
        self.asked.append(self.path)
        self.send_response(302 if self.redirect and self.path == "/first" else 200)
        if self.redirect:
            self.send_header("Location", self.redirect)
        body = _png(8, 8)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def _png(width: int, height: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("L", (width, height)).save(out, "PNG")
    return out.getvalue()


def _chat(at, url: str, timeout: float = 20):
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"model": str(at.server.model_dir), "messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
    return at.request("POST", "/v1/chat/completions", timeout, json=body)


def _listening(**attributes):
    handler = type("Handler", (_Listener,), {"asked": []} | attributes)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return handler, f"http://127.0.0.1:{server.server_port}"


def image_url_loopback(at, eyes):
    """a chat request whose image_url is a server on this machine's loopback -> survived: not fetched"""
    handler, url = _listening()
    answer = _chat(at, url + "/picture.png")
    return (
        Seen("leaked", f"fetched, answer {answer.status_code}")
        if handler.asked
        else Seen("survived", shorten(answer.text))
    )


def image_url_redirected(at, eyes):
    """the same by another name of loopback, and redirected to it -> survived: not fetched"""
    handler, url = _listening()
    first, other = _listening(redirect=url + "/second")
    for address in (
        other + "/first",
        url.replace("127.0.0.1", "localhost"),
        url.replace("127.0.0.1", "0.0.0.0"),
        url.replace("127.0.0.1", "[::ffff:127.0.0.1]"),
    ):
        with contextlib.suppress(requests.RequestException):
            _chat(at, address)
    return (
        Seen("leaked", f"fetched {first.asked + handler.asked}")
        if first.asked or handler.asked
        else Seen("survived", "not fetched")
    )


def image_url_file(at, eyes):
    """image_url is file:// or a path -> survived: refused"""
    picture = at.file("private.png", _png(8, 8))
    codes = [_chat(at, url).status_code for url in (f"file://{picture}", str(picture), f"FILE://localhost{picture}")]
    return Seen("leaked", f"answers {codes}") if 200 in codes else Seen("survived", f"answers {codes}")


def image_url_slow(at, eyes):
    """image_url is a server that accepts and never answers -> survived: not waited for"""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        start = time.monotonic()
        with contextlib.suppress(requests.RequestException):
            _chat(at, f"http://127.0.0.1:{mute.getsockname()[1]}/x.png", 30)
        seconds = time.monotonic() - start
    return Seen("hung", f"{seconds:.0f} s") if seconds > 20 else Seen("survived", f"{seconds:.1f} s")


def image_bombs(at, eyes):
    """pictures of 50 M pixels, cut short, of 1 GB when unpacked, and garbage, by both routes -> survived: refused"""
    cases = [_png(8000, 6250), _png(64, 64)[:60], b"garbage", b"", _png(20000, 20000)[:200]]
    before, codes = _memory(at), []
    for data in cases:
        text = base64.b64encode(data).decode()
        codes.append(
            at.request("POST", "/generate", json={"prompt_ids": [5], "max_tokens": 2, "images": [text]}).status_code
        )
        codes.append(_chat(at, "data:image/png;base64," + text).status_code)
    grown = _memory(at) - before
    if grown > 200:
        return Seen("leaked", f"memory +{grown:.0f} MiB")
    return (
        Seen("survived", f"answers {sorted(set(codes))}")
        if all(400 <= c < 500 for c in codes)
        else Seen("ended", f"answers {codes}")
    )


def image_eps(at, eyes):
    """an EPS picture, which Pillow hands to Ghostscript, and other rare kinds -> survived: refused by format"""
    from PIL import Image

    taken, ghostscript = [], False
    for kind in ("EPS", "TGA", "PCX", "SGI"):
        out = io.BytesIO()
        Image.new("RGB", (8, 8)).save(out, kind)
        body = {"prompt_ids": [5, 6], "max_tokens": 2, "images": [base64.b64encode(out.getvalue()).decode()]}
        answer = at.request("POST", "/generate", json=body)
        ghostscript = ghostscript or "ghostscript" in answer.text.lower()
        taken += [kind] if "cannot" not in answer.text and "format" not in answer.text.lower() else []
    if taken or ghostscript:
        return Seen("leaked", f"opened: {', '.join(taken) or 'none'}; Ghostscript was looked for: {ghostscript}")
    return Seen("survived", "refused")
