"""train_grpo.py that also writes down what each weight push sent: how many words changed, bytes, seconds.

    python vllm_server.py --model M &
    python benchmarks/push_steps.py OUT.jsonl --push_changes --model_id M ... FLAGS OF train_grpo.py

A word is a bfloat16 weight. Changed ones are counted with --push_changes alone. Seconds are of the whole push, and of
the server's phases. Means over all pushes but the first two (the first is whole, the second of a step with warm-up):

    python benchmarks/push_steps.py --mean OUT.jsonl ...
"""

import json
import runpy
import sys
import time
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from serving import wire  # noqa: E402
from vllm_client import VLLMClient  # noqa: E402

if sys.argv[1] == "--mean":
    print("| run | share changed | MB sent | seconds | at the server |\n|---|---:|---:|---:|---:|")
    for file in map(Path, sys.argv[2:]):
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()][2:]
        share, size, seconds = (fmean(row[key] or 0 for row in rows) for key in ("changed", "bytes", "seconds"))
        there = fmean(sum(row["server"].values()) for row in rows)
        print(f"| {file.stem} | {share:.2%} | {size / 1e6:.1f} | {seconds:.2f} | {there:.2f} |")
    raise SystemExit

out = Path(sys.argv[1])
begin, finish, changes = VLLMClient.begin_push, VLLMClient.finish_push, wire.changes
state = {"start": 0.0, "changed": 0, "words": 0}


def begin_push(self):
    state.update(start=time.perf_counter(), changed=0, words=0)
    begin(self)


def counted(new, old):
    found = changes(new, old)
    state["changed"] += len(found[0])
    state["words"] += len(new) // 2
    return found


def finish_push(self, version):
    finish(self, version)
    row = {"version": version, "seconds": time.perf_counter() - state["start"], "bytes": self.sent_bytes}
    row["server"] = self.server_seconds
    row["changed"] = state["changed"] / state["words"] if state["words"] else None
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


VLLMClient.begin_push, VLLMClient.finish_push, wire.changes = begin_push, finish_push, counted
sys.argv = [str(ROOT / "train_grpo.py"), *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
