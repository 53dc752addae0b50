"""Small python functions, judged by tests that the model does not see, run in the sandbox (safety/sandbox.py).

    python examples/run.py coding      # three seeds beside a live server

The reward is the share of a row's tests that pass; `eval/pass@k` counts rows of which all do. With `--tools python` the
model may try its program before it answers.
"""

import random

TASKS = [  # what to say of {a} and {b}, and what is right
    ("x plus {a}", lambda x, a, b: x + a),
    ("{a} times x", lambda x, a, b: a * x),
    ("x minus {a}", lambda x, a, b: x - a),
    ("{a} times x, plus {b}", lambda x, a, b: a * x + b),
    ("the square of x, minus {a}", lambda x, a, b: x * x - a),
    ("the remainder of x divided by {a}", lambda x, a, b: x % a),
    ("the larger of x and {a}", lambda x, a, b: max(x, a)),
    ("True if x is larger than {a}, else False", lambda x, a, b: x > a),
    ("a list of x and {a}", lambda x, a, b: [x, a]),
    ("the distance between x and {a}", lambda x, a, b: abs(x - a)),
]


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r}: coding has 'train' and 'test'.")
    chance, made = random.Random(f"coding {split} {seed}"), []
    for number in range(1000 if split == "train" else 60):
        said, right = TASKS[number % len(TASKS)]
        a = 2 * chance.randint(2, 40) + (split == "test")  # odd numbers are held out
        b = chance.randint(2, 40)
        inputs = [chance.randint(-9, 9), a, a + chance.randint(1, 50)]
        text = f"Write a Python function f(x) that returns {said.format(a=a, b=b)}. Answer with the code alone."
        tests = [f"assert f({x}) == {right(x, a, b)!r}" for x in inputs]
        made.append({"prompt": [{"role": "user", "content": text}], "tests": tests})
    return made
