"""A few lines at the foot of the terminal that say how the run goes, while everything else scrolls above them.

The terminal itself keeps them apart: it is told to scroll all lines but the last ones (DECSTBM). So whatever other
code, other ranks and C libraries print stays readable, and a debugger has its prompt; nothing is redirected.
"""

import os
import threading
import time
from collections import deque

from rich.cells import cell_len, set_cell_size

from runlog.reading import phases
from safety.storable import visible
from safety.watchdog import WHOLE_TERMINAL

LEVELS = "▁▂▃▄▅▆▇█"
HEIGHT, LEAST_COLUMNS, LEAST_ROWS = 4, 30, 12
SAVE, RESTORE = "\x1b7", "\x1b8"  # the cursor


class Panel:
    """Drawn once a second and with each line of metrics, until `stop`.

    stream: the terminal. done: steps that an earlier process has made. Nothing is drawn where it is too small.
    """

    def __init__(self, stream, num_steps: int | None, done: int = 0):
        self.stream, self.num_steps, self.first, self.done = stream, num_steps, done, done
        self.began = time.time()
        self.ends: deque[tuple[int, float]] = deque([(done, self.began)], maxlen=50)  # (steps, when they were done)
        self.rewards: deque[float] = deque(maxlen=200)
        self.line: dict = {}
        self.held_out: list[tuple[int, str, float]] = []  # step, metric, value
        self.size, self.drawn, self.lock = None, "", threading.Lock()
        self.stopped = threading.Event()
        self.draw()
        threading.Thread(target=self._draw_often, name="panel", daemon=True).start()

    def show(self, line: dict) -> None:
        """A line of metrics.jsonl, of a step or an evaluation."""
        overall = [key for key in line if key.startswith("eval/") and key.count("/") == 1]  # of all domains
        solved = sorted(overall, key=lambda key: "mean@" not in key)
        if solved:
            if line[solved[0]] is not None:
                self.held_out.append((line["step"], solved[0].removeprefix("eval/"), line[solved[0]]))
        else:
            self.line, self.done = line, line["step"]
            self.ends.append((self.done, time.time()))
            if line.get("reward") is not None:
                self.rewards.append(line["reward"])
        self.draw()

    def stop(self) -> None:
        """Give the whole terminal back."""
        self.stopped.set()
        with self.lock:
            if self.size:
                self._write(WHOLE_TERMINAL + SAVE + f"\x1b[{self.size[1] - HEIGHT + 1};1H\x1b[J" + RESTORE)
                self.size = None

    def _draw_often(self) -> None:
        while not self.stopped.wait(1.0):
            try:
                self.draw()
            except (OSError, ValueError):  # the terminal has gone
                return

    def draw(self) -> None:
        with self.lock:
            if self.stopped.is_set():
                return
            size = self._room()
            if size is None:
                return
            columns, rows = size
            lines = [set_cell_size(visible(line), columns - 1) for line in self.lines(columns - 1)]
            places = range(rows - HEIGHT + 1, rows + 1)
            text = "".join(f"\x1b[{row};1H\x1b[2K{line}" for row, line in zip(places, lines, strict=True))
            if text != self.drawn:
                self._write(SAVE + text + RESTORE)
                self.drawn = text

    def _room(self) -> tuple[int, int] | None:
        """(columns, rows) of the terminal, whose last rows are kept free; None if it has none to spare."""
        try:
            size = tuple(os.get_terminal_size(self.stream.fileno()))
        except OSError:
            return None
        if size[0] < LEAST_COLUMNS or size[1] < LEAST_ROWS:
            size = None
        if size != self.size:
            if self.size:
                self._write(WHOLE_TERMINAL)
            if size:  # scroll what stands there up, and the cursor with it
                top = f"\x1b[1;{size[1] - HEIGHT}r"
                self._write("\n" * HEIGHT + f"\x1b[{HEIGHT}A" + SAVE + top + RESTORE)
            self.size, self.drawn = size, ""
        return size

    def _write(self, text: str) -> None:
        """At once: what others write must not come between."""
        self.stream.flush()
        data = text.encode(self.stream.encoding or "utf-8", "replace")
        while data:
            data = data[os.write(self.stream.fileno(), data) :]

    # ---- what it says ----

    def lines(self, width: int) -> list[str]:
        """HEIGHT lines of at most `width` columns."""
        plain = "utf" not in (self.stream.encoding or "").lower()
        line, total = self.line, self.num_steps
        count = f"step {self.done}" + (f"/{total}" if total else "")
        clocks = [f"elapsed {clock_text(time.time() - self.began)}"]
        if (left := self.left()) is not None:
            ends = time.strftime("%a %H:%M" if left > 20 * 3600 else "%H:%M", time.localtime(time.time() + left))
            clocks += [f"left {clock_text(left)}", f"ends {ends}"]
        share = self.done / total if total else 0.0
        room = width - cell_len(fit([count, *clocks], width)) - 3
        bar = ["", bar_of(share, min(room, 30), plain)][room >= 8 and bool(total)]
        first = fit([part for part in (count, bar, *clocks) if part], width)

        second = [f"reward {line['reward']:.4g}" if line.get("reward") is not None else "reward -"]
        more = []
        if self.held_out:
            step, name, value = self.held_out[-1]
            best = max(self.held_out, key=lambda seen: seen[2])
            second.append(f"held-out {name} {value:.3g}")
            more = [f"best {best[2]:.3g} at step {best[0]}" if best[0] != step else f"at step {step}"]
        if len(self.rewards) > 1 and not plain:  # the trend is worth more than the best step
            more = more if width - cell_len(fit(second + more, width)) >= 10 else []
            if (room := width - cell_len(fit(second + more, width)) - 2) >= 5:
                second.insert(1, sparkline(self.rewards, min(room, 40)))
        second += more

        seconds = phases(line)
        spent = line.get("time/step") or sum(seconds.values())
        domains = {
            key.removesuffix("/prompts"): line.get(key.replace("/prompts", "/reward"))
            for key in line
            if key.endswith("/prompts")
        }
        third = [f"{name} {reward:.3g}" for name, reward in domains.items() if reward is not None]
        silent = line.get("frac_reward_zero_std") if line.get("frac_singleton_groups") != 1 else None
        third += [f"silent {silent:.0%}"] if silent is not None else []
        third += [f"{line['time/tokens_per_second']:.0f} tok/s"] if line.get("time/tokens_per_second") else []
        third += [f"{spent:.1f} s a step"] if spent else []
        largest = sorted(seconds.items(), key=lambda phase: -phase[1])
        third += [f"{name} {value / spent:.0%}" for name, value in largest if spent and value / spent >= 0.02]
        return [
            ("-" if plain else "─") * width,
            first,
            fit(second, width),
            fit(third or ["the first step runs"], width),
        ]

    def left(self) -> float | None:
        """Seconds to the end, by the pace of the last steps, evaluations and all."""
        (first, since), (last, until) = self.ends[0], self.ends[-1]
        if not self.num_steps or last <= first:
            return None
        pace = (until - since) / (last - first)
        return max(0.0, (self.num_steps - last) * pace - (time.time() - until))


def fit(parts: list[str], width: int) -> str:
    """The first of the parts behind one another, as many as there is room for."""
    text = " " + parts[0]
    for part in parts[1:]:
        if cell_len(text) + 2 + cell_len(part) > width:
            break
        text += "  " + part
    return set_cell_size(text, width).rstrip()


def bar_of(share: float, width: int, plain: bool = False) -> str:
    full = int(share * width)
    return ("#" * full + "." * (width - full)) if plain else ("█" * full + "░" * (width - full))


def sparkline(values, width: int) -> str:
    """The last `width` values as blocks of eight heights, the lowest shown to the highest."""
    shown = list(values)[-width:]
    low, high = min(shown), max(shown)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(LEVELS[round((value - low) * scale)] for value in shown)


def clock_text(seconds: float) -> str:
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
