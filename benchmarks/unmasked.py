"""train_grpo.py with the observation mask switched off: what tools answer is trained on as if the model had said it.

    bash scripts/serve_and_train.sh NAME MODEL 512 benchmarks/unmasked.py --correction none --logprob_diff_limit 99 ...

A mistake one can make, kept here to show what it does. The first step of a run would stop it (--logprob_diff_limit: no
sampler ever gave those tokens a probability), and --correction would give most of them no weight: hence the flags.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import rollouts  # noqa: E402

masked = rollouts.ROLLOUTS["multi_turn"]


async def unmasked(rows, generator, cfg):
    trajectories = await masked(rows, generator, cfg)
    for trajectory in trajectories:
        trajectory.loss_mask = [1] * len(trajectory.loss_mask)
    return trajectories


rollouts.ROLLOUTS["multi_turn"] = unmasked
sys.argv[0] = str(ROOT / "train_grpo.py")
runpy.run_path(sys.argv[0], run_name="__main__")
