"""Does my edit still learn? Ten seconds on a laptop, no GPU, no server.

    python scripts/check.py                                            # train_grpo.py as it is
    python scripts/check.py my_grpo.py --advantage best_of_group       # your copy; flags go to the script
    python scripts/check.py train_ppo.py

Runs the real script on a toy: a random model of 0.8 M parameters earns reward for tokens whose number ends in 0
(benchmarks/toy.py). By chance it gets about 0.14, at most 0.95. The exit status is 0 if the reward of the last steps is
above 0.5: the edit runs and the gradient points the right way. It says nothing about a real task, nor
where the reward cannot rise (a win rate within the group). To keep the metrics: --output_dir runs --run_name NAME.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runlog.reading import read_metrics  # noqa: E402

LEARNED = 0.5
FLAGS = (
    "--generator hf --compute_dtype float32 --max_completion_length 4 --max_prompt_length 64 "
    "--prompts_per_step 4 --num_generations 16 --max_steps 20 --learning_rate 1e-2 --seed 0 "
    "--print_samples_every 0 --no-log_completions"
).split()
CRITIC = "--critic_learning_rate 1e-3 --critic_iterations 4 --num_minibatches 2".split()


def main(script: str, *flags: str) -> int:
    model = ROOT / "models" / "tiny"
    if not model.exists():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "make_models.py"), "tiny", str(model)], check=True)
    toy = ROOT / "benchmarks" / "toy.py"
    task = ["--model_id", str(model), "--dataset_id", f"{toy}:rows", "--reward_funcs", f"{toy}:tens"]
    critic = CRITIC if "critic_learning_rate" in Path(script).read_text() else []
    given = dict(zip(flags, flags[1:], strict=False))
    with tempfile.TemporaryDirectory() as temporary:
        folder, name = given.get("--output_dir", temporary), given.get("--run_name", "check")
        run = ["--output_dir", folder, "--run_name", name]
        # One thread: the model is small, and more threads wait for each other longer than they compute.
        command = [sys.executable, script, *task, *FLAGS, *critic, *run, *flags]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        rewards = [line["reward"] for line in read_metrics(Path(folder) / name) if "reward" in line]
    if done.returncode or not rewards:
        print(f"check: {script} ended with status {done.returncode} after {len(rewards)} steps", file=sys.stderr)
        return done.returncode or 1
    last = sum(rewards[-3:]) / len(rewards[-3:])
    print(f"reward {rewards[0]:.2f} -> {last:.2f} in {len(rewards)} steps: ", end="")
    print("it learns" if last > LEARNED else f"it does not learn (above {LEARNED} expected)")
    return 0 if last > LEARNED else 1


if __name__ == "__main__":
    arguments = sys.argv[1:]
    has_script = bool(arguments) and not arguments[0].startswith("--")
    sys.exit(main(*arguments) if has_script else main(str(ROOT / "train_grpo.py"), *arguments))
