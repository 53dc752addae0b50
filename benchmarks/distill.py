"""What a teacher's log-probs teach, against rewards alone, on the demo's two-digit sums.

    python benchmarks/distill.py --make_teacher              # a supervised pass first, over 2,560 answers
    python benchmarks/distill.py --teacher FOLDER --seeds 0 1 2

Every run is a process of its own: examples/sums.yaml with --generator hf, the same prompts, completions and steps, held
out every 5 steps by the same code. What differs stands in CASES. The teacher is in the process (--teacher_id). Numbers
go to benchmarks/results/distill.json, as they come, and the table to distill.md beside it; a run that is in it already
is not made again. Run folders stay in runs/distill, without checkpoints. What follows `--` goes to every student's run:
`-- --max_steps 2 --eval_generations 1`.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from runlog.reading import read_metrics  # noqa: E402
from safety.orphans import ends_with_us  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "distill.json"
RUNS = ROOT / "runs"
SELF = "--dataset_id examples/self_taught.py:rows --teacher_prompt hint --reward_weights 0 "
TAUGHT = "--teacher_id TEACHER "
COMMON = "--generator hf --eval_steps 5 --print_samples_every 0".split()
CASES = {  # name in the table: flags beside those of examples/sums.yaml
    "rewards alone": "",
    "teacher, sampled reverse KL": TAUGHT + "--advantage distill --reward_weights 0 --distill_baseline place",
    "the same without a baseline": TAUGHT + "--advantage distill --reward_weights 0",
    "teacher, forward KL over its top 20": TAUGHT + "--distill_topk 20 --reward_weights 0",
    "teacher, JSD .5 over its top 20": TAUGHT + "--distill_topk 20 --distill_jsd 0.5 --reward_weights 0",
    "rewards and reverse KL": TAUGHT + "--advantage distill --distill_baseline place",
    "itself, shown the answer, reverse KL": SELF + "--advantage distill --distill_baseline place",
    "itself, shown the answer, forward KL over its top 20": SELF + "--distill_topk 20",
}


def answer(row: dict, environment, answers) -> str:
    """What the supervised pass shows, for --demonstrations of scripts/warm_start.py."""
    return row["answer"]


def run(script: str, flags: list[str], name: str, output: Path) -> float:
    """Seconds of a script in a process of its own, on the sums."""
    command = [sys.executable, script, "--config", "examples/sums.yaml", "--output_dir", str(output)]
    begun = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    with open(output / f"{name}.txt", "w", encoding="utf-8") as out:
        how = dict(cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, preexec_fn=ends_with_us())
        done = subprocess.run([*command, "--run_name", name, *flags], **how)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{Path(out.name).read_text(encoding='utf-8')[-2000:]}")
    return time.monotonic() - begun


def make_teacher() -> str:
    """The folder of the model after a supervised pass."""
    shown = "--demonstrations benchmarks/distill.py:answer --num_generations 1 --prompts_per_step 32 --max_steps 80"
    seconds = run("scripts/warm_start.py", f"{shown} --learning_rate 6e-4 --seed 1000".split(), "sums-teacher", RUNS)
    folder = RUNS / "sums-teacher" / "checkpoints" / "step_80"
    run("train_grpo.py", f"--generator hf --model_id {folder} --eval_only".split(), "sums-teacher-eval", RUNS)
    print(f"teacher: {folder}, {seconds:.0f} s, {held_out(read_metrics(RUNS / 'sums-teacher-eval'))}", flush=True)
    return str(folder)


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
    parser.add_argument("--teacher", help="folder of a model that can do the sums")
    parser.add_argument("--make_teacher", action="store_true", help="train one, in runs/sums-teacher")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--results", type=Path, default=RESULTS)
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    args, more = parser.parse_args(own), sys.argv[len(own) + 2 :]
    if args.make_teacher and not args.teacher:
        args.teacher = make_teacher()
    needs = [case for case in args.cases if "TEACHER" in CASES[case]]
    if needs and not args.teacher:
        parser.error(f"{needs[0]!r} wants --teacher FOLDER, or --make_teacher")
    runs = json.loads(args.results.read_text(encoding="utf-8")) if args.results.exists() else {}
    for seed in args.seeds:
        for case in args.cases:
            if (key := f"{case}, seed {seed}") in runs:
                continue
            flags = CASES[case].replace("TEACHER", args.teacher or "").split() + ["--seed", str(seed), *more]
            name = key.replace(",", "").replace(" ", "-")
            shutil.rmtree(RUNS / "distill" / name, ignore_errors=True)  # of a run that did not end
            seconds = run("train_grpo.py", [*COMMON, *flags], name, RUNS / "distill")
            lines = read_metrics(RUNS / "distill" / name)
            shutil.rmtree(RUNS / "distill" / name / "checkpoints")
            steps = [line for line in lines if "time/step" in line]
            tokens = sum(line["completions/count"] * line["completions/mean_length"] for line in steps)
            step = sum(line["time/step"] for line in steps) / len(steps)
            runs[key] = {"case": case, "seed": seed, "right": held_out(lines), "tokens": tokens, "step": step}
            runs[key] |= {"seconds": seconds, "flags": flags}
            args.results.write_text(json.dumps(runs, indent=1), encoding="utf-8")
            args.results.with_suffix(".md").write_text(table(runs), encoding="utf-8")
            print(f"{key}: {runs[key]['right']}, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
