"""Healthy and sick curves, one metric a picture, for docs/recipes.md: "is my run normal?".

    python benchmarks/sick_curves.py           # runs that are not in the results yet, a minute each; then the pictures
    python benchmarks/sick_curves.py --draw    # the pictures alone, from what is there

A random model is first taught by 100 supervised steps to write a few words and to stop. The healthy run then earns
reward for words with an e, if it stops; each sick one differs from it in what CASES says, and in nothing else. Curves,
and what look.py says stands out in each run, go to benchmarks/results/sick_curves.json, pictures to docs/images/.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from runlog import advice  # noqa: E402
from runlog.curves import Curves  # noqa: E402
from runlog.reading import read_metrics  # noqa: E402
from safety.orphans import ends_with_us  # noqa: E402

RESULTS, IMAGES = ROOT / "benchmarks" / "results" / "sick_curves.json", ROOT / "docs" / "images"
HERE, LONGEST = "benchmarks/sick_curves.py", 32  # tokens of a completion
COMMON = "--generator hf --compute_dtype float32 --dataset_id benchmarks/toy.py:rows --max_prompt_length 64 "
COMMON += f"--max_completion_length {LONGEST} --print_samples_every 0 "
TRAINED = "--prompts_per_step 8 --num_generations 8 --max_steps 40 --eval_steps 5 --eval_generations 1 "
TRAINED += f"--reward_funcs {HERE}:with_e --learning_rate 3e-4 --seed 0 "
CASES = {  # name: flags that win over those of the healthy run
    "healthy": "",
    "a rate a hundred times as high": "--learning_rate 3e-2",
    "length is paid": f"--reward_funcs {HERE}:with_e {HERE}:paid_by_length --reward_weights 1 2",
    "too hard": f"--reward_funcs {HERE}:all_of_them",
    "some are right": f"--reward_funcs {HERE}:most_of_them",
    "a sampler that never gets the new weights": "--push_steps 1000 --eval_steps none",
}
PICTURES = {  # file: (metric, what is healthy, what is sick, title)
    "normal-reward": ("reward", "healthy", "a rate a hundred times as high", "reward"),
    "normal-silent": ("frac_reward_zero_std", "some are right", "too hard", "groups without signal"),
    "normal-length": ("completions/mean_length", "healthy", "length is paid", "tokens of a completion"),
    "normal-entropy": ("entropy", "healthy", "a rate a hundred times as high", "entropy"),
    "normal-agreement": (
        "sampling/logprob_diff_mean",
        "healthy",
        "a sampler that never gets the new weights",
        "trainer against generator, in log-probs",
    ),
    "normal-grad-norm": ("grad_norm", "healthy", "a rate a hundred times as high", "gradient norm"),
}


WORDS = "red blue green warm cold small tall round old new soft plain".split()


def demonstrate(row: dict, environment, answers: list) -> str:
    """For the warm start: three to six words."""
    return " ".join(random.choices(WORDS, k=random.randint(3, 6)))


def share(completion: str) -> float:
    """Of the words that have an e."""
    words = completion.split()
    return sum("e" in word for word in words) / max(len(words), 1)


def with_e(completions, completion_ids, **_) -> list[float]:
    return [share(text) * (len(ids) < LONGEST) for text, ids in zip(completions, completion_ids, strict=True)]


def paid_by_length(completion_ids, **_) -> list[float]:
    return [len(ids) / LONGEST for ids in completion_ids]


def most_of_them(completions, **_) -> list[float]:
    return [float(share(text) > 0.5) for text in completions]


def all_of_them(completions, **_) -> list[float]:
    """Of ten words or more: nobody wrote so many."""
    return [float(share(text) == 1 and len(text.split()) >= 10) for text in completions]


def run(script: str, flags: str, folder: Path, name: str) -> Path:
    command = [sys.executable, script, *flags.split(), "--output_dir", str(folder), "--run_name", name]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", preexec_fn=ends_with_us()
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return folder / name


def measure(folder: Path, found: dict) -> dict:
    """{case: {"flags", "says": titles of what stands out, "curves": {metric: [steps, values]}}}

    found: what is known; of equal flags a run is not made again."""
    shown = f"--demonstrations {HERE}:demonstrate --num_generations 1 --prompts_per_step 32 "
    shown += "--max_steps 100 --learning_rate 5e-3 --model_id models/tiny"
    start = run("scripts/warm_start.py", f"{COMMON} {shown}", folder, "start") / "checkpoints" / "step_100"
    for number, (name, more) in enumerate(CASES.items()):
        flags = f"{COMMON}{TRAINED}{more}"
        if found.get(name, {}).get("flags") == flags:
            continue
        path = run("train_grpo.py", f"{flags} --model_id {start}", folder, f"case-{number}")
        curves, metrics = Curves(read_metrics(path)), {metric for metric, *_ in PICTURES.values()}
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        says = [note["title"] for note in advice.of_curves(curves, config)]
        kept = {metric: [[round(float(v), 4) for v in part] for part in curves.all(metric)] for metric in metrics}
        found[name] = {"flags": flags, "says": says, "curves": kept}
        print(f"{name}: {', '.join(says) or 'nothing stands out'}", flush=True)
    return found


def draw(found: dict) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "the same file of the same curves"
    for file, (metric, healthy, sick, title) in PICTURES.items():
        figure = Figure(figsize=(5.2, 2.4), layout="constrained")
        axes = figure.add_subplot()
        for name, color in ((healthy, "#2563eb"), (sick, "#dc2626")):
            axes.plot(*found[name]["curves"][metric], color=color, lw=1.6, label=name)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("step", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#eef0f3")
        axes.legend(frameon=False, fontsize=8)
        figure.savefig(IMAGES / f"{file}.svg", metadata={"Date": None})
        print(f"docs/images/{file}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw, from benchmarks/results/sick_curves.json")
    if not parser.parse_args().draw:
        with tempfile.TemporaryDirectory() as folder:
            known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
            RESULTS.write_text(json.dumps(measure(Path(folder), known)), encoding="utf-8")
    draw(json.loads(RESULTS.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
