"""What two million rows cost before the first step: seconds and memory by phase, of a first start and of the next one.

    python benchmarks/big_data.py make rows.jsonl --rows 2000000       # 0.5 GB; or rows.parquet, or a folder: arrow
    python benchmarks/big_data.py start rows.jsonl                     # the phases of a start, in a fresh process
    python benchmarks/big_data.py start rows.jsonl                     # and again: what the first one has kept

A start is what train_grpo.py does with rows before it loads weights: `setup`, the sampler's first step, the fingerprint
that a resumed run is compared by. Memory is the process's peak (VmHWM) less what it had before the rows: imports alone
are half a GB; beside it that of the largest of its forks, in which files' pages count. Rows are chat messages of 20 to
60 words, seed 0. Seconds of a core are the process's and its forks'.
"""

import argparse
import json
import random
import re
import resource
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WORDS = "the of and to in is you that it he was for on are as with his they at be this have from or one had by".split()


def made(count: int):
    chance = random.Random(0)
    for number in range(count):
        text = f"{number} {' '.join(chance.choices(WORDS, k=chance.randint(20, 60)))}"
        yield {"prompt": [{"role": "user", "content": text}], "answer": str(number), "source": "made"}


def make(path: Path, count: int) -> None:
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in made(count))
        return
    import datasets

    rows = datasets.Dataset.from_generator(made, gen_kwargs={"count": count}, cache_dir=str(path.parent / "cache"))
    rows.to_parquet(path) if path.suffix == ".parquet" else datasets.DatasetDict(train=rows).save_to_disk(path)


def megabytes(what: str) -> float:
    return int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[1]) / 1e3


def start(path: Path, flags: list[str]) -> None:
    import train_grpo as script
    from runlog import resume

    given = f"--model_id {ROOT / 'models/tiny'} --dataset_id {path} --generator hf --max_steps 9"
    cfg = script.parse_args(script.TrainConfig, [*given.split(), "--reward_funcs", "exact_match", *flags])
    used = lambda who: resource.getrusage(who).ru_utime + resource.getrusage(who).ru_stime  # noqa: E731
    now = lambda: (time.monotonic(), used(resource.RUSAGE_SELF) + used(resource.RUSAGE_CHILDREN))  # noqa: E731
    before, times = megabytes("VmRSS"), {"start": now()}
    cfg, _, _, rows, held_out = script.setup(cfg)
    times["setup"] = now()
    rows[int(script.PromptSampler(len(rows), cfg.prompts_per_step, cfg.seed).next(0)[0])]
    times["first row"] = now()
    made_with = resume.fingerprint(cfg, rows, held_out, 1)
    times["fingerprint"] = now()
    names = list(times)
    took = {b: [y - x for x, y in zip(times[a], times[b], strict=True)] for a, b in zip(names, names[1:], strict=False)}
    phases = ", ".join(f"{name} {wall:.1f} s ({cpu:.1f} of a core)" for name, (wall, cpu) in took.items())
    kept = len(json.dumps(made_with)) / 1e6
    memory = f"{megabytes('VmHWM') - before:.0f} MB"
    if forks := resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3:
        memory += f" (a fork {forks - before:.0f})"
    print(f"{len(rows):,} rows: {phases}; {memory}; a checkpoint's record {kept:.1f} MB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "start"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=2_000_000)
    given, more = parser.parse_known_args()
    make(given.path, given.rows) if given.what == "make" else start(given.path, more)
