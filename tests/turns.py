"""Tests and faults by turns: each commit runs another part of those that take long, and so many commits run all."""

import datetime
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    return done.stdout.strip() if done.returncode == 0 else ""


def turn(text: str) -> slice:
    """Turn K of N ("K/N") of a list. "/N": K is the number of commits, so that each commit runs another part; where the
    history is not there, the day. ValueError if it is neither."""
    found = re.fullmatch(r"(\d*)/([1-9]\d*)", text)
    if not found:
        raise ValueError(f"--turn {text}: give K/N such as 3/10, or /10 for the commit's own turn")
    known = git("rev-parse", "--is-shallow-repository") == "false"
    number = int(found[1] or (known and git("rev-list", "--count", "HEAD")) or datetime.date.today().toordinal())
    return slice(number % int(found[2]), None, int(found[2]))
