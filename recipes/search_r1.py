"""Search-R1: questions of NQ and HotpotQA, a search engine behind HTTP, the answer in <answer>, compared as in SQuAD.

The engine speaks Search-R1's protocol: POST {"queries": [...], "topk": 3, "return_scores": true} gives {"result": [[
{"document": {"contents": "TITLE\\nTEXT"}, "score": ...}, ...], ...]}. Its own server (E5 over Wikipedia) does, and so
does recipes/bm25_server.py. RETRIEVER_URL names it.
"""

import os

from published import published

from network import http
from rewards import completion_text
from scoring.answers import squad_em
from scoring.text import tagged

ASK = "Answer the question. What you do not know, look up: write <search>words</search>, and you are shown what is "
ASK += "found. Think before each step. At the end write <answer>the answer alone</answer>.\n\n{}"
URL, SHOWN = "http://127.0.0.1:8100/retrieve", 3


def rows(split: str = "train", seed: int = 42, source: str | None = None) -> list[dict]:
    found = published("PeterJinGo/nq_hotpotqa_train", split, source)
    kept = [{"answer": list(row["golden_answers"]), "data_source": row["data_source"]} for row in found]
    asked = [ASK.format(row["question"].strip()) for row in found]
    return [{"prompt": [{"role": "user", "content": text}]} | row for text, row in zip(asked, kept, strict=True)]


def search(query: str) -> str:
    """Finds passages of an encyclopedia.

    Args:
        query: words to look for
    """
    body = {"queries": [query], "topk": SHOWN, "return_scores": True}
    answer = http.ask("POST", os.environ.get("RETRIEVER_URL", URL), 20, body)
    (hits,) = answer["result"]
    parts = [hit["document"]["contents"].partition("\n") for hit in hits]
    found = "\n".join(f"Doc {n} (Title: {title}) {text}" for n, (title, _, text) in enumerate(parts, 1))
    return found or "Nothing was found."


def em(completions, answer, **columns) -> list[float]:
    """1 if the last <answer> is one of the answers, without case, articles and punctuation; 0 without an <answer>."""
    scores = squad_em(completions, answer)
    return [score * (tagged(completion_text(c)) is not None) for score, c in zip(scores, completions, strict=True)]


em.per_trajectory = True
