"""A real HTTP server that answers what a test lists."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FINE = (200, '{"fine": 1}', {})


class Handler(BaseHTTPRequestHandler):
    """Answers with the next of server.answers, with the last again and again: (status, body, headers), None to hang up,
    "hang"."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.path, self.headers["Authorization"], body))
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            self.close_connection = True
        elif answer == "hang":
            self.server.over.wait(20)
        else:
            status, text, headers = answer
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(text))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

    do_GET = do_POST

    def log_message(self, *_): ...


@contextlib.contextmanager
def answering(*answers) -> Iterator[ThreadingHTTPServer]:
    """With its `url`; `asked`: (path, Authorization, body) of each request."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads, made.asked, made.answers, made.over = True, [], list(answers), threading.Event()
    made.url = f"http://127.0.0.1:{made.server_port}"
    threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield made
    finally:
        made.over.set()
        made.shutdown()
        made.server_close()
