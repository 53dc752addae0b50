"""Presets against each other at equal numbers of sampled tokens, over several seeds.

    python benchmarks/presets.py                       # 9 presets x 5 seeds, 6 to 14 minutes on two cores
    python benchmarks/presets.py --presets grpo dapo --seeds 0 1

The task is a toy (benchmarks/toy.py): a random model of .8 M parameters is rewarded for tokens whose number ends in 0;
by chance it gets .14, at most .95. Everything but the preset's own settings is equal: 64 completions a step, 30 steps,
AdamW at 1e-2, two optimizer updates a step where the preset allows it. It tells whether an implementation learns and
how evenly; which preset suits a real task it does not tell.

The table goes to the terminal; docs/results.md has the last one.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from orphans import ends_with_us  # noqa: E402

from runfiles.reading import read_metrics  # noqa: E402

STEPS = 30
EQUAL = 3072  # tokens at which rewards are compared: 12 steps without resampling
PRESETS = {  # flags on top of the preset's
    "grpo": "--num_minibatches 2",
    "dr_grpo": "--num_minibatches 2",
    "rloo": "--num_minibatches 2",
    "reinforce_plus_plus": "--num_minibatches 2",
    "remax": "--num_minibatches 2",
    "dapo": "--num_minibatches 2",
    "gspo": "--num_minibatches 2 --epsilon 0.2 --epsilon_high 0.2",  # 3e-4 is for thousands of tokens
    "cispo": "--num_minibatches 2",
    "ppo": "--num_minibatches 2 --critic_learning_rate 1e-3 --critic_iterations 4",
}
T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # Student's t, two-sided


def run(preset: str, seed: int, folder: Path) -> dict:
    """One training: held-out reward before and after, tokens sampled until the training reward is above .5 (all, if it
    never is), and the reward of the last step within EQUAL tokens. Those of groups that --dynamic_sampling threw away
    count."""
    name = f"{preset}-{seed}"
    prompts = (
        "--prompts_per_step 64 --num_generations 1" if preset == "ppo" else "--prompts_per_step 4 --num_generations 16"
    )
    flags = "--model_id models/tiny --generator hf --compute_dtype float32 --dataset_id benchmarks/toy.py:rows "
    flags += (
        f"--reward_funcs benchmarks/toy.py:tens --max_completion_length 4 --max_steps {STEPS} --learning_rate 1e-2 "
    )
    flags += f"--eval_steps {STEPS} --print_samples_every 0 --no-log_completions --seed {seed} --preset {preset} "
    flags += f"--output_dir {folder} --run_name {name} {prompts} {PRESETS[preset]}"
    script = "train_ppo.py" if preset == "ppo" else "train_grpo.py"
    how = dict(cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=900, preexec_fn=ends_with_us())
    done = subprocess.run([sys.executable, script, *flags.split()], capture_output=True, encoding="utf-8", **how)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
    lines = read_metrics(folder / name)
    evals = [line["eval/reward"] for line in lines if "eval/reward" in line]
    print(f"{name}: {evals[0]:.2f} -> {evals[-1]:.2f}", flush=True)
    group, greedy, tokens = 1 if preset == "ppo" else 16, 4 if preset == "remax" else 0, 0
    found = dict(preset=preset, before=evals[0], after=evals[-1])
    for step in (line for line in lines if "reward" in line):
        completions = 64 + greedy + group * step.get("dynamic_sampling/resampled", 0)
        tokens += completions * step["completions/mean_length"]
        if step["reward"] > 0.5:
            found.setdefault("half", tokens)
        if tokens <= EQUAL:
            found["equal"] = step["reward"]
    return {"half": tokens} | found


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.mean(values), T95.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))


def table(runs: list[dict]) -> str:
    rows = [
        f"| preset | seeds | tokens to reward .5 | reward at {EQUAL:,} tokens | held out, before -> after all steps |",
        "|---|---|---|---|---|",
    ]
    for preset in dict.fromkeys(r["preset"] for r in runs):
        mine = [r for r in runs if r["preset"] == preset]
        half, equal = interval([r["half"] for r in mine]), interval([r["equal"] for r in mine])
        before, after = statistics.mean(r["before"] for r in mine), interval([r["after"] for r in mine])
        cells = [f"`{preset}`", f"{len(mine)}", f"{half[0]:,.0f} ± {half[1]:,.0f}", f"{equal[0]:.2f} ± {equal[1]:.2f}"]
        rows.append(f"| {' | '.join(cells)} | {before:.2f} -> {after[0]:.3f} ± {after[1]:.3f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    args = parser.parse_args()
    subprocess.run([sys.executable, "scripts/make_models.py", "tiny", "models/tiny"], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:  # one thread each
        runs = list(pool.map(lambda job: run(*job, Path(folder)), [(p, s) for p in args.presets for s in args.seeds]))
    print(table(runs))


if __name__ == "__main__":
    main()
