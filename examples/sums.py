"""Two-digit sums: a, b in 10..59. SmolLM2-135M-Instruct answers about 4 % of them; after 30 steps most.

60 pairs {a, b}, a < b, are held out in both orders: split "test" asks each of them once, split "train" has all 2,380
other ordered pairs. `seed` draws them, so train and test must be given the same one (the train script does).

    bash scripts/demo.sh                                                 # with a server
    python train_grpo.py --config examples/sums.yaml --generator hf      # without; models/ is scripts/make_models.py's
"""

import itertools
import random


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    rng = random.Random(seed)
    unordered = list(itertools.combinations(range(10, 60), 2))  # a < b: 1,225
    rng.shuffle(unordered)
    held_out = [pair if rng.random() < 0.5 else pair[::-1] for pair in unordered[:60]]
    if split == "test":
        pairs = held_out
    elif split == "train":
        banned = {*held_out, *(pair[::-1] for pair in held_out)}
        pairs = [pair for pair in itertools.product(range(10, 60), repeat=2) if pair not in banned]
    else:
        raise ValueError(f"split {split!r}: the sums have 'train' and 'test'.")
    return [{"prompt": [message(a, b)], "answer": str(a + b)} for a, b in pairs]


def message(a: int, b: int) -> dict:
    return {"role": "user", "content": f"What is {a} + {b}? Answer with just the number."}
