"""A search engine over examples/search.py's articles as an MCP server: BM25 (bm25s), the two best hits."""

import logging
import sys
from pathlib import Path

import bm25s  # pip install -c requirements-optional.txt bm25s
from mcp.server.mcpserver import MCPServer

sys.path.append(str(Path(__file__).parent))
from search import articles  # noqa: E402

logging.getLogger("bm25s").setLevel(logging.ERROR)
server, texts = MCPServer("search", log_level="ERROR"), articles()
engine = bm25s.BM25()
titled = [f"{text.split()[0]} {text}" for text in texts]  # whom an article is about counts twice
engine.index(bm25s.tokenize(titled, stopwords="en", show_progress=False), show_progress=False)


@server.tool()
def search(query: str) -> str:
    """Finds articles about people.

    Args:
        query: names or other words
    """
    tokens = bm25s.tokenize([query], stopwords="en", show_progress=False)
    found, scores = engine.retrieve(tokens, k=2, show_progress=False)
    hits = [texts[n] for n, score in zip(found[0], scores[0], strict=True) if score > 0]
    return "\n".join(hits) or "Nothing was found."


if __name__ == "__main__":
    server.run("stdio")
