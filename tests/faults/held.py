"""train_grpo.py that stops at a place of its loop, for faults that lie in what happens at that moment.

usage: held.py PLACE FILE ARGUMENTS OF train_grpo.py
At PLACE (logged: after the first step's push, before its evaluation; saving: a checkpoint is half written) FILE.reached
appears; the run goes on when FILE.go does.
"""

import runpy
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
from runlog import checkpoints  # noqa: E402
from runlog.log import RunLog  # noqa: E402

place, file = sys.argv[1], Path(sys.argv[2])
owner, name = {"logged": (RunLog, "step"), "saving": (checkpoints, "save_config")}[place]
original = getattr(owner, name)


def held(*args, **kwargs):
    result = original(*args, **kwargs)
    if not file.with_suffix(".reached").exists():
        file.with_suffix(".reached").touch()
        while not file.with_suffix(".go").exists():
            time.sleep(0.01)
    return result


setattr(owner, name, held)
sys.argv = [str(ROOT / "train_grpo.py"), *sys.argv[3:]]
runpy.run_path(sys.argv[0], run_name="__main__")
