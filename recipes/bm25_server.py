"""A search engine for search_r1.yaml without a GPU: BM25 (bm25s) over a corpus, by Search-R1's protocol.

python recipes/bm25_server.py wiki-18.jsonl --port 8100      # lines of {"id": "0", "contents": "TITLE\\nTEXT"}
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import bm25s

QUIET = {"show_progress": False}


class Engine:
    def __init__(self, corpus: str):
        with Path(corpus).open(encoding="utf-8") as lines:
            self.documents = [json.loads(line) for line in lines if line.strip()]
        self.index = bm25s.BM25()
        self.index.index(bm25s.tokenize([one["contents"] for one in self.documents], stopwords="en", **QUIET), **QUIET)

    def retrieve(self, queries: list[str], topk: int = 3, return_scores: bool = False) -> dict:
        count, results = min(topk, len(self.documents)), []
        for query in queries:
            places, scores = self.index.retrieve(bm25s.tokenize([query], stopwords="en", **QUIET), k=count, **QUIET)
            found = [(n, float(score)) for n, score in zip(places[0], scores[0], strict=True) if score > 0]
            hits = [{"document": self.documents[n], "score": score} for n, score in found]
            results.append(hits if return_scores else [hit["document"] for hit in hits])
        return {"result": results}


def server(engine: Engine, host: str = "127.0.0.1", port: int = 8100) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            try:
                length = min(int(self.headers["Content-Length"]), 1 << 20)  # what is longer is cut, and so no JSON
                status, answer = 200, engine.retrieve(**json.loads(self.rfile.read(length)))
            except (ValueError, TypeError) as error:
                status, answer = 422, {"detail": f"expected queries, topk, return_scores: {error}"}
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *parts): ...

    return ThreadingHTTPServer((host, port), Handler)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    args = parser.parse_args()
    with server(Engine(args.corpus), args.host, args.port) as running:
        print(f"http://{args.host}:{args.port}/retrieve", flush=True)
        running.serve_forever()
