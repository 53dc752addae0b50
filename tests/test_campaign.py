"""Tests and faults by turns; what the table of tests/faults says of old rows."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import by_turn

ROOT = Path(__file__).parent.parent


def test_the_fault_campaign_by_turns_leaves_none_out_and_says_what_is_old(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests" / "faults")!r})
import campaign
campaign.TABLE = campaign.Path({str(tmp_path / "table.md")!r})
known = campaign.find_faults()
turns = [fault.name for k in range(10) for fault in campaign.turn_of(f"{{k}}/10", known)]
assert sorted(turns) == sorted(fault.name for fault in known)
assert len(campaign.turn_of("/10", known)) in (len(known) // 10, len(known) // 10 + 1)
assert campaign.outdated("0123abc") and campaign.outdated("HEAD+"), "unknown, or with changes beside it"
assert not campaign.outdated("HEAD") or campaign.git("status", "--porcelain")
campaign.outdated = lambda commit: commit == "before"
row = dict(fault="f", expected="survived", seen="s", seconds=1.0, verdict="survived", ok=True, date="d")
commits = dict(zip(turns, ["before", "now", "before"]))
campaign.write_table({{n: row | dict(commit=c, area=n.partition(".")[0]) for n, c in commits.items()}}, known)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "**2 rows are older than the code**" in table and table.count("| survived *old* |") == 2
    assert table.count(" survived |\n") == 1


def test_tests_by_turns():
    """Every turn has all that are not marked, and each that is marked is in one turn."""
    items = [SimpleNamespace(number=n, get_closest_marker=lambda name, n=n: n % 3 or None) for n in range(20)]
    turns = [by_turn(items, f"{k}/4") for k in range(4)]
    for run, rest in turns:
        assert sorted([*run, *rest], key=lambda item: item.number) == items
        assert {item.number for item in run} >= set(range(0, 20, 3))
        assert len(rest) in (9, 10) and run == sorted(run, key=lambda item: item.number)
    assert sorted(item.number for run, _ in turns for item in run if item.number % 3) == [n for n in range(20) if n % 3]
    assert len(by_turn(items, "/1")[0]) == 20 and len(by_turn(items, "/4")[1]) in (9, 10)
    with pytest.raises(pytest.UsageError, match="--turn 3: give K/N such as 3/10"):
        by_turn(items, "3")


def test_what_failed_is_tried_again_whatever_the_turn(tmp_path):
    """Alone it is the first that is marked, and another's turn: it was left out, and the tests passed."""
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n\n@pytest.mark.in_turn\n@pytest.mark.parametrize('n', range(4))\ndef test_it(n):\n"
        "    assert n != 2\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "--rootdir", tmp_path, "--turn", "2/4", tmp_path]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}"}
    for more in ([], ["--last-failed"]):
        ended = subprocess.run([*command, *more], cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
        assert ended.returncode == 1 and "1 failed" in ended.stdout, ended.stdout + ended.stderr
