"""train_grpo.py that also writes down what each weight push sent: how many words changed, bytes, seconds.

    python vllm_server.py --model M &
    python benchmarks/push_steps.py OUT.jsonl --push_changes --model_id M ... FLAGS OF train_grpo.py

A word is a bfloat16 weight. Changed ones are counted with --push_changes alone.
"""

import json
import runpy
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from serving import wire  # noqa: E402
from vllm_client import VLLMClient  # noqa: E402

out = Path(sys.argv[1])
begin, finish, changes = VLLMClient.begin_push, VLLMClient.finish_push, wire.changes
state = {"start": 0.0, "changed": 0, "words": 0}


def begin_push(self):
    state.update(start=time.perf_counter(), changed=0, words=0)
    begin(self)


def counted(new, old):
    positions, values = changes(new, old)
    state["changed"] += len(positions)
    state["words"] += len(new) // 2
    return positions, values


def finish_push(self, version):
    finish(self, version)
    row = {"version": version, "seconds": time.perf_counter() - state["start"], "bytes": self.sent_bytes}
    row["changed"] = state["changed"] / state["words"] if state["words"] else None
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


VLLMClient.begin_push, VLLMClient.finish_push, wire.changes = begin_push, finish_push, counted
sys.argv = [str(ROOT / "train_grpo.py"), *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
