"""scripts/gpu_check.py on a CPU: what fails, hangs or dies ends no other check, and the page tells no secret."""

import json
import re
import socket
from pathlib import Path

import pytest
from live import ROOT, Process, running
from server_fixture import make_tiny

pytestmark = pytest.mark.in_turn

# As gpu_check.py, with checks of our own; it starts itself anew under this name.
SCRIPT = """import os, sys, time
from pathlib import Path
sys.path.insert(0, "{root}/scripts")
import gpu_check
from gpu_checks import CHECKS, RATES, Check, Skipped, Slower

def fails(machine):
    print("said before")
    raise RuntimeError(f"{{Path.home()}}/x /home/someone/y {host} {{os.environ['SOME_API_KEY']}} 10.1.2.3: | refused")

def hangs(machine):
    time.sleep(600)

def skipped(machine):
    raise Skipped("no such thing here")

def slow(machine):
    RATES["tflops"] = 123.456
    raise Slower("two seconds for one")

for name in ("fails", "hangs", "skipped", "slow"):
    CHECKS["made: " + name] = Check(globals()[name], "made for a test", 2, shares="made")
CHECKS["made: dies"] = Check(lambda machine: os._exit(7), "made for a test", 2, shares="made")
if __name__ == "__main__":
    sys.exit(gpu_check.main())
"""


def test_the_page(tmp_path):
    make_tiny()
    script, page, rates = tmp_path / "check.py", tmp_path / "page.md", tmp_path / "rates.json"
    host = socket.gethostname()
    script.write_text(SCRIPT.format(root=ROOT, host=host), encoding="utf-8")
    words = f"{script} --device cpu --patience 5 --page {page} --rates {rates} --only losses made".split()
    with running(Process(words, tmp_path / "log", 1, SOME_API_KEY="abcdef-123456", HOME=str(tmp_path / "me"))) as run:
        assert run.end(280) == 1, run.text  # a check failed
    text = page.read_text(encoding="utf-8")
    rows = {row[0]: row[1:] for row in re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \| (.+) \| \d+ \|$", text, re.M)}
    verdicts = {name: row[0].strip("*") for name, row in rows.items()}
    made = dict(fails="failed", hangs="failed", skipped="skipped", slow="slower than planned", dies="failed")
    assert verdicts == {"machine": "ok", "losses": "ok"} | {f"made: {name}": verdict for name, verdict in made.items()}
    assert "**2 ok, 3 failed, 1 skipped, 1 slower than planned" in text
    assert "not done in 10 s" in rows["made: hangs"][1] and "status 7" in rows["made: dies"][1]
    assert re.search(r"in hangs\n", text), "the page does not say where it hung"
    assert "said before" in text and "RuntimeError: ~/x" in text and "\\| refused" in text
    assert json.loads(rates.read_text(encoding="utf-8")) == {"measured on": "CPUs", "tflops": 123.5}
    assert "--tflops 123.5" in text
    for secret in (host, "abcdef-123456", str(tmp_path / "me"), "someone", "10.1.2.3", str(ROOT), str(Path.home())):
        assert not re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text), secret
