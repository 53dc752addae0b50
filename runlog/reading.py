"""What log.py has written, read back."""

import json
from collections.abc import Iterator
from pathlib import Path

from config import ConfigError
from inputs.parts import transcript
from safety.storable import text_of

PHASES = ("time/generate", "time/score", "time/logprobs", "time/update", "time/push")  # in the order they happen
NOT_PHASES = ("time/step", "time/unix", "time/tokens_per_second", "time/eval")
# Columns of completions/*.parquet that log.py makes itself.
KNOWN = {"prompt", "completion", "reward", "advantage", "finish_reason", "row_number", "origin", "turns", "group"}
KNOWN |= {"domain", "policy_version", "length", "prompt_ids", "token_ids", "picture"}


def is_own(name: str) -> bool:
    """Whether a column comes from the data row or from a reward function's log_extra."""
    return name not in KNOWN and not name.startswith(("rewards/", "tokens/"))


def is_phase(name: str) -> bool:
    """Of a metric: whether it is a share of a step's seconds. time/reward/NAME are calls beside sampling."""
    return name.startswith("time/") and name.count("/") == 1 and name not in NOT_PHASES


def held_out(run_dir: Path) -> dict[str, list[str]]:
    """{metric: its value in each evaluation of the run, in order}, "-" where one has no such number."""
    evaluations = [line for line in metrics_lines(run_dir) if "eval/reward" in line]
    metrics = dict.fromkeys(key for line in evaluations for key in line if key.startswith("eval/"))
    values = {key: [line.get(key) for line in evaluations] for key in metrics}
    return {key: ["-" if value is None else f"{value:.3f}" for value in found] for key, found in values.items()}


def read_metrics(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl; None stands for a number that was not finite. A torn last line is left out."""
    return list(metrics_lines(run_dir))


def metrics_lines(run_dir: Path) -> Iterator[dict]:
    """As read_metrics, one by one: all of a long run's take gigabytes."""
    return (line for line, _, _ in metrics_bytes(run_dir))


def metrics_bytes(run_dir: Path) -> Iterator[tuple[dict, int, bytes]]:
    """As metrics_lines, each with the place in the file where it begins and with its bytes."""
    path, begin, fault = Path(run_dir) / "metrics.jsonl", 0, None
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, data in enumerate(file, 1):
            if text := data.decode("utf-8", "replace").strip():
                if fault:  # it was not the last one
                    raise ConfigError(fault)
                try:
                    line = {"step": None} | json.loads(text)
                    if not isinstance(line["step"], (int, float)):
                        raise ValueError("no step")
                except (ValueError, TypeError, RecursionError):
                    what = f"{path}, line {number} is no line of metrics: {text[:80]!r}."
                    fault = f"{what} Was the disk full? Remove the line."
                else:
                    yield line, begin, data
            begin += len(data)


def phases(metrics: dict) -> dict[str, float]:
    """Seconds by phase: the known ones in their order, then any other `time/` key, then what is left of time/step."""
    names = [*PHASES, *sorted(name for name in metrics if is_phase(name) and name not in PHASES)]
    seconds = {name.removeprefix("time/"): metrics[name] for name in names if metrics.get(name) is not None}
    if metrics.get("time/step") is not None:
        # Never negative: phases may overlap, as scoring does with generation.
        seconds["other"] = max(0.0, metrics["time/step"] - sum(seconds.values()))
    return seconds


def call_text(call: dict) -> str:
    """A call of a turn in a few words. What a run of an older version does not know of it is left out."""
    seconds = f" {call['seconds']:.2f} s" if isinstance(call.get("seconds"), float) else ""
    return f"{call['name']}{seconds}" + " failed" * bool(call.get("failed"))


def readable_prompt(text: str) -> str:
    """Chat messages, stored as JSON, as `role: text` lines; anything else as it is."""
    try:
        return transcript(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError):  # a prompt that is JSON by itself, for one
        return text_of(text)
