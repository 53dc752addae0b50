"""Servers that are none: they speak HTTP and answer as a test tells them to."""

import contextlib
import http.server
import json
import ssl
import threading

INFO = {"model": "stub", "server": "a name", "vocab_size": 100, "hidden_size": 8, "num_layers": 2, "max_model_len": 64}
INFO |= {"dtype": "float32", "world_size": 1, "device": "cpu", "devices": ["cpu"], "can_sleep": False}
INFO |= {"never_sampled": [], "policy_version": 0, "weights_error": None}
SAMPLE = {"token_ids": [7, 8, 9], "logprobs": [-1.0, -2.0, -0.5], "finish_reason": "length"}
GENERATED = {"samples": [SAMPLE], "prompt_ids": [5, 6], "policy_version": 0, "policy_version_last": 0, "instance": "x"}
SOUND = {"/health": {}, "/server_info": INFO, "/generate": GENERATED}
DROP = object()  # no answer: the connection is closed


@contextlib.contextmanager
def stub(answer=None, certificate=None):
    """(url, requests so far as (path, body)) of a server. answer(path, earlier): what to send for `path`, a body, or
    (status, headers, body), or DROP, or None for a sound answer; `earlier`: how many requests of this path there were.
    """
    asked: list[tuple[str, dict]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            earlier = sum(path == self.path for path, _ in asked)
            asked.append((self.path, body))
            given = answer(self.path, earlier) if answer else None
            if given is DROP:
                return
            given = SOUND.get(self.path, {}) if given is None else given
            status, headers, content = given if isinstance(given, tuple) else (200, {}, given)
            text = content if isinstance(content, bytes) else json.dumps(content).encode()
            with contextlib.suppress(OSError):
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(text))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, client_address):
            pass  # a client that does not like the certificate

    with Server(("127.0.0.1", 0), Handler) as server:
        scheme = "http"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket, scheme = context.wrap_socket(server.socket, server_side=True), "https"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"{scheme}://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
