"""What a teacher's log-probs teach, against rewards alone, on the demo's two-digit sums and on two other examples.

    python benchmarks/distill.py --make_teacher              # a supervised pass first, over 2,560 answers
    python benchmarks/distill.py --teacher FOLDER --seeds 0 1 2
    python benchmarks/distill.py --task arithmetic --make_teacher     # a calculator; the teacher always calls it
    python benchmarks/distill.py --task counting --make_teacher       # pictures; the teacher is larger, and careful

Every run is a process of its own: examples/TASK.yaml with --generator hf, the same prompts, completions and steps, held
out every few steps by the same code. What differs stands in TASKS. The teacher is in the process (--teacher_id).
Numbers go to benchmarks/results/distill_TASK.json, as they come, and the table to the .md beside it; a run that is in
it already is not made again. Run folders stay in runs/distill, without checkpoints; models that are made, in
runs/made. What follows `--` goes to every student's run: `-- --max_steps 2 --eval_generations 1`.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from runlog.reading import read_metrics  # noqa: E402
from safety.orphans import ends_with_us  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
RUNS = ROOT / "runs"
MADE = RUNS / "made"
SELF = "--dataset_id examples/self_taught.py:rows --teacher_prompt hint --reward_weights 0 "
TAUGHT = "--teacher_id TEACHER "
ALONE = {"rewards alone": ""}
REVERSE = {"teacher, sampled reverse KL": TAUGHT + "--advantage distill --reward_weights 0 --distill_baseline place"}
FORWARD = {"teacher, forward KL over its top 20": TAUGHT + "--distill_topk 20 --reward_weights 0"}
BOTH = {"rewards and reverse KL": TAUGHT + "--advantage distill --distill_baseline place"}


@dataclasses.dataclass
class Task:
    """examples/NAME.yaml, and what is trained on it.

    teacher, start: how the teacher, and the model that students begin with, are made: flags of scripts/warm_start.py
    or of scripts/make_tiny_vlm.py; no start: the example's model."""

    cases: dict[str, str]  # name in the table: flags beside those of the example
    teacher: str
    start: str = ""
    eval_steps: int = 5


TASKS = {
    "sums": Task(
        ALONE
        | REVERSE
        | {"the same without a baseline": TAUGHT + "--advantage distill --reward_weights 0"}
        | FORWARD
        | {"teacher, reverse KL over its top 20": TAUGHT + "--distill_topk 20 --distill_jsd 1 --reward_weights 0"}
        | {"teacher, JSD .5 over its top 20": TAUGHT + "--distill_topk 20 --distill_jsd 0.5 --reward_weights 0"}
        | BOTH
        | {"rewards and JSD .5 over its top 20": TAUGHT + "--distill_topk 20 --distill_jsd 0.5"}
        | {"itself, shown the answer, reverse KL": SELF + "--advantage distill --distill_baseline place"}
        | {"itself, shown the answer, forward KL over its top 20": SELF + "--distill_topk 20"},
        teacher="warm_start --demonstrations benchmarks/distill.py:answer --num_generations 1 --prompts_per_step 32 "
        "--max_steps 80 --learning_rate 6e-4 --seed 1000",
    ),
    "arithmetic": Task(
        ALONE | REVERSE | BOTH | FORWARD,
        teacher="warm_start --demonstrations benchmarks/distill.py:call --num_generations 1 --prompts_per_step 16 "
        "--max_steps 14 --learning_rate 6e-4 --seed 1000",
        start="warm_start --demonstrations examples/arithmetic.py:demonstrate --num_generations 1 "
        "--prompts_per_step 12 --max_steps 16 --learning_rate 6e-4",
    ),
    "counting": Task(
        ALONE | REVERSE | BOTH | FORWARD,
        teacher="make_tiny_vlm --larger --careful --tasks counting --seed 1",
        start="make_tiny_vlm --tasks counting --steps 800",
        eval_steps=10,
    ),
}


def answer(row: dict, environment, answers) -> str:
    """What the supervised pass shows, for --demonstrations of scripts/warm_start.py."""
    return row["answer"]


def call(row: dict, environment, answers) -> str:
    """Who always asks the calculator, and says what it answers."""
    if answers:
        return f"The answer is {answers[-1][0]['content']}."
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{row["expression"]}"}}}}</tool_call>'


def run(name: str, output: Path, script: str, *flags: str) -> float:
    """Seconds of a script in a process of its own."""
    begun = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    with open(output / f"{name}.txt", "w", encoding="utf-8") as out:
        env = os.environ | {"PYTHONUNBUFFERED": "1"}  # who waits can follow it
        how = dict(cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, preexec_fn=ends_with_us())
        done = subprocess.run([sys.executable, script, *flags], **how)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{Path(out.name).read_text(encoding='utf-8')[-2000:]}")
    return time.monotonic() - begun


def made(task: str, what: str, recipe: str, dtype: str) -> str:
    """The folder, below ROOT, of a model that is made as `recipe` says, where it is not there already."""
    script, *flags = recipe.split()
    name = f"{task}-{what}"
    if script == "make_tiny_vlm":
        seconds, folder = run(name, MADE, "scripts/make_tiny_vlm.py", str(MADE / name), *flags), MADE / name
    else:
        folder = MADE / name / "checkpoints" / f"step_{flags[flags.index('--max_steps') + 1]}"
        where = ["--config", f"examples/{task}.yaml", "--output_dir", str(MADE), "--run_name", name]
        where += ["--compute_dtype", dtype]
        seconds = 0.0 if folder.is_dir() else run(name, MADE, "scripts/warm_start.py", *where, *flags)
    print(f"{what}: {folder}, {seconds:.0f} s", flush=True)
    return str(folder.relative_to(ROOT))  # it stands in the results, too


def evaluate(task: str, folder: str, dtype: str) -> dict[str, float]:
    name = f"{task}-{Path(folder).name}-eval"
    shutil.rmtree(MADE / name, ignore_errors=True)
    where = ["--config", f"examples/{task}.yaml", "--output_dir", str(MADE), "--run_name", name]
    where += ["--compute_dtype", dtype]
    run(name, MADE, "train_grpo.py", *where, "--generator", "hf", "--model_id", folder, "--eval_only")
    return held_out(read_metrics(MADE / name))


def held_out(lines: list[dict]) -> dict[str, float]:
    """{steps done: share right}"""
    return {str(line["step"]): value for line in lines for key, value in line.items() if key.startswith("eval/mean@")}


def table(runs: dict[str, dict]) -> str:
    steps = sorted({int(step) for run in runs.values() for step in run["right"]})
    text = f"| | seed | {' | '.join(map(str, steps))} | sampled tokens | s a step |\n"
    text += f"|---|---|{'---|' * (len(steps) + 2)}\n"
    for run in runs.values():
        shares = (f"{run['right'][str(step)]:.2f}" if str(step) in run["right"] else "" for step in steps)
        text += f"| {run['case']} | {run['seed']} | {' | '.join(shares)} | {run['tokens']:.0f} | {run['step']:.1f} |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="sums", choices=list(TASKS))
    parser.add_argument("--teacher", help="folder of a model that can do the task")
    parser.add_argument("--make_teacher", action="store_true", help="train one, in runs/made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="those of TASKS, by name")
    parser.add_argument("--compute_dtype", default="bfloat16", help="of all; float32 on CPUs without AVX512")
    parser.add_argument("--results", type=Path)
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    args, more = parser.parse_args(own), sys.argv[len(own) + 2 :]
    task, results = TASKS[args.task], args.results or RESULTS / f"distill_{args.task}.json"
    cases = args.cases or list(task.cases)
    if unknown := [case for case in cases if case not in task.cases]:
        parser.error(f"--cases {unknown[0]!r}: {args.task} has {', '.join(map(repr, task.cases))}")
    if args.make_teacher and not args.teacher:
        args.teacher = made(args.task, "teacher", task.teacher, args.compute_dtype)
        print(f"the teacher's: {evaluate(args.task, args.teacher, args.compute_dtype)}", flush=True)
    needs = [case for case in cases if "TEACHER" in task.cases[case]]
    if needs and not args.teacher:
        parser.error(f"{needs[0]!r} wants --teacher FOLDER, or --make_teacher")
    common = (
        f"--config examples/{args.task}.yaml --generator hf --eval_steps {task.eval_steps} --print_samples_every 0 "
    )
    common += f"--compute_dtype {args.compute_dtype}"
    if task.start:
        common += f" --model_id {made(args.task, 'start', task.start, args.compute_dtype)}"
    runs = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    for seed in args.seeds:
        for case in cases:
            if (key := f"{case}, seed {seed}") in runs:
                continue
            flags = task.cases[case].replace("TEACHER", args.teacher or "").split() + ["--seed", str(seed), *more]
            name, output = key.replace(",", "").replace(" ", "-"), RUNS / "distill" / args.task
            shutil.rmtree(output / name, ignore_errors=True)  # of a run that did not end
            where = ["--output_dir", str(output), "--run_name", name]
            seconds = run(name, output, "train_grpo.py", *common.split(), *where, *flags)
            lines = read_metrics(output / name)
            shutil.rmtree(output / name / "checkpoints")
            steps = [line for line in lines if "time/step" in line]
            tokens = sum(line["completions/count"] * line["completions/mean_length"] for line in steps)
            step = sum(line["time/step"] for line in steps) / len(steps)
            runs[key] = {"case": case, "seed": seed, "right": held_out(lines), "tokens": tokens, "step": step}
            runs[key] |= {"seconds": seconds, "flags": flags}
            results.write_text(json.dumps(runs, indent=1), encoding="utf-8")
            results.with_suffix(".md").write_text(table(runs), encoding="utf-8")
            print(f"{key}: {runs[key]['right']}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
