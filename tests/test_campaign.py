"""benchmarks/faults.py itself: which faults a turn has, and what its table says of old rows."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_fault_campaign_by_turns_leaves_none_out_and_says_what_is_old(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import faults
faults.TABLE = faults.Path({str(tmp_path / "table.md")!r})
known = faults.find_faults()
turns = [fault.name for k in range(10) for fault in faults.turn_of(f"{{k}}/10", known)]
assert sorted(turns) == sorted(fault.name for fault in known)
assert len(faults.turn_of("/10", known)) in (len(known) // 10, len(known) // 10 + 1)
assert faults.outdated("0123abc") and faults.outdated("HEAD+"), "unknown, or with changes beside it"
assert not faults.outdated("HEAD") or faults.git("status", "--porcelain")
faults.outdated = lambda commit: commit == "before"
row = dict(fault="f", expected="survived", seen="s", seconds=1.0, verdict="survived", ok=True, date="d")
commits = dict(zip(turns, ["before", "now", "before"]))
faults.write_table({{n: row | dict(commit=c, area=n.partition(".")[0]) for n, c in commits.items()}}, known)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "**2 rows are older than the code**" in table and table.count("| survived *old* |") == 2
    assert table.count(" survived |\n") == 1
