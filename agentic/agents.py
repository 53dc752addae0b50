"""Agents: programs with a loop, tools and a memory of their own, which ask the model by OpenAI's API (recorder.py).

    --agent my_agent.py:run                         # async def run(row, endpoint) -> reward; plain functions, too
    --agent "python solve.py --task {row_file}"     # any command

A function gets the row and an Endpoint, and returns the reward, {"reward": ..., other numbers to log}, or None, where
--reward_funcs look at what was recorded. It has --agent_timeout seconds, and costs its trajectory if it raises or is
late. A thread cannot be ended: what is late goes on without an answer from the model (safety/calls.py).

A command finds the model in OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, its row as JSON in the file that
{row_file} stands for, and works in a temporary folder of its own; words that name files beside the trainer become
absolute paths. When it ends, or its time is over, all that it has started is killed. Its exit status and the last
line that it printed are trajectory.info["agent"], {"status": 0, "last_line": "42"}.
"""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from agentic.recorder import Conversation, recorder
from config import ConfigError, TrainConfig, function_path, load_function, shorten
from envs.base import limited, read_score
from envs.tools import places
from inputs.trajectory import Trajectory, TrajectoryError
from safety.results import plain


@dataclass
class Endpoint:
    """The model, for a client of OpenAI's API."""

    base_url: str  # up to and with /v1
    api_key: str  # of this trajectory alone
    model: str
    trajectory_so_far: Callable[[], Trajectory | None]  # what was recorded; None before the first answer


def check_agent(cfg: TrainConfig) -> None:
    """ConfigError for an agent that is not there, or settings that it cannot work with."""
    own = ("env", "tools", "mcp_config", "teacher_urls", "teacher_prompt", "system_prompt", "no_apply_chat_template")
    for flag in own:
        if getattr(cfg, flag):
            raise ConfigError(
                f"--agent {cfg.agent} --{flag}: an agent brings its own tools and chat messages, which no teacher's "
                "server is told; leave one of the two out."
            )
    if function_path(cfg.agent):
        load_function(cfg.agent)
        return
    words = shlex.split(cfg.agent)
    if not words or not shutil.which(words[0]):
        raise ConfigError(
            f"--agent {cfg.agent}: there is no program {(words or [''])[0]!r}, nor is it file.py:function."
        )
    if cfg.reward_funcs == ["environment"]:
        raise ConfigError(
            f"--agent {cfg.agent}: a command returns no reward; give --reward_funcs, such as my.py:solved."
        )


async def play(row: dict, group: int, generator, cfg: TrainConfig) -> Trajectory:
    """One trajectory of the agent. TrajectoryError if it fails; what is wrong with the generator is raised as it is."""
    async with places(asyncio.get_running_loop(), "agents", cfg.agent_concurrency):
        conversation = Conversation(row, generator, cfg)
        key = recorder().open(conversation)
        endpoint = Endpoint(recorder().url, key, cfg.model_id, conversation.trajectory)
        work = run_function if function_path(cfg.agent) else run_command
        working = asyncio.ensure_future(work(row, endpoint, cfg))
        try:
            await asyncio.wait({working, conversation.fault}, return_when=asyncio.FIRST_COMPLETED)
            if conversation.fault.done():
                conversation.fault.result()
            returned, about = await working
        finally:
            recorder().close(key)
            working.cancel()
            await asyncio.wait({working})
    trajectory = conversation.trajectory(group)
    if trajectory is None:
        said = f"; it printed last: {about['last_line']}" if about.get("last_line") else ""
        raise TrajectoryError(f"--agent {cfg.agent} ended without an answer from the model{said}", row)
    trajectory.info |= {"agent": about} | rewarded(returned, trajectory.info["turns"], row, cfg)
    return trajectory


def rewarded(returned, turns: list[dict], row: dict, cfg: TrainConfig) -> dict:
    """Puts the reward that the agent returned at its last answer, as the reward `environment` reads it."""
    numbers = dict(returned) if isinstance(returned, dict) else {"reward": returned}
    reward = numbers.pop("reward", None)
    if reward is None and cfg.reward_funcs == ["environment"]:
        raise TrajectoryError(f"--agent {cfg.agent} returned no reward; return a number, or give --reward_funcs", row)
    try:
        turns[-1]["reward"] = read_score(reward) or 0.0
    except (TypeError, ValueError, OverflowError):
        form = 'a number, {"reward": a number, ...} or None'
        raise TrajectoryError(f"--agent {cfg.agent} returned {shorten(returned)}; return {form}", row) from None
    return {"metrics": numbers, "unscored": reward is None}


async def run_function(row: dict, endpoint: Endpoint, cfg: TrainConfig) -> tuple:
    given = {"row": row, "endpoint": endpoint}
    how = f"--agent {cfg.agent}", row, plain, "--agent_timeout"
    return await limited(load_function(cfg.agent), given, cfg.agent_timeout, *how), {}


async def run_command(row: dict, endpoint: Endpoint, cfg: TrainConfig) -> tuple:
    """(None, its exit status and last line)"""
    folder = Path(tempfile.mkdtemp(prefix="agent-"))
    try:
        (folder / "row.json").write_text(json.dumps(row, default=str), encoding="utf-8")
        (folder / "work").mkdir()
        words = [str(Path(w).resolve()) if Path(w).is_file() else w for w in shlex.split(cfg.agent)]
        words = [word.replace("{row_file}", str(folder / "row.json")) for word in words]
        env = os.environ | {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key}
        env |= {"OPENAI_MODEL": endpoint.model}
        with open(folder / "output", "wb") as out:
            how = dict(stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
            process = await asyncio.create_subprocess_exec(*words, cwd=folder / "work", env=env, **how)
        try:
            status = await asyncio.wait_for(process.wait(), cfg.agent_timeout)
        except TimeoutError:
            late = f"--agent {cfg.agent} took over {cfg.agent_timeout:g} s (--agent_timeout)"
            raise TrajectoryError(f"{late}; it printed last: {last_line(folder / 'output')}", row) from None
        finally:
            await asyncio.to_thread(end_all, endpoint.api_key)
            await process.wait()
        if status < 0:
            raise TrajectoryError(f"--agent {cfg.agent} was ended by signal {-status}", row)
        return None, {"status": status, "last_line": last_line(folder / "output")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end_all(key: str) -> None:
    """Kill every process that has the key in its environment: what an agent has started, and what that has left behind
    when it ended, in sessions of its own, too."""

    def holds(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):  # it has ended, or is somebody else's
            return process.environ().get("OPENAI_API_KEY") == key
        return False

    while found := [process for process in psutil.process_iter() if holds(process)]:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=1)


def last_line(path: Path, most: int = 2000) -> str:
    with open(path, "rb") as file:
        file.seek(max(path.stat().st_size - 64 * 1024, 0))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[-most:] for line in reversed(lines) if line.strip()), "")
