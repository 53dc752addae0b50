"""The lines at the foot of a terminal, as a terminal shows them; what others print; how it is left."""

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest
from live import SMALL
from server_fixture import ROOT

from runlog.panel import Panel, bar_of, fit, sparkline

pytestmark = pytest.mark.in_turn


class Screen:
    """As much of a terminal as the panel needs: what is shown, and what has scrolled off the top."""

    CODE = re.compile(r"\x1b(?:\[([?\d;]*)([A-Za-z])|([78]))|([\n\r])|([^\x1b\n\r]+)")

    def __init__(self, columns: int, rows: int):
        self.columns, self.lines, self.gone = columns, [" " * columns] * rows, []
        self.row = self.column = 0
        self.saved, self.bottom = (0, 0), rows

    def feed(self, text: str) -> None:
        for numbers, code, saved, move, words in self.CODE.findall(text):
            given = [int(number) for number in numbers.split(";") if number.isdecimal()]
            if words:
                for letter in words:
                    if self.column == self.columns:
                        self.newline()
                    line = self.lines[self.row]
                    self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
                    self.column += 1
            elif move == "\n":  # the line discipline has put \r before it
                self.newline()
            elif move == "\r":
                self.column = 0
            elif saved == "7":
                self.saved = self.row, self.column
            elif saved == "8":
                self.row, self.column = self.saved
            elif code == "A":
                self.row = max(self.row - given[0], 0)
            elif code == "H":
                self.row, self.column = (value - 1 for value in given)
            elif code == "r":
                self.bottom = given[1] if given else len(self.lines)
                self.row = self.column = 0
            elif code in "JK":
                end = len(self.lines) if code == "J" else self.row + 1
                self.lines[self.row : end] = [" " * self.columns] * (end - self.row)
            else:
                assert code == "m", (numbers, code)

    def newline(self) -> None:
        self.column = 0
        if self.row + 1 == self.bottom:
            self.gone.append(self.lines.pop(0))
            self.lines.insert(self.bottom - 1, " " * self.columns)
        else:
            self.row = min(self.row + 1, len(self.lines) - 1)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.gone + self.lines)


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, **env: str):
        """arguments: of python."""
        self.master, slave = pty.openpty()
        self.resize(columns, rows)
        self.screen = Screen(columns, rows)
        env = os.environ | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | env
        how = dict(stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=env, start_new_session=True)
        self.process = subprocess.Popen([sys.executable, *arguments], **how)
        os.close(slave)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, words: str | None = None, limit: float = 60) -> Screen:
        """Read on until the words are there, or to the end."""
        deadline, data = time.monotonic() + limit, b""
        while time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    data += os.read(self.master, 65536)
                except OSError:  # the last process has closed it
                    data += b"" if words is None else b"?"
                    self.process.wait(10)
                    self.screen.feed(data.decode(errors="replace"))
                    return self.screen
            elif data:
                self.screen.feed(data.decode())
                data = b""
                if words is not None and words in self.screen.text:
                    return self.screen
        raise AssertionError(f"no {words!r}: {self.screen.text}")


PANEL = """
import logging, os, subprocess, sys, time, warnings
from runlog.panel import Panel
panel = Panel(sys.stdout, 30)
for step in range(1, 21):
    times = {"time/step": 1.5, "time/generate": 0.8, "time/update": 0.5, "time/tokens_per_second": 667.0}
    panel.show({"step": step, "reward": step / 20, "frac_reward_zero_std": 0.25} | times)
    print(f"line of step {step}", flush=True)
panel.show({"step": 20, "eval/mean@4": 0.5, "eval/reward": 0.1})
"""
OTHERS = """
handler = logging.StreamHandler(sys.__stderr__)
logging.getLogger("theirs").addHandler(handler)
for number in range(3):
    print("printed", number, flush=True)
    warnings.warn(f"warned {number}")
    logging.getLogger("theirs").warning("logged %d", number)
    os.write(2, b"from C code %d\\n" % number)
    subprocess.run(["echo", f"from a child {number}"])
    panel.show({"step": 21 + number, "reward": 0.0})
answer = input("(Pdb) ")
print("heard", answer, flush=True)
input()
panel.stop()
print("THE END")
"""


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 14)])
def test_everything_scrolls_above_it_and_stays_readable(columns, rows):
    terminal = Terminal("-c", PANEL + OTHERS, columns=columns, rows=rows)
    terminal.until("(Pdb)")
    os.write(terminal.master, b"continue\n")
    screen = terminal.until("heard continue")
    rule, first, second, _ = (line.rstrip() for line in screen.lines[-4:])
    assert set(rule) == {"─"} and first.startswith(" step 23/30  ") and "elapsed 0:00:0" in first
    assert second.startswith(" reward 0  ") and "█▁▁▁" in second
    assert "█" in first and ("at step 20" in second) == ("left" in first) == (columns == 80), screen.text
    above = "\n".join(line.rstrip() for line in screen.gone + screen.lines[:-4])
    lines = [line for line in above.split("\n") if line.startswith("line of")]
    assert lines == [f"line of step {number}" for number in range(1, 21)]
    for number in range(3):
        for words in ("printed", "warned", "logged", "from C code", "from a child"):
            assert above.count(f"{words} {number}") == 1, (words, above)
    os.write(terminal.master, b"\n")
    screen = terminal.until()
    assert "─" not in screen.text and "reward" not in screen.text and screen.bottom == rows
    assert screen.lines[screen.row - 1].startswith("THE END")


def test_a_terminal_that_changes_its_size():
    terminal = Terminal("-c", PANEL + "input()\nprint('wide', flush=True)\ninput()\npanel.stop()\n")
    assert terminal.until("of step 20").lines[-3].startswith(" step 20/30  █")
    terminal.resize(60, 20)
    terminal.screen = Screen(60, 20)
    time.sleep(1.5)  # drawn anew within a second
    os.write(terminal.master, b"\n")
    screen = terminal.until("wide")
    assert (
        screen.lines[-4].rstrip() == "─" * 59 and screen.lines[-3].startswith(" step 20/30  ") and screen.bottom == 16
    )
    for columns, rows in ((20, 20), (80, 6)):  # too small for one
        terminal.resize(columns, rows)
        terminal.screen = Screen(columns, rows)
        time.sleep(1.5)
        os.write(terminal.master, b"\n")
    assert "─" not in terminal.until().text


ENDS = """
import os, signal, sys, time
import utils
from functools import partial
from config import TrainConfig
from runlog.log import RunLog, close_all
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where it is ignored
utils.watch_process()
log = RunLog(TrainConfig(run_name="run", output_dir={folder!r}), num_steps=30)
log.step(1, {{"reward": 0.5, "time/step": 1.0}})
ended_by = None
try:
    print("RUNNING", flush=True)
    {what}
    time.sleep(30)
except KeyboardInterrupt as error:
    ended_by = error
    utils.explain_interrupt()
except BaseException as error:
    ended_by = error
    utils.print_failure(error, log.cfg)
finally:
    utils.end_process(1, partial(close_all, ended_by))
"""
WAYS = {  # what happens -> state.json's state and why
    "raise ValueError('no reward\\nmore of it')": ("failed", "ValueError: no reward"),
    "os.kill(os.getpid(), signal.SIGINT)": ("interrupted", "KeyboardInterrupt"),
    "os.kill(os.getpid(), signal.SIGTERM)": ("interrupted", "stopped by SIGTERM."),
    "os.kill(os.getpid(), signal.SIGKILL)": ("running", ""),
}


@pytest.mark.parametrize("what", WAYS)
def test_the_terminal_is_whole_again_however_a_run_ends(what, tmp_path):
    """And state.json says how, as far as the process could."""
    terminal = Terminal("-c", ENDS.format(what=what, folder=str(tmp_path)))
    screen = terminal.until()
    assert screen.bottom == 24 and "RUNNING" in screen.text
    said = json.loads((tmp_path / "run" / "state.json").read_text(encoding="utf-8"))
    assert (said["state"], said["why"]) == WAYS[what] and (said["step"], said["num_steps"]) == (1, 30)
    assert said["pid"] == terminal.process.pid and said["started"] <= said["updated"] <= time.time()


def test_a_whole_training(tmp_path):
    """As it is typed: torchrun, two ranks. Lines, samples and evaluations scroll above the panel, each once."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_grpo.py"]
    flags = f"{SMALL} --print_samples_every 2 --reward_funcs length --max_steps 6 --eval_steps 3".split()
    terminal = Terminal(*torchrun, *flags, "--output_dir", str(tmp_path), "--run_name", "run", columns=100)
    screen = terminal.until("step 4/6  ██", limit=120)
    rule, first, second, third = (line.rstrip() for line in screen.lines[-4:])
    assert set(rule) == {"─"} and first.startswith(" step ") and "elapsed 0:00:" in first
    assert second.startswith(" reward ") and "held-out mean@4 0" in second and "tok/s" in third
    screen = terminal.until(limit=60)
    assert terminal.process.returncode == 0 and "─" not in screen.text and screen.bottom == 24
    for step in range(1, 7):
        assert screen.text.count(f"\nstep {step}/6  reward ") == 1, screen.text
    assert screen.text.count("--- a sample of step") == 3 and screen.text.count("evaluation after step") == 3
    assert f"report: {tmp_path}/run/report.html" in screen.text.replace("\n", "")


def test_no_panel_in_a_log_file(tmp_path):
    """One line a step, no codes of a terminal, whatever the environment says of colours."""
    code = f"""
from config import TrainConfig
from runlog.log import RunLog
log = RunLog(TrainConfig(run_name="run", output_dir={str(tmp_path)!r}), num_steps=30)
log.step(1, {{"reward": 0.5, "time/step": 1.0}})
log.close()
"""
    env = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, encoding="utf-8"
    )
    assert done.stdout.startswith("step 1/30  reward 0.5") and not re.search(
        r"\x1b[78]|\x1b\[[\d;]*[rHJK]", done.stdout
    )


def test_domains():
    """Each one's reward stands in the step's line; the held-out score is that of all rows, wherever it comes."""
    panel = Panel(io.StringIO(), 20)
    panel.show({"step": 0, "eval/a/mean@2": 0.9, "eval/reward": 0.3, "eval/mean@2": 0.2, "eval/z/mean@2": 0.1})
    panel.show({"step": 1, "reward": 0.5, "a/prompts": 3, "a/reward": 0.25, "z/prompts": 1, "z/reward": None})
    panel.stop()
    lines = panel.lines(80)
    assert "held-out mean@2 0.2" in lines[2] and lines[3].startswith(" a 0.25")
    assert "z" not in lines[3] and "held-out a" not in lines[2]


def test_groups_of_one_are_not_called_silent():
    panel = Panel(io.StringIO(), 20)
    for alone, said in ((0.5, True), (1, False)):
        panel.show({"step": 1, "reward": 0.5, "frac_reward_zero_std": 1.0, "frac_singleton_groups": alone})
        assert ("silent 100%" in panel.lines(80)[3]) == said
    panel.stop()


def test_parts():
    assert fit(["one", "two", "three"], 13) == " one  two" and fit(["a long first"], 6) == " a lon"
    assert sparkline([0, 1, 2, 7], 3) == "▁▂█" and sparkline([3, 3], 9) == "▁▁"
    assert bar_of(0.5, 4) == "██░░" and bar_of(0.5, 4, plain=True) == "##.."
