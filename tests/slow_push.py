"""train_grpo.py whose weight push stops before its second bucket: for tests that do something at that moment.

usage: slow_push.py FILE NUMBER ARGUMENTS OF train_grpo.py
In push NUMBER (1 is the one before the first step) FILE.reached appears; the push goes on when FILE.go does.
"""

import runpy
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from vllm_client import VLLMClient  # noqa: E402

file, number = Path(sys.argv[1]), int(sys.argv[2])
begin_push, send_bucket = VLLMClient.begin_push, VLLMClient.send_bucket
pushes, buckets = 0, 0


def counted_begin(self):
    global pushes, buckets
    pushes, buckets = pushes + 1, 0
    begin_push(self)


def held_send(self, named):
    global buckets
    buckets += 1
    if pushes == number and buckets == 2:
        file.with_suffix(".reached").touch()
        while not file.with_suffix(".go").exists():
            time.sleep(0.01)
    send_bucket(self, named)


VLLMClient.begin_push, VLLMClient.send_bucket = counted_begin, held_send
sys.argv = [str(ROOT / "train_grpo.py"), *sys.argv[3:]]
runpy.run_path(sys.argv[0], run_name="__main__")
