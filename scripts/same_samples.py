"""A train script with a generator whose completions depend on nothing but the prompt, its place and the step. Started
by check.py: what two such runs compute from them can be compared, however many ranks and micro-batches they have.

    python scripts/same_samples.py SCRIPT.py --generator hf [flags of the script]
"""

import random
import runpy
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import hf_generator  # noqa: E402
from inputs.trajectory import Completion  # noqa: E402


class SameSamples(hf_generator.HFGenerator):
    """Tokens at random, of every length; that the policy would hardly choose them does not matter here."""

    moment, asked = 0, Counter()  # steps and evaluations so far, samples of each prompt in this one

    def seed(self, seed: int) -> None:  # which is another one on each rank
        self.moment, self.asked = self.moment + 1, Counter()

    async def generate(self, prompt_ids, *, max_tokens, n=1, expanded=None, **options) -> list[Completion]:
        prompt_ids, vocabulary = expanded.token_ids if expanded else prompt_ids, self.model.config.vocab_size
        allowed = sorted({*range(vocabulary)} - {*self.never} - self.eos_ids)
        completions = []
        for _ in range(n):
            place = self.asked[tuple(prompt_ids)]
            self.asked[tuple(prompt_ids)] += 1
            draw = random.Random(f"{prompt_ids} {place} {self.moment}")
            tokens = draw.choices(allowed, k=draw.randint(1, max_tokens))
            reason = "length" if len(tokens) == max_tokens else "stop"
            completions.append(Completion(tokens, [-4.0] * len(tokens), reason, self.version, prompt_ids))
        return completions


hf_generator.HFGenerator = SameSamples

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
