"""Two-digit sums (sums.py) without a reward: the policy is its own teacher, which is shown the answer.

The column `hint` has the question behind two turns in which it is answered. There the policy says, for each token that
it wrote without them, which ones it would find likeliest, and learns those (--teacher_prompt hint --distill_topk 20).
Rewards are only looked at: their weight is 0.

Tried for 20 steps of 4 prompts, one seed: the distance fell from .76 to .11 nats a token, and the form of an answer was
learned by step 5, from 11.6 tokens to 3; of 60 held-out sums 0 were right before, 3 after. How to add it was not told.

    python train_grpo.py --config examples/self_taught.yaml --generator hf
"""

import sums


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    return [row | {"hint": hint(row)} for row in sums.rows(split, seed)]


def hint(row: dict) -> list[dict]:
    """The question, behind the same question answered twice: so shown, the model as it is writes the answer again."""
    answered = [row["prompt"][0], {"role": "assistant", "content": row["answer"]}]
    return [*answered, *answered, row["prompt"][0]]
