"""RLVR-IFEval's columns: `messages`, a chat, and `ground_truth`: JSON with `func_name`, its arguments, and nulls."""

import json

from published import published

from scoring.constraints import CHECKS


def rows(split: str = "train", seed: int = 42, source: str | None = None) -> list[dict]:
    found = [row for row in published("allenai/RLVR-IFeval", split, source, test=None)]
    kept = [row for row in found if json.loads(row["ground_truth"])["func_name"] in CHECKS]
    print(f"RLVR-IFEval: {len(found) - len(kept)} of {len(found)} rows are left out: they are not checked here")
    return [{"prompt": row["messages"], "ground_truth": row["ground_truth"]} for row in kept]
