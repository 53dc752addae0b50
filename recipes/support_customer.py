"""Teaches a small model to play the customer of support_agent.py, where no large one is at hand: to say what is on its
card, one thing after the other, whatever the desk says. Supervised, before any reinforcement learning:

    python scripts/warm_start.py --run_name customer --model_id models/SmolLM2-135M-Instruct \\
        --dataset_id recipes/support_customer.py:rows --env recipes/support_customer.py:Questions \\
        --demonstrations recipes/support_customer.py:demonstrate --max_turns 3 --max_prompt_length 256 \\
        --max_completion_length 192 --num_generations 1 --prompts_per_step 8 --max_steps 40
    export USER_TOKEN=choose-a-long-secret          # in both terminals, and where the desk is trained
    VLLM_SERVER_TOKEN=$USER_TOKEN python vllm_server.py --model runs/customer/checkpoints/step_40 \\
        --max-model-len 1024 --port 9000
    PYTHONPATH=. python recipes/support_agent.py http://127.0.0.1:9000/v1 runs/customer/checkpoints/step_40
"""

import random
import re

from support_agent import TOLD
from support_agent import rows as desk_rows

from envs import Environment

ASKED = ["What can I do?", "How can I help?", "Hello, what do you want?", "Tell me more.", "What is it about?"]
ASKED += ["Which order?", "What is the number of your order?", "Goodbye.", "Your order is blue.", "Please wait.", "42"]
NUMBERS = ["It is order {}.", "My order is {}.", "Order {}, please.", "The number is {}.", "It is about order {}."]
BEFORE = ["", "Please. ", "Well. ", "Yes. ", "Hello. "]


def rows(split: str = "train", seed: int = 42) -> list[dict]:
    chance, cards = random.Random(f"customer {split} {seed}"), desk_rows(split, seed)
    for row in cards:
        row["asked"] = chance.choices(ASKED, k=3)
        told = {"role": "system", "content": TOLD.format(" ".join(row["facts"]))}
        row["prompt"] = [told, {"role": "user", "content": row["asked"][0]}]
    return cards


class Questions(Environment):
    """What a desk might say, three times."""

    def reset(self, row, seed):
        self.asked = row["asked"][1:]
        return super().reset(row, seed)

    def step(self, text):
        return (self.asked.pop(0), 0.0, False, {}) if self.asked else ([], 0.0, True, {})


def demonstrate(row: dict, environment, answers: list) -> str:
    """The next fact in words of its own; when all is said, all of it again."""
    facts = row["facts"][len(answers) : len(answers) + 1] or row["facts"]
    said = " ".join(re.sub(r"Order (\d+)\.", lambda found: random.choice(NUMBERS).format(found[1]), f) for f in facts)
    return random.choice(BEFORE) + said
