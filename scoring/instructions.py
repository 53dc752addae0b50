"""Instructions that code can check: two dozen of IFEval's (2311.07911), with its names and arguments.

    --reward_funcs instructions, with two columns, as in IFEval's data:
    "instruction_id_list": ["length_constraints:number_words", "punctuation:no_comma"],
    "kwargs": [{"num_words": 50, "relation": "at least"}, {}]

The reward is the share of the row's instructions that the text follows; each is logged by name. To add one, write a
function (text, **arguments) -> bool and enter it in INSTRUCTIONS. IFEval's language:response_language is not checked
and does not count; the reward does not apply to a row that asks for nothing else.
"""

import json
import re
from collections.abc import Callable

from scoring.text import answer_part, completion_text


def compare(count: int, threshold: int, relation: str | None = "at least") -> bool:
    relations = {"at least": count >= threshold, "less than": count < threshold, None: count >= threshold}
    if relation not in relations:
        raise ValueError(f"relation {relation!r}: use IFEval's 'at least' or 'less than'")
    return relations[relation]


def words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['\u2019-]\w+)*", text)


def count_of(word: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def paragraphs(text: str, mark: str) -> list[str]:
    return [part.strip() for part in re.split(mark, text) if part.strip()]


def nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = paragraphs(text, r"\n\n")
    begins = nth_paragraph <= len(parts) and words(parts[nth_paragraph - 1].lower())[:1] == [first_word.lower()]
    return len(parts) == num_paragraphs and begins


def is_json(text: str) -> bool:
    """JSON, in a fence or not. Numbers may have any length. Nesting too deep for Python's parser does not count as
    JSON."""
    text = text.strip()
    if text[:3] == "```":
        text = text[7:] if text[:7].lower() == "```json" else text[3:]
    try:
        json.loads(text.removesuffix("```"), parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return False
    return True


# The regular expressions below read untrusted text. Each looks at a character a bounded number of times, or 100,000
# brackets or spaces would take minutes. So no two adjacent parts may match the same text.


def bullets(text: str) -> int:
    return sum(bool(re.match(r"\s*[-*]\s+\S", line)) for line in text.split("\n"))


def has_title(text: str) -> bool:
    return any(part.strip() for part in re.findall(r"<<([^\n<>]*)>>", text))


def placeholders(text: str) -> int:
    """Number of [something]; a closing bracket belongs to the first bracket that opens after the previous closing
    one."""
    return sum(0 <= part.find("[") < len(part) - 1 for part in text.split("]")[:-1])


def two_responses(text: str) -> bool:
    parts = paragraphs(text, r"\*{6}")
    return len(parts) == 2 and parts[0] != parts[1]


INSTRUCTIONS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(count_of(word, text) for word in keywords),
    "keywords:forbidden_words": lambda text, forbidden_words: not any(count_of(w, text) for w in forbidden_words),
    "keywords:frequency": lambda text, keyword, frequency, relation: compare(
        count_of(keyword, text), frequency, relation
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: compare(
        text.lower().count(letter.lower()), let_frequency, let_relation
    ),
    "length_constraints:number_words": lambda text, num_words, relation: compare(len(words(text)), num_words, relation),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: compare(
        len(re.findall(r"[^.!?\s][^.!?]*(?:[.!?]+|$)", text)), num_sentences, relation
    ),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs: (
        len(paragraphs(text, r"\s?\*\*\*\s?")) == num_paragraphs
    ),
    "length_constraints:nth_paragraph_first_word": nth_paragraph,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: bullets(text) == num_bullets,
    "detectable_format:number_highlighted_sections": lambda text, num_highlights: (
        len(re.findall(r"\*\*[^\n*]+\*\*|(?<!\*)\*[^\n*]+\*(?!\*)", text)) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:title": has_title,
    "detectable_format:json_format": is_json,
    "detectable_format:constrained_response": lambda text: any(
        f"My answer is {word}." in text for word in ("yes", "no", "maybe")
    ),
    "detectable_content:postscript": lambda text, postscript_marker: postscript_marker.lower() in text.lower(),
    "detectable_content:number_placeholders": lambda text, num_placeholders: placeholders(text) >= num_placeholders,
    "startend:end_checker": lambda text, end_phrase: text.strip(' "').lower().endswith(end_phrase.strip().lower()),
    "startend:quotation": lambda text: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
    "change_case:english_lowercase": str.islower,
    "change_case:english_capital": str.isupper,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: compare(
        sum(word.isupper() for word in words(text)), capital_frequency, capital_relation
    ),
    "punctuation:no_comma": lambda text: "," not in text,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "combination:two_responses": two_responses,
}

UNCHECKED = {"language:response_language"}


def instructions(completions, instruction_id_list, kwargs, **columns) -> list[dict | None]:
    """Share of the row's instructions that the completion (after the last </think>) follows, and 0 or 1 for each. None
    if the row has none that can be checked."""
    scores = []
    for completion, names, arguments in zip(completions, instruction_id_list, kwargs, strict=True):
        text, results = answer_part(completion_text(completion)), []
        names, arguments = names or [], arguments or []
        if len(names) != len(arguments):
            raise ValueError(f"instruction_id_list has {len(names)} names, kwargs {len(arguments)}: one dict per name")
        for name, values in zip(names, arguments, strict=True):
            if name in UNCHECKED:
                continue
            if name not in INSTRUCTIONS:
                raise ValueError(f"no instruction {name!r}; there are {', '.join(INSTRUCTIONS)}")
            # Parquet gives each dict the keys of all others, with None.
            options = {key: value for key, value in (values or {}).items() if value is not None}
            try:
                results.append((name, float(bool(text.strip()) and INSTRUCTIONS[name](text, **options))))
            except TypeError as error:
                raise ValueError(f"instruction {name} with {options}: {error}") from None
        # An instruction may be given several times, with other arguments: it counts if all of them are followed.
        by_name = {name: min(value for key, value in results if key == name) for name, _ in results}
        scores.append(by_name | {"reward": sum(value for _, value in results) / len(results)} if results else None)
    return scores


instructions.per_trajectory = True
