"""Text of a model cannot end a run or hold it up: no reward that reads it raises or takes long, whatever it says."""

import time

import pytest
from test_scoring import FOLLOWED

from inputs.formats import FORMATS, read_calls
from rewards import REWARDS, get_reward_function
from scoring.instructions import INSTRUCTIONS

COLUMNS = {  # one row for every reward that reads text; it is what the row's owner wrote, so it is in order
    "math": {"answer": "3"},
    "last_number": {"answer": "3"},
    "exact_match": {"answer": ["three", "3"]},
    "multiple_choice": {"answer": "B"},
    "squad_em": {"answer": "the answer"},
    "squad_f1": {"answer": ["the answer", "3"]},
    "format": {},
    "reasoning_gym": {"answer": "3", "metadata": {"source_dataset": "chain_sum"}, "question": "1 + 2 ="},
    "instructions": {"instruction_id_list": list(INSTRUCTIONS), "kwargs": [FOLLOWED[n][0] for n in INSTRUCTIONS]},
}
OTHERS = {  # not over text, or not of the text alone, or tested where the other side is
    "code_tests", "repetition", "overlong", "length", "reward_model", "judge", "environment", "tool_use", "few_turns",
    "zero",
}  # fmt: skip
IN_PROCESSES = ("math", "reasoning_gym")  # other people's parsers, with time limits: test_calls.py
SIZE = 30_000
REPEATED = [*" \n*[<(-.,`#$\\{0a", "- ", "*a ", ".1", "1,", "<think>", "</answer>", "```python\n", '{"a":']
REPEATED += ["\\frac{1}{", "9" * 5000, "1e999", "\u0300\u0327", "\ud800", "\0", "\U0001f600", "Section 1 "]


def scored(name: str, text: str):
    columns = {key: [value] for key, value in COLUMNS[name].items()}
    return get_reward_function(name)(completions=[text], prompts=["q"], **columns)


def test_every_reward_is_looked_at():
    assert COLUMNS.keys() | OTHERS == REWARDS.keys() and not COLUMNS.keys() & OTHERS


def hostile(piece: str):
    many = (piece * (SIZE // len(piece) + 1))[:SIZE]
    yield from (many, f"x{many}x", f"<<{many}", f"[{many}", "{" + many + "x}", f"```{many}", f"1{many}2")
    yield f"<think>x</think>{many}<answer>1</answer>{many}x"


@pytest.mark.parametrize("name", sorted(COLUMNS.keys() - set(IN_PROCESSES)))
def test_any_text_has_a_score_in_linear_time(name):
    """30 kB of what makes a regular expression or a parser slow. Plain python does each in less than .2 s here."""
    for piece in REPEATED:
        for text in hostile(piece):
            start = time.process_time()
            (score,) = scored(name, text)
            assert score is not None and time.process_time() - start < 1, (name, text[:20])


CALLS = [
    *("to=functions.", "to=functions.a", "to=functions.a ", "to=functions.a<|message|>", "<|message|>", "<|end|>"),
    *("<function=", "<function=a", "<function=a>", "<parameter=", "<parameter=a", "<parameter=a>", "</parameter>"),
    *("<tool_call>", '<tool_call>{"name": "a", "arguments": {', "<a>", "<a", "</a>", "[", "{", "9"),
]


@pytest.mark.parametrize("parser", FORMATS)
def test_calls_are_read_in_linear_time(parser):
    """On the event loop of all trajectories: nothing limits it from outside."""
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schemas = [{"type": "function", "function": {"name": "a", "description": "", "parameters": parameters}}]
    for piece in CALLS:
        for start in ("", "<function=a>", "<function=a><parameter=a>", "to=functions.a", "<a>"):
            text = start + piece * (SIZE // len(piece))
            begun = time.process_time()
            read_calls(text, schemas, parser)
            assert time.process_time() - begun < 1, (start, piece)
