"""scripts/gpu_check.py on a CPU: every check, and what it says of those that fail, hang or die."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_checks import CHECKS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| ([^|]+) \| [^|]+ \| \**(\w+)\** \| (.+) \| \d+ \|$", re.M)

# As gpu_check.py, with checks of our own; it starts itself anew under this name.
SCRIPT = """import os, sys, time
sys.path.insert(0, {scripts!r})
import gpu_check
from gpu_checks import CHECKS, Check, Skipped

gpu_check.SCRIPT = __file__

def fails(machine):
    raise RuntimeError("refused | by the test")

def skipped(machine):
    raise Skipped("no such thing here")

made = dict(fails=fails, hangs=lambda machine: time.sleep(600), dies=lambda machine: os._exit(7), skipped=skipped)
CHECKS |= {{f"made: {{name}}": Check(check, "for a test", 2, group="made") for name, check in made.items()}}
if __name__ == "__main__":
    sys.exit(gpu_check.main())
"""


def run(*words) -> tuple[int, dict[str, tuple[str, str]], str]:
    """Exit status, {check: (verdict, figures or cause)}, and the page."""
    page = Path(words[-1])
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    text = page.read_text(encoding="utf-8")
    return done.returncode, {name: (verdict, said) for name, verdict, said in ROW.findall(text)}, text


def test_a_check_that_fails_hangs_or_dies_ends_no_other(tmp_path):
    script = tmp_path / "check.py"
    script.write_text(SCRIPT.format(scripts=str(ROOT / "scripts")), encoding="utf-8")
    status, found, text = run(
        script, "--device", "cpu", "--patience", "2", "--only", "made", "--page", tmp_path / "page"
    )
    assert status == 1 and found.pop("machine")[0] == "ok"
    verdicts = {name.removeprefix("made: "): verdict for name, (verdict, _) in found.items()}
    assert verdicts == dict(fails="failed", hangs="failed", dies="failed", skipped="skipped")
    assert "refused \\| by the test" in text and "status 7" in found["made: dies"][1]
    assert "not done in 4 s" in found["made: hangs"][1] and re.search(r"line \d+ in <lambda>", text)  # where it hung
    assert "**1 ok, 3 failed, 1 skipped**" in text


PARTS = [  # beginnings of names
    ("numbers", "attention", "rows", "gradient of", "learning", "resume"),
    ("gradient ddp", "gradient fsdp", "sizes", "speed"),
    ("beside a server", "while sampling", "by turns", "server on"),
    ("demo",),
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part[0])
def test_every_check_on_cpus(part, tmp_path):
    words = ["--device", "cpu", "--patience", "9", "--only", *part, "--page", tmp_path / "page"]
    status, found, text = run("scripts/gpu_check.py", *words)
    assert status == 0, text
    assert {name for name, (verdict, _) in found.items() if verdict == "skipped"} <= {
        "server on two GPUs", "by turns with a server", "demo"
    }  # fmt: skip


def test_no_check_is_left_out():
    assert [name for name in CHECKS if not name.startswith(("machine", *sum(PARTS, ())))] == []
