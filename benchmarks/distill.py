"""What a teacher's log-probs teach, against rewards alone, on the demo's two-digit sums.

    python benchmarks/distill.py --make_teacher              # trains one first, by GRPO from rewards: the demo's run
    python benchmarks/distill.py --teacher FOLDER --seeds 0 1 2

Every run is a process of its own: examples/sums.yaml with --generator hf, the same prompts, completions and steps, held
out every 5 steps by the same code. What differs stands in CASES. The teacher is in the process (--teacher_id). Numbers
go to benchmarks/results/distill.json, as they come, and the table to distill.md beside it; a run that is in it already
is not made again. What follows `--` goes to every run, the teacher's included: `-- --max_steps 2 --eval_generations 1`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from runlog.reading import read_metrics  # noqa: E402
from safety.orphans import ends_with_us  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "distill.json"
MADE = ROOT / "runs" / "sums-teacher"
SELF = "--dataset_id examples/self_taught.py:rows --teacher_prompt hint --reward_weights 0 "
TAUGHT = "--teacher_id TEACHER "
CASES = {  # name in the table: flags beside those of examples/sums.yaml
    "rewards alone": "",
    "teacher, sampled reverse KL": TAUGHT + "--advantage distill --reward_weights 0",
    "teacher, forward KL over its top 20": TAUGHT + "--distill_topk 20 --reward_weights 0",
    "teacher, JSD .5 over its top 20": TAUGHT + "--distill_topk 20 --distill_jsd 0.5 --reward_weights 0",
    "rewards and reverse KL": TAUGHT + "--advantage distill",
    "itself, shown the answer, reverse KL": SELF + "--advantage distill",
    "itself, shown the answer, forward KL over its top 20": SELF + "--distill_topk 20",
}


def train(flags: list[str], name: str, output: Path) -> tuple[list[dict], float]:
    """(lines of metrics, seconds) of a run in a process of its own."""
    command = [sys.executable, "train_grpo.py", "--config", "examples/sums.yaml", "--generator", "hf"]
    command += ["--eval_steps", "5", "--output_dir", str(output), "--run_name", name, "--print_samples_every", "0"]
    began = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    with open(output / f"{name}.txt", "w", encoding="utf-8") as out:
        how = dict(cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, preexec_fn=ends_with_us())
        done = subprocess.run([*command, *flags], **how)
    if done.returncode:
        raise SystemExit(f"{name} ended with {done.returncode}:\n{Path(out.name).read_text(encoding='utf-8')[-2000:]}")
    return read_metrics(output / name), time.monotonic() - began


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
    parser.add_argument("--make_teacher", action="store_true", help=f"train one, in {MADE.relative_to(ROOT)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--results", type=Path, default=RESULTS)
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    args, more = parser.parse_args(own), sys.argv[len(own) + 2 :]
    if args.make_teacher and not args.teacher:
        lines, _ = train(["--seed", "1000", *more], MADE.name, MADE.parent)
        args.teacher = str(max((MADE / "checkpoints").glob("step_*"), key=lambda path: path.stat().st_mtime))
        print(f"teacher: {args.teacher}, held out {held_out(lines)}", flush=True)
    needs = [case for case in args.cases if "TEACHER" in CASES[case]]
    if needs and not args.teacher:
        parser.error(f"{needs[0]!r} wants --teacher FOLDER, or --make_teacher")
    runs = json.loads(args.results.read_text(encoding="utf-8")) if args.results.exists() else {}
    for seed in args.seeds:
        for case in args.cases:
            if (key := f"{case}, seed {seed}") in runs:
                continue
            flags = CASES[case].replace("TEACHER", args.teacher or "").split() + ["--seed", str(seed), *more]
            with tempfile.TemporaryDirectory(prefix="distill_") as folder:
                lines, seconds = train(flags, "run", Path(folder))
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
