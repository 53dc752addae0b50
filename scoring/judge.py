"""A model as judge: `--reward_funcs judge --judge_url http://host:8000/v1 --judge_model NAME`.

Any OpenAI-compatible server will do. It is sent the token JUDGE_TOKEN, if there is one; the policy's own server, where
--judge_url has the address of one of --server_urls, its own token. That one goes nowhere else.
A judge that does not answer, or whose answer holds no score, is asked again; after ATTEMPTS the reward does not apply.
"""

import re
import string
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from safety import credentials
from scoring.text import completion_text

ATTEMPTS, WAIT = 3, 1.0  # seconds before the second attempt; twice as long before the next
TEMPLATE = """Judge an answer.

Question: {prompt}
Reference: {answer}
Answer: {completion}

Is the answer right? Explain in a sentence, then end with a line "Score: N", N from 0 (wrong) to 10 (right)."""
SCORE = re.compile(r"Score: *(\d+(?:\.\d+)?)", re.IGNORECASE)


def judge(completions, prompts, cfg, **columns) -> list[dict | None]:
    """The judge's score of every completion, 0 to 1; None where there is none after ATTEMPTS. The template is
    cfg.judge_template's file or TEMPLATE; it may name every column of the data set in braces ({{ and }}: braces)."""
    template = Path(cfg.judge_template).read_text(encoding="utf-8") if cfg.judge_template else TEMPLATE
    rows = []
    for index, (completion, prompt) in enumerate(zip(completions, prompts, strict=True)):
        text = prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)
        row = {"answer": "", **{name: values[index] for name, values in columns.items() if isinstance(values, list)}}
        rows.append(fill_in(template, row | {"prompt": text, "completion": completion_text(completion)}))
    with ThreadPoolExecutor(max(len(rows), 1)) as pool:
        return list(pool.map(lambda question: ask(question, cfg), rows))


def fill_in(template: str, row: dict) -> str:
    """The template with {name} replaced by row["name"], as it is: braces in a value mean nothing. Unlike str.format it
    knows names alone, as {prompt.__class__} or {completion:>99999999} would do more than the data's owner expects."""
    parts = []
    try:
        for text, name, form, conversion in string.Formatter().parse(template):
            parts.append(text)
            if name is not None:
                if form or conversion or name not in row:
                    raise ValueError(f"{{{name}}} is not one of its columns")
                parts.append(str(row[name]))
    except ValueError as error:
        raise ValueError(
            f"the judge's template: {error}; in braces stand {', '.join(row)}. Write {{{{ and }}}} for braces."
        ) from None
    return "".join(parts)


def token_for(url: str, cfg) -> str | None:
    """The token to send to a judge at `url`."""
    if token := credentials.read("JUDGE_TOKEN"):
        return token
    if cfg.generator == "vllm" and place_of(url) in map(place_of, cfg.server_urls):
        return credentials.read("VLLM_SERVER_TOKEN", cfg.server_token) or None
    return None


def place_of(url: str) -> tuple:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def ask(question: str, cfg) -> dict | None:
    import requests

    token = token_for(cfg.judge_url, cfg)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    body = {"model": cfg.judge_model, "messages": [{"role": "user", "content": question}], "max_tokens": 500}
    for attempt in range(ATTEMPTS):
        time.sleep(attempt and WAIT * 2 ** (attempt - 1))
        try:
            answer = requests.post(
                f"{cfg.judge_url}/chat/completions", json=body, headers=headers, timeout=cfg.reward_timeout
            )
            answer.raise_for_status()
            found = SCORE.findall(answer.json()["choices"][0]["message"]["content"])
        except (requests.RequestException, ValueError, KeyError, IndexError, TypeError, RecursionError):
            continue
        if found:
            return {"reward": min(float(found[-1]) / 10, 1.0), "attempts": attempt + 1}
    return None
