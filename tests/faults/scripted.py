"""train_grpo.py whose in-process sampler says given texts: for faults that lie in what a model writes.

usage: scripted.py TURNS.json ARGUMENTS OF train_grpo.py        (TURNS.json: the texts, the last one is repeated)
"""

import dataclasses
import json
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
import utils  # noqa: E402
from hf_generator import HFGenerator  # noqa: E402

turns = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
generate, said = HFGenerator.generate, set()


async def say(self, prompt_ids, *, max_tokens, n=1, **options):
    """A turn's number is that of the turns said before it in the same conversation."""
    images = options.get("expanded")
    seen = images.token_ids if images else prompt_ids
    if marks := sum(token in self.never for token in seen):
        print(f"scripted: {marks} image placeholders among {len(seen)} tokens of the prompt", flush=True)
    # The model is asked for the form of an answer only, so the prompt's end will do.
    samples = await generate(self, prompt_ids[-64:], max_tokens=1, n=n, **options)
    text = turns[min(sum(tuple(prompt_ids[: len(one)]) == one for one in said), len(turns) - 1)]
    tokenizer = getattr(self.tokenizer, "tokenizer", self.tokenizer)
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    said.add((*prompt_ids, *ids[:max_tokens]))
    what = dict(prompt_ids=list(seen), token_ids=ids[:max_tokens], logprobs=[-1.0] * len(ids[:max_tokens]))
    what["finish_reason"] = "stop" if len(ids) <= max_tokens else "length"
    return [dataclasses.replace(sample, **what) for sample in samples]


HFGenerator.generate = say
utils.window_of = lambda config: None  # what is said may be longer
sys.argv = [str(ROOT / "train_grpo.py"), *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
