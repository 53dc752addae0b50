"""A model as judge: `--reward_funcs judge --judge_url http://host:8000/v1 --judge_model NAME`.

Any OpenAI-compatible server works. It is sent the token JUDGE_TOKEN, if there is one.

A judge's answer must not be cut off, and its last line must be `Score: N`, or JSON that ends with `"score": N}`, with N
from 0 to 10. Otherwise the judge is asked once more. If that fails, too, or the server gives no answer within the
reward's time limit (network/http.py), the reward does not apply. `unread` and `unanswered` count these cases, and the
column `judge` of the completions shows the judge's text.
"""

import re
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from inputs.parts import transcript
from network import http, secrets
from safety.results import warn_once
from scoring.text import completion_text

TEMPLATE = """Judge an answer.

Question: {prompt}
Reference: {answer}
Answer: {completion}

Is the answer right? Say why in a sentence. Then end with a line "Score: N", N a number from 0 (wrong) to 10 (right)."""
REMINDER = """

End your reply with a line "Score: N", N a number from 0 to 10, and nothing after it."""
SCORE = re.compile(r'(?:[*_# ]*score|.*"score")[*_ ]*:[*_ ]*([0-9]+(?:\.[0-9]+)?)(?: ?/ ?10)?[*_ .}]*', re.IGNORECASE)

MAX_TOKENS = 4000  # most tokens of an answer, including its thinking
UNSCORED = {"reward": None, "attempts": 1, "unread": 0, "unanswered": 0}
THREADS = ThreadPoolExecutor(256, "judge")  # one thread per open question


def judge(completions, prompts, cfg, log_extra=None, **columns) -> list[dict]:
    """The judge's score of each completion, 0 to 1, as `reward`; None if there is none. The template is
    cfg.judge_template's file, or TEMPLATE; it may name every column of the data set in braces ({{ and }} for
    braces)."""
    # Both before the reward's own limit, at which all completions would count as late.
    deadline, end = (time.monotonic() + share * cfg.reward_timeout for share in (0.8, 0.85))
    template = Path(cfg.judge_template).read_text(encoding="utf-8") if cfg.judge_template else TEMPLATE
    questions = []
    for index, (completion, prompt) in enumerate(zip(completions, prompts, strict=True)):
        text = prompt if isinstance(prompt, str) else transcript(prompt)
        row = {"answer": "", **{name: values[index] for name, values in columns.items() if isinstance(values, list)}}
        questions.append(fill_in(template, row | {"prompt": text, "completion": completion_text(completion)}))
    calls = [THREADS.submit(verdict, question, cfg, deadline) for question in questions]
    wait(calls, max(end - time.monotonic(), 0))
    # A busy server is asked again and again.
    late = (UNSCORED | {"unanswered": 1}, f"(not counted: {http.origin(cfg.judge_url)} gave no answer in time)")
    verdicts = [call.result() if call.done() else late for call in calls]
    if log_extra is not None:
        log_extra("judge", [text for _, text in verdicts])
    return [parts for parts, _ in verdicts]


judge.per_trajectory = True


def fill_in(template: str, row: dict) -> str:
    """The template with {name} replaced by row["name"]; braces within a value are kept as text."""
    try:
        return template.format_map({name: "" if value is None else value for name, value in row.items()})
    except (KeyError, ValueError) as error:
        raise ValueError(f"the judge's template: {error} is not one of the columns, {', '.join(row)}.") from None


def verdict(question: str, cfg, deadline: float) -> tuple[dict, str]:
    """(what the reward function returns for a completion, the judge's answer with a note on what is wrong with it)."""
    for attempt in (1, 2):
        try:
            text, ending = answer_of(question + REMINDER * (attempt - 1), cfg, deadline)
        except http.NoAnswer as error:
            warn_once(f"no score from the judge: {error}", kind="no score from the judge")
            return UNSCORED | {"attempts": attempt, "unanswered": 1}, f"(not counted: {error})"
        if ending in ("stop", None) and (score := read_score(text)) is not None:
            return UNSCORED | {"reward": score / 10, "attempts": attempt}, text
    fault = f"it does not end with `Score: N`, N from 0 to 10, within {MAX_TOKENS} tokens: finish_reason {ending!r:.50}"
    warn_once(f"the judge at {http.origin(cfg.judge_url)} gave an answer that does not count: {fault}", kind="unread")
    return UNSCORED | {"attempts": attempt, "unread": 1}, f"(not counted: {fault}) {text}"


def answer_of(question: str, cfg, deadline: float) -> tuple[str, str | None]:
    """(text, finish_reason). NoAnswer if there is none."""
    body = {"model": cfg.judge_model, "messages": [{"role": "user", "content": question}], "max_tokens": MAX_TOKENS}
    url, seconds = http.route(cfg.judge_url, "/chat/completions"), max(deadline - time.monotonic(), 0)

    def read(answer: dict) -> tuple[str, str | None]:
        choice = answer["choices"][0]
        return choice["message"]["content"] or "", choice.get("finish_reason")

    return http.ask("POST", url, seconds, body, secrets.read("JUDGE_TOKEN"), read=read)


def read_score(text: str) -> float | None:
    """The score, 0 to 10, in the last line of a judge's answer; None if the line has another form."""
    lines = [line for line in map(str.strip, text.rpartition("</think>")[2].split("\n")) if line.strip("`}")]
    match = SCORE.fullmatch(lines[-1]) if lines else None
    return float(match[1]) if match and float(match[1]) <= 10 else None
