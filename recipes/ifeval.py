"""RLVR-IFEval's columns: `messages`, a chat, and `ground_truth`: JSON with `func_name`, its arguments, and nulls.

`follows`, the reward, checks the constraints of AllenAI's open-instruct, by its names; language:response_language is
left out. Those of IFEval, by other names: scoring/instructions.py.
"""

import json
import re

from published import published

from scoring.instructions import has_title, is_json, placeholders
from scoring.text import completion_text


def rows(split: str = "train", seed: int = 42, source: str | None = None) -> list[dict]:
    found = [row for row in published("allenai/RLVR-IFeval", split, source, test=None)]
    kept = [row for row in found if json.loads(row["ground_truth"])["func_name"] in CHECKS]
    print(f"RLVR-IFEval: {len(found) - len(kept)} of {len(found)} rows are left out: they are not checked here")
    return [{"prompt": row["messages"], "ground_truth": row["ground_truth"]} for row in kept]


words = lambda text: re.findall(r"\b\w+\b", text.lower())  # noqa: E731


def about(count: int, N: int, quantifier: str, near: int | None = None) -> bool:
    near = max(round(N * 0.1), 1) if near is None else near
    return {"at least": count >= N, "at most": count <= N, "around": abs(count - N) <= near}.get(quantifier, False)


def parts(text: str, mark: str) -> list[str]:
    return [part.strip() for part in text.strip().split(mark)]


def after(text: str, mark: str) -> str:
    return text.partition(mark)[2].strip()


SENTENCE = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=\.|\?|!)\s")
CHECKS = {
    "verify_keywords": lambda text, keyword_list: all(word.lower() in text.lower() for word in keyword_list),
    "verify_keyword_frequency": lambda text, word, N: words(text).count(word.lower()) == N,
    "validate_forbidden_words": lambda text, forbidden_words: (
        not any(word.lower() in text.lower() for word in forbidden_words)
    ),
    "verify_letter_frequency": lambda text, letter, N: text.count(letter) == N,
    "verify_paragraph_count": lambda text, N: len(parts(text, "* * *")) == N and all(parts(text, "* * *")),
    "validate_word_constraint": lambda text, N, quantifier: about(len(text.split()), N, quantifier),
    "verify_sentence_constraint": lambda text, N, quantifier: about(len(SENTENCE.split(text)), N, quantifier, 1),
    "validate_paragraphs": lambda text, N, first_word, i: (
        len(found := text.split("\n\n")) == N and 0 < i <= N and found[i - 1].strip().startswith(first_word)
    ),
    "verify_postscript": lambda text, postscript_marker: bool(after(text, postscript_marker)),
    "validate_placeholders": lambda text, N: placeholders(text) >= N,
    "verify_bullet_points": lambda text, N: sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N,
    "validate_title": has_title,
    "validate_choice": lambda text, options: any(option in text for option in options),
    "validate_highlighted_sections": lambda text, N: len(re.findall(r"\*[^\n*]*\*", text)) >= N,
    "validate_sections": lambda text, N, section_splitter: (
        len(re.findall(rf"{re.escape(section_splitter)}\s?\d+", text, re.I)) >= N
    ),
    "validate_json_format": is_json,
    "validate_repeat_prompt": lambda text, original_prompt: text.startswith(original_prompt),
    "validate_two_responses": lambda text: text.count("******") == 1 and len(set(parts(text, "******"))) == 2,
    "validate_uppercase": lambda text: text == text.upper(),
    "validate_lowercase": lambda text: text == text.lower(),
    "validate_frequency_capital_words": lambda text, N, quantifier: about(
        len(re.findall(r"\b[A-Z]+\b", text)), N, quantifier
    ),
    "validate_end": lambda text, end_phrase: text.endswith(end_phrase),
    "validate_quotation": lambda text: text.startswith('"') and text.endswith('"'),
    "validate_no_commas": lambda text: "," not in text,
}


def follows(completions, ground_truth, **columns) -> list[float | None]:
    """1 if the text, after any </think>, keeps the row's constraint. An empty one keeps none."""
    scores = []
    for completion, truth in zip(completions, ground_truth, strict=True):
        if truth is None:
            scores.append(None)
            continue
        given = {key: value for key, value in json.loads(truth).items() if value is not None}
        text = completion_text(completion).rpartition("</think>")[2].strip()
        scores.append(float(bool(text) and CHECKS[given.pop("func_name")](text, **given)))
    return scores


follows.per_trajectory = True
