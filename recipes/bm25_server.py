"""A search engine for search_r1.yaml without a GPU: BM25 (bm25s) over a corpus, by Search-R1's protocol.

python recipes/bm25_server.py wiki-18.jsonl --port 8100      # lines of {"id": "0", "contents": "TITLE\\nTEXT"}
"""

import argparse
import asyncio
import json
from pathlib import Path

import bm25s
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

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


def app(engine: Engine) -> Starlette:
    async def retrieve(request: Request) -> JSONResponse:
        try:
            return JSONResponse(await asyncio.to_thread(engine.retrieve, **await request.json()))
        except (ValueError, TypeError) as error:
            return JSONResponse({"detail": f"expected queries, topk, return_scores: {error}"}, 422)

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    args = parser.parse_args()
    uvicorn.run(app(Engine(args.corpus)), host=args.host, port=args.port)
