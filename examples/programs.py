"""Questions that a short program answers and a small model does not, with a python interpreter at hand.

python examples/run.py programs      # a warm start - how a call is written - and three seeds

The programs run in the sandbox (docs/sandbox.md). The reward is 1 if the last number of the last turn is the answer.
"""

import json
import random

KINDS = {  # question, and the expression that answers it
    "How many whole numbers from {a} to {b} can be divided by {k}?": "sum(n % {k} == 0 for n in range({a}, {b} + 1))",
    "What is the sum of the squares of {a} to {b}?": "sum(n * n for n in range({a}, {b} + 1))",
    "What do the digits of {b} to the power {k} add up to?": "sum(map(int, str({b} ** {k})))",
}


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: the programs have 'train' and 'test'.")
    chance, made = random.Random(f"programs {split} {seed}"), []
    while len(made) < (2000 if split == "train" else 100):
        question, expression = chance.choice(list(KINDS.items()))
        a, b, k = chance.randint(10, 999), chance.randint(1000, 9999), chance.randint(3, 19)
        if (b % 10 == k % 10) != (split == "test"):  # whatever the seeds, no question is in both
            continue
        expression = expression.format(a=a, b=b, k=k)
        prompt = [{"role": "user", "content": question.format(a=a, b=b, k=k)}]
        made.append({"prompt": prompt, "program": f"print({expression})", "answer": str(eval(expression))})
    return made


def demonstrate(row: dict, environment, answers: list) -> str:
    """One who hardly ever writes a program: nine answers in ten are guessed, and three programs in ten have a slip."""
    if answers:
        return f"The answer is {answers[-1][0]['content'].strip()}."
    if random.random() < 0.9:
        return f"The answer is {random.randint(1, 2000)}."
    program = row["program"]
    if random.random() < 0.3:
        program = program.replace(random.choice("123456789"), random.choice("123456789"))
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': program}})}</tool_call>"
