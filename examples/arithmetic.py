"""Sums and products of three-digit numbers, which a small model cannot do in its head, with a calculator at hand.

python examples/run.py arithmetic      # a warm start - how a call is written - and three seeds beside a live server
"""

import random

from rewards import completion_text, numbers

OPERATIONS = {"+": "plus", "-": "minus", "*": "times"}


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: arithmetic has 'train' and 'test'.")
    chance = random.Random(f"arithmetic {split} {seed}")
    made = []
    for _ in range(2000 if split == "train" else 100):
        a, b, sign = chance.randint(100, 999), chance.randint(100, 999), chance.choice(list(OPERATIONS))
        answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
        prompt = [{"role": "user", "content": f"What is {a} {OPERATIONS[sign]} {b}?"}]
        made.append({"prompt": prompt, "expression": f"{a} {sign} {b}", "answer": str(answer)})
    return made


def right(completions, answer, **columns) -> list[float]:
    """1 if the last number of the last turn is the answer."""
    found = [numbers(completion_text(completion[-1:])) for completion in completions]
    return [float(bool(f) and f[-1] == int(a)) for f, a in zip(found, answer, strict=True)]


def demonstrate(row: dict, environment, answers: list) -> str:
    """One who hardly knows the calculator: nine answers in ten are guessed, and three calls in ten have a slip."""
    if answers:
        return f"The answer is {answers[-1][0]['content']}."
    if random.random() < 0.9:
        return f"The answer is {random.randint(-800, 2000)}."
    expression = row["expression"]
    if random.random() < 0.3:
        expression = expression.replace(random.choice("123456789"), random.choice("123456789"))
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'
