"""Draws docs/images/demo.svg, the README's picture, from the measured runs of the demo in docs/results.md.

    pip install matplotlib && python benchmarks/demo_curve.py

Each row of the table there is one run of `bash scripts/demo.sh`. Nothing is smoothed or averaged.
"""

import re
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
STEPS = (0, 10, 20, 30)
RUNS = {  # how a row of the table begins -> (label, colour)
    "as it is": ("train_grpo.py (3 runs, 9 to 11 s a step)", "#2563eb"),
    "the same again": (None, "#2563eb"),
    "and once more": (None, "#2563eb"),
    "`bash scripts/demo.sh ppo`": ("train_ppo.py (36 s a step)", "#d97706"),
}


def measured() -> dict[str, list[float]]:
    """{how the row begins: share right at STEPS}, of rows with all four; the first row of a name counts."""
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    found: dict[str, list[float]] = {}
    for name, numbers in re.findall(r"^\| (.*?) \|((?: \.\d\d \|){4})$", text, re.M):
        begins = next((begin for begin in RUNS if name.startswith(begin)), None)
        if begins and begins not in found:
            found[begins] = [float(number) for number in re.findall(r"\.\d\d", numbers)]
    return found


def main() -> None:
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for name, values in measured().items():
        label, color = RUNS[name]
        axes.plot(STEPS, values, color=color, marker="o", lw=1.8, label=label)
    axes.set(xlabel="training step (64 completions each)", ylabel="held-out sums right", ylim=(0, 1), xticks=STEPS)
    axes.set_title("SmolLM2-135M learns two-digit sums on two CPU cores", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eef0f3")
    axes.legend(frameon=False, loc="lower right")
    path = ROOT / "docs" / "images" / "demo.svg"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    print(path)


if __name__ == "__main__":
    main()
