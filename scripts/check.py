"""Does my edit still learn, and is it the same on several ranks? Twenty seconds on two cores, no GPU, no server.

    python scripts/check.py                                            # train_grpo.py as it is
    python scripts/check.py my_grpo.py --advantage best_of_group       # your copy; flags go to the script
    python scripts/check.py train_ppo.py
    python scripts/check.py my_grpo.py --dump FOLDER                   # neither: one update, to be recomputed by hand

First it runs the real script on a toy: a random model of 0.8 M parameters earns reward for tokens whose number ends in
0 (benchmarks/toy.py). By chance it gets about 0.14, at most 0.95. The reward of the last steps has to be above 0.5: the
edit runs and the gradient points the right way. It says nothing about a real task, nor where the reward cannot rise (a
win rate within the group). To keep the metrics: --output_dir runs --run_name NAME.

Then it trains two steps on the same completions four times (same_samples.py): as a whole, in small micro-batches, on
two ranks, and on two ranks with shards (--strategy fsdp). The gradient must not change by it. Where it does, a function
takes a number over the rows that it happens to see.

--dump leaves the weights before the first update as a `from_pretrained` folder, with the update's Batch and gradient
(batch.safetensors, gradient.safetensors); docs/ideas.md recomputes it in ten lines of plain transformers.

Rows of your own (--dataset_id) need --reward_funcs, too. Exit status 0: both hold.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from forks import Fork, get_ready, places  # noqa: E402
from orphans import ends_with_us  # noqa: E402

from config import ConfigError, load_function  # noqa: E402
from runfiles.reading import read_metrics  # noqa: E402

LEARNED = 0.5
TASK = "--generator hf --compute_dtype float32 --max_prompt_length 64 --seed 0 --print_samples_every 0"
FLAGS = (
    f"{TASK} --max_completion_length 4 --prompts_per_step 4 --num_generations 16 --max_steps 20 --learning_rate 1e-2 "
    "--no-log_completions"
).split()
CRITIC = "--critic_learning_rate 1e-3 --critic_iterations 4 --num_minibatches 2".split()

# Completions of uneven length, and micro-batches that cut groups. The second step shows what the optimizer made of the
# first: an optimizer may magnify rounding, hence the wider tolerance (with AdamW 2e-5 was the largest seen).
# Several updates a step, at a high rate: with one the ratio is 1, and nothing of a clip would be seen.
SAMPLED = f"{TASK} --max_completion_length 12 --num_generations 6 --learning_rate 1e-2 --logprob_diff_limit 1e9".split()
SAMPLED += "--prompts_per_step 4 --dist_timeout 120 --num_iterations 3".split()
STEPS = "--max_steps 2 --log_steps 1 --eval_steps none".split()  # of the second part, whatever the flags say
WAYS = {
    "in one pass": (1, "--tokens_per_microbatch 100000 --strategy ddp"),
    "in small micro-batches": (1, "--tokens_per_microbatch 50 --strategy ddp"),
    "on two ranks": (2, "--tokens_per_microbatch 100000 --strategy ddp"),
    "on two ranks with shards": (2, "--tokens_per_microbatch 100000 --strategy fsdp"),
}
DUMPED = f"{TASK} --max_completion_length 12 --num_generations 6 --prompts_per_step 4 --max_steps 1".split()
DUMPED += "--eval_steps none --strategy ddp --no-log_completions".split()
COMPARED = ("grad_norm", "loss", "value/grad_norm", "advantages/abs_mean", "reward")
TOLERANCES = (1e-4, 1e-3)  # relative, of the first step and of the one after an update
PARTS = """    A policy loss and own_term see one micro-batch, which may hold part of a group: what is of a group or of
    the step belongs in NAME.prepare (docs/ideas.md). An advantage, after_rollout and leave_out see one rank's rows,
    in whole groups: what is of all ranks goes through utils.global_moments, utils.all_sum or utils.gather_objects.
    An optimizer's step sees flat pieces of the weights under --strategy fsdp."""


def learns(script: str, task: list[str], flags: list[str], given: argparse.Namespace) -> tuple[int, bool]:
    """Exit status of the first part, and whether the script ran to its end."""
    critic = CRITIC if "critic_learning_rate" in Path(script).read_text(encoding="utf-8") else []
    with tempfile.TemporaryDirectory() as temporary:
        folder, name = given.output_dir or temporary, given.run_name
        run = ["--output_dir", folder, "--run_name", name]
        # One thread: the model is small, and more threads wait for each other longer than they compute.
        command = [sys.executable, script, *task, *FLAGS, *critic, *run, *flags]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, preexec_fn=ends_with_us())
        rewards = [line["reward"] for line in read_metrics(Path(folder) / name) if "reward" in line]
    if done.returncode or not rewards:
        print(f"check: {script} ended with status {done.returncode} after {len(rewards)} steps", file=sys.stderr)
        return done.returncode or 1, False
    if folder == temporary:
        print("(Advice is of the toy. Its report is gone with its folder: --output_dir runs --run_name NAME keeps it.)")
    last = sum(rewards[-3:]) / len(rewards[-3:])
    print(f"reward {rewards[0]:.2f} -> {last:.2f} in {len(rewards)} steps: ", end="")
    print("it learns" if last > LEARNED else f"it does not learn (above {LEARNED} expected)", flush=True)
    return 0 if last > LEARNED else 1, True


def same(script: str, task: list[str], flags: list[str]) -> int:
    """Exit status of the second part."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
    with tempfile.TemporaryDirectory() as folder:
        runs = {}  # what multiprocessing waits for, with the process and its way
        for number, (way, (ranks, cut)) in enumerate(WAYS.items()):
            cut = f"{cut} --num_minibatches 1"  # which groups share an update depends on the ranks, and may
            own = f"{cut} --output_dir {folder} --run_name {number}".split()
            command = [str(ROOT / "scripts" / "same_samples.py"), script, *task, *SAMPLED, *flags, *STEPS, *own]
            for place in places(ranks):
                log = Path(folder) / f"{number}_{place.get('RANK', 0)}.log"
                fork = Fork(command, log, environment | place, Path.cwd())
                runs[fork.sentinel] = fork, way, log
        while runs:
            for ended in wait([*runs]):
                fork, way, log = runs.pop(ended)
                if status := fork.wait():
                    for other, *_ in runs.values():
                        other.kill()
                        other.wait()
                    said = log.read_text(encoding="utf-8", errors="replace")[-3000:]
                    print(f"{said}\ncheck: {script} {way} ended with status {status}", file=sys.stderr)
                    return abs(status)
        lines = [read_metrics(Path(folder) / str(number)) for number in range(len(WAYS))]
    return compared([[line for line in of_one if "grad_norm" in line] for of_one in lines])


def number_of(line: dict, key: str) -> float:
    return math.nan if line.get(key) is None else line[key]


def compared(steps: list[list[dict]]) -> int:
    """1 if the steps of a way differ from those of the first way, which is said with the cause; else 0."""
    (plain, *others), (_, *ways) = steps, WAYS
    for way, lines in zip(ways, others, strict=True):
        for number, (mine, theirs, tolerance) in enumerate(zip(plain, lines, TOLERANCES, strict=True)):
            size = max(mine["grad_norm"], 1e-6)  # a loss may be 0 by construction
            pairs = {key: (number_of(mine, key), number_of(theirs, key)) for key in COMPARED if key in mine}
            wrong = {k: (a, b) for k, (a, b) in pairs.items() if not abs(a - b) <= tolerance * max(abs(a), size)}
            if not wrong:
                continue
            found = ", ".join(f"{key} {a:.6g} and {b:.6g}" for key, (a, b) in wrong.items())
            when = "" if number == 0 else " after an update"
            if "reward" in wrong:
                print(f"{way} other rewards{when} than in one pass: {found}. Rows, rollouts or rewards depend on the")
                print("    rank. If that is meant (a PromptSampler may do so), the gradients cannot be compared.")
                break
            print(f"not the same {way} as in one pass{when}: {found}\n{PARTS}")
            return 1
    if plain[0]["grad_norm"] == 0:
        print("not tested: in these steps the gradient is 0, as if all completions of a prompt had scored the same")
        return 1
    print(f"grad_norm {plain[0]['grad_norm']:.6g}: the same {', '.join(ways)}")
    if turns := plain[0].get("turns/mean"):
        print(f"(of completions of {turns:.3g} turns on average)")  # 1: a rollout's later turns have not been tried
    return 0


def dump(script: str, task: list[str], flags: list[str], folder: str) -> int:
    """Exit status of a step of the script, in this process, whose first update is left in the folder."""
    from safetensors.torch import save_file
    from torch import Tensor

    original = load_function(f"{script}:accumulate_gradients")
    module = sys.modules[original.__module__]

    def accumulate_gradients(policy, batch, cfg, *given):
        module.accumulate_gradients = original
        sums = original(policy, batch, cfg, *given)
        policy.model.save_pretrained(folder)
        gradients = {module.clean_name(name): p.grad for name, p in policy.named_parameters() if p.grad is not None}
        for name, values in ("gradient", gradients), ("batch", vars(batch) | batch.extras):
            tensors = {key: value.clone() for key, value in values.items() if isinstance(value, Tensor)}
            save_file(tensors, Path(folder) / f"{name}.safetensors")
        return sums

    module.accumulate_gradients = accumulate_gradients
    with tempfile.TemporaryDirectory() as runs:
        given = [*task, *DUMPED, *flags, "--output_dir", runs]
        module.train(module.parse_args(module.TrainConfig, given))
    print(f"in {folder}: {', '.join(sorted(path.name for path in Path(folder).iterdir()))}")
    return 0


def toy_task() -> list[str]:
    model, toy = ROOT / "models" / "tiny", ROOT / "benchmarks" / "toy.py"
    if not model.exists():
        subprocess.run([sys.executable, str(ROOT / "scripts" / "make_models.py"), "tiny", str(model)], check=True)
    return ["--model_id", str(model), "--dataset_id", f"{toy}:rows", "--reward_funcs", f"{toy}:tens"]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dump", metavar="FOLDER", help="neither: leave one update there")
    parser.add_argument("--output_dir", help="keep the toy's run there; default: nowhere")
    parser.add_argument("--run_name", default="check")
    given, flags = parser.parse_known_args(words)
    script = flags.pop(0) if flags and not flags[0].startswith("--") else str(ROOT / "train_grpo.py")
    task = toy_task()
    if given.dump:
        return dump(script, task, flags, given.dump)
    get_ready()  # meanwhile
    status, ran = learns(script, task, flags, given)
    return (same(script, task, flags) if ran else 0) or status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"check: {error}")
