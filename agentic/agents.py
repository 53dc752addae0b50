"""Agents: programs with their own loop, tools and memory, which call the model by OpenAI's API (recorder.py).

    --agent my_agent.py:run                         # async def run(row, endpoint) -> reward; plain functions, too
    --agent "python solve.py --task {row_file}"     # any command

A function gets the row and an Endpoint, and returns the reward, {"reward": ..., other numbers to log}, or None if
--reward_funcs score what was recorded. If it raises, or takes over --agent_timeout seconds, its trajectory is left out.
A thread cannot be ended: a late function keeps running, but gets no more answers from the model (safety/calls.py).

A command finds the model in OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and its row as JSON in the file that
{row_file} stands for. It runs in a temporary folder of its own; words that name files in the trainer's folder become
absolute paths. When it ends, or its time is over, all processes that it has started are killed. Its exit status and the
last line that it printed are trajectory.info["agent"], {"status": 0, "last_line": "42"}.
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
from envs.base import read_score, result_of
from envs.tools import slots
from inputs.trajectory import Trajectory, TrajectoryError
from safety.results import plain


@dataclass
class Endpoint:
    """The model, for a client of OpenAI's API."""

    base_url: str  # ends in /v1
    api_key: str  # of this trajectory alone
    model: str
    trajectory_so_far: Callable[[], Trajectory | None]  # the recorded part; None before the first answer


def check_agent(cfg: TrainConfig) -> None:
    """ConfigError if there is no such agent, or for settings that it cannot work with."""
    flags = ("env", "tools", "mcp_config", "teacher_urls", "teacher_prompt", "system_prompt", "no_apply_chat_template")
    for flag in flags:
        if getattr(cfg, flag):
            raise ConfigError(f"--agent and --{flag}: an agent has its own tools and messages; leave one flag out.")
    if function_path(cfg.agent):
        load_function(cfg.agent)
        return
    words = shlex.split(cfg.agent)
    if not words or not shutil.which(words[0]):
        program = words[0] if words else ""
        raise ConfigError(f"--agent {cfg.agent}: there is no program {program!r}; give a command, or file.py:function.")
    if cfg.reward_funcs == ["environment"]:
        fault = "a command returns no reward; give --reward_funcs, such as my.py:solved"
        raise ConfigError(f"--agent {cfg.agent}: {fault}.")


async def play(row: dict, group: int, generator, cfg: TrainConfig) -> Trajectory:
    """One trajectory of the agent. TrajectoryError if it fails; errors of the generator are raised unchanged."""
    async with slots(asyncio.get_running_loop(), "agents", cfg.agent_concurrency):
        conversation = Conversation(row, generator, cfg)
        key = recorder().open(conversation)
        endpoint = Endpoint(recorder().url, key, cfg.model_id, conversation.trajectory)
        work = run_function if function_path(cfg.agent) else run_command
        working = asyncio.ensure_future(work(row, endpoint, cfg))
        try:
            await asyncio.wait({working, conversation.fault}, return_when=asyncio.FIRST_COMPLETED)
            if conversation.fault.done():
                conversation.fault.result()
            result, outcome = await working
        finally:
            recorder().close(key)
            working.cancel()
            await asyncio.wait({working})
    trajectory = conversation.trajectory(group)
    if trajectory is None:
        hint = f"; it printed last: {outcome['last_line']}" if outcome.get("last_line") else ""
        raise TrajectoryError(f"--agent {cfg.agent} ended without an answer from the model{hint}", row)
    trajectory.info |= {"agent": outcome} | store_reward(result, trajectory.info["turns"], row, cfg)
    return trajectory


def store_reward(result, turns: list[dict], row: dict, cfg: TrainConfig) -> dict:
    """Store the agent's reward in its last turn, where the reward function `environment` finds it."""
    numbers = dict(result) if isinstance(result, dict) else {"reward": result}
    reward = numbers.pop("reward", None)
    if reward is None and cfg.reward_funcs == ["environment"]:
        raise TrajectoryError(f"--agent {cfg.agent} returned no reward; return a number, or give --reward_funcs", row)
    try:
        turns[-1]["reward"] = read_score(reward) or 0.0
    except (TypeError, ValueError, OverflowError):
        form = 'a number, {"reward": a number, ...} or None'
        raise TrajectoryError(f"--agent {cfg.agent} returned {shorten(result)}; return {form}", row) from None
    return {"metrics": numbers, "unscored": reward is None}


async def run_function(row: dict, endpoint: Endpoint, cfg: TrainConfig) -> tuple:
    arguments = {"row": row, "endpoint": endpoint}
    details = f"--agent {cfg.agent}", row, plain, "--agent_timeout"
    return await result_of(load_function(cfg.agent), arguments, cfg.agent_timeout, *details), {}


async def run_command(row: dict, endpoint: Endpoint, cfg: TrainConfig) -> tuple:
    """(None, the command's exit status and last line)"""
    with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        (folder / "row.json").write_text(json.dumps(row, default=str), encoding="utf-8")
        (folder / "work").mkdir()
        words = [str(Path(w).resolve()) if Path(w).is_file() else w for w in shlex.split(cfg.agent)]
        words = [word.replace("{row_file}", str(folder / "row.json")) for word in words]
        env = os.environ | {"OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key}
        env |= {"OPENAI_MODEL": endpoint.model}
        with open(folder / "output", "wb") as out:
            options = dict(stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
            process = await asyncio.create_subprocess_exec(*words, cwd=folder / "work", env=env, **options)
        try:
            status = await asyncio.wait_for(process.wait(), cfg.agent_timeout)
        except TimeoutError:
            fault = f"--agent {cfg.agent} took over {cfg.agent_timeout:g} s (--agent_timeout)"
            raise TrajectoryError(f"{fault}; it printed last: {last_line(folder / 'output')}", row) from None
        finally:
            await asyncio.to_thread(end_all, endpoint.api_key)
            await process.wait()
        if status < 0:
            raise TrajectoryError(f"--agent {cfg.agent} was ended by signal {-status}", row)
        return None, {"status": status, "last_line": last_line(folder / "output")}


def end_all(key: str) -> None:
    """Kill every process that has the key in its environment: those that an agent started, even if it has ended, or
    they are in other sessions."""

    def holds(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):  # the process has ended, or is another user's
            return process.environ().get("OPENAI_API_KEY") == key
        return False

    while processes := [process for process in psutil.process_iter() if holds(process)]:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=1)


def last_line(path: Path, limit: int = 2000) -> str:
    with open(path, "rb") as file:
        file.seek(max(path.stat().st_size - 64 * 1024, 0))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[-limit:] for line in reversed(lines) if line.strip()), "")
