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


def app(corpus: str) -> Starlette:
    with Path(corpus).open(encoding="utf-8") as lines:
        documents = [json.loads(line) for line in lines if line.strip()]
    index = bm25s.BM25()
    index.index(bm25s.tokenize([one["contents"] for one in documents], stopwords="en", **QUIET), **QUIET)

    def hits(queries: list[str], topk: int = 3, return_scores: bool = False) -> dict:
        tokens, results = bm25s.tokenize(queries, stopwords="en", **QUIET), []
        for places, scores in zip(*index.retrieve(tokens, k=min(topk, len(documents)), **QUIET), strict=True):
            found = [(documents[n], float(score)) for n, score in zip(places, scores, strict=True) if score > 0]
            results.append([{"document": one, "score": score} if return_scores else one for one, score in found])
        return {"result": results}

    async def retrieve(request: Request) -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(hits, **await request.json()))

    return Starlette(routes=[Route("/retrieve", retrieve, methods=["POST"])])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("corpus")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8100)
    args = parser.parse_args()
    uvicorn.run(app(args.corpus), host=args.host, port=args.port)
