"""What each domain of a mix learns, against training it alone on as many prompts.

    python examples/run.py three_domains --max_steps 1       # makes the warm-started model
    python benchmarks/three_domains.py --seeds 0 1           # 40 minutes a seed on one core

The mix is examples/three_domains.yaml. Alone means the same file with one of its domains and that domain's share of the
prompts of a step, for the same steps: as many completions of it, and as many updates. Both begin with the same weights,
and held-out rows are evaluated by the same code. Numbers go to benchmarks/results/three_domains.json, as they come, and
the table to .md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from runlog.reading import read_metrics  # noqa: E402
from safety.orphans import ends_with_us  # noqa: E402

CONFIG = ROOT / "examples" / "three_domains.yaml"
START = ROOT / "runs" / "warm-three_domains" / "checkpoints" / "step_5"
RESULTS = ROOT / "benchmarks" / "results" / "three_domains.json"


def train(domains: list[dict], settings: dict, seed: int, model: str, flags: list[str]) -> dict:
    """{domain: held out before and after, completion tokens and completions of the training}"""
    share = settings["prompts_per_step"] * len(domains) // len(settings["domains"])
    folder = Path(tempfile.mkdtemp(prefix="three_domains_"))
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings | {"domains": domains, "prompts_per_step": share}), encoding="utf-8")
    command = [sys.executable, str(ROOT / "train_grpo.py"), "--config", str(config), "--model_id", model, "--seed"]
    command += [str(seed), "--output_dir", str(folder), "--run_name", "run", *flags]
    with open(folder / "output.txt", "w", encoding="utf-8") as out:
        subprocess.run(command, cwd=ROOT, check=True, stdout=out, stderr=subprocess.STDOUT, preexec_fn=ends_with_us())
    lines = read_metrics(folder / "run")
    evaluations = [line for line in lines if "eval/reward" in line]
    steps = [line for line in lines if "eval/reward" not in line]
    found = {}
    for name in [domain["name"] for domain in domains]:
        completions = [settings["num_generations"] * line[f"{name}/prompts"] for line in steps]
        lengths = [line[f"{name}/completions/mean_length"] for line in steps]
        found[name] = {
            "right": [evaluations[at][f"eval/{name}/mean@{settings['eval_generations']}"] for at in (0, -1)],
            "completions": sum(completions),
            "tokens": sum(n * length for n, length in zip(completions, lengths, strict=True)),
        }
    return found


def table(runs: list[dict]) -> str:
    text = "| domain | seed | before | in the mix | alone | completions | completion tokens, mix and alone |\n"
    text += "|---|---|---|---|---|---|---|\n"
    for domain in dict.fromkeys(name for run in runs for name in run["domains"]):
        for seed in sorted({run["seed"] for run in runs}):
            mine = {run["what"]: run["domains"].get(domain) for run in runs if run["seed"] == seed}
            mix, alone = mine.get("mix"), mine.get(domain)
            if mix and alone:
                before = f"{mix['right'][0]:.3f}, {alone['right'][0]:.3f}"
                tokens = f"{mix['tokens']:,.0f}, {alone['tokens']:,.0f}"
                text += f"| {domain} | {seed} | {before} | {mix['right'][1]:.3f} | {alone['right'][1]:.3f} | "
                text += f"{mix['completions']:.0f} | {tokens} |\n"
    return text


def main() -> None:
    settings = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    settings.pop("example")
    names = [domain["name"] for domain in settings["domains"]]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--runs", nargs="+", choices=["mix", *names], default=["mix", *names])
    parser.add_argument("--model", default=str(START))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args, flags = parser.parse_known_args()
    for seed in args.seeds:
        for what in args.runs:
            chosen = [domain for domain in settings["domains"] if what in ("mix", domain["name"])]
            found = train(chosen, settings, seed, args.model, flags)
            runs = (
                json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else []
            )  # others may have been added meanwhile
            runs = [run for run in runs if (run["what"], run["seed"]) != (what, seed)]
            runs.append({"what": what, "seed": seed, "domains": found})
            args.out.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
            args.out.with_suffix(".md").write_text(table(runs), encoding="utf-8")
            print(what, seed, {name: numbers["right"] for name, numbers in found.items()}, flush=True)


if __name__ == "__main__":
    main()
