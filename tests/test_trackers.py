"""Trackers beside the run folder, without a network; and that no secret stands in what a run leaves."""

import json
import secrets
import sys

import pytest

from config import ConfigError, TrainConfig, load_config
from envs.mcp import read_servers
from runlog.log import RunLog, copy_name

ROW = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "completion": "# four \x1b[2J" + "long " * 1000,
    "reward": 1.0,
}


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def log_of(tmp_path, resume_step=None, **settings) -> RunLog:
    return RunLog(TrainConfig(run_name="run", output_dir=str(tmp_path), max_steps=4, **settings), resume_step)


def test_wandb_keeps_the_run_and_no_secret_is_in_the_folder(tmp_path, monkeypatch, offline):
    """Metrics, settings, samples as a table, the report as an artefact; a resumed run is the same run. Secrets stand in
    the command, the environment and the configuration of tool servers."""
    hidden = [secrets.token_hex(8) for _ in range(4)]
    header, variable, token, key = hidden
    servers = {"a": {"url": "https://host/mcp", "headers": {"Authorization": f"Bearer {header}"}}}
    servers |= {"b": {"command": "serve", "args": ["--port", "80"], "env": {"ANY": variable}}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["train.py", f"--judge_url=http://j/v1?key={key}"])
    monkeypatch.setenv("MY_API_KEY", key)
    monkeypatch.setenv("VLLM_SERVER_TOKEN", token)
    load_config(argv=[])  # reads the token, as a training does before its run folder
    read_servers(str(tmp_path / "mcp.json"), 30)
    settings = dict(mcp_config=str(tmp_path / "mcp.json"))
    log = log_of(tmp_path, report_to=["wandb", "tensorboard"], print_samples_every=1, **settings)
    log.step(1, {"reward": 0.25}, [ROW | {"rewards/exact": None}, ROW | {"rewards/late": 0.5, "verdict": "short"}])
    log.close()
    log = log_of(tmp_path, 1, resume=True, report_to=["wandb"], **settings)
    log.step(2, {"reward": 0.5})
    log.close()
    name = (log.dir / "wandb_id.txt").read_text(encoding="utf-8")
    recorded = sorted(log.dir.glob("wandb/offline-run-*/*.wandb"))
    assert len(recorded) == 2 and all(name in run.name for run in recorded)
    assert b"prompts_per_step" in recorded[0].read_bytes() and b"report.html" in recorded[0].read_bytes()
    (shown,) = log.dir.glob("wandb/offline-run-*/files/media/table/*.table.json")
    shown = json.loads(shown.read_text(encoding="utf-8"))
    assert shown["columns"][:4] == ["step", "prompt", "completion", "reward"] and shown["columns"][-1] == "verdict"
    assert shown["data"][0][:2] == [1, "user: 2 + 2?"] and "\x1b" not in shown["data"][0][2]
    files = [path for path in log.dir.rglob("*") if path.is_file()]
    found = [
        (path.name, number)
        for path in files
        for number, word in enumerate(hidden)
        if word.encode() in path.read_bytes()
    ]
    assert not found
    kept = json.loads((log.dir / copy_name(settings["mcp_config"])).read_text(encoding="utf-8"))["mcpServers"]
    assert kept["b"]["args"] == ["--port", "80"] and kept["b"]["env"] == {"ANY": "***"}


def test_what_is_missing_is_named_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match="trackio is not installed; pip install"):
        log_of(tmp_path, report_to=["trackio"])
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("wandb.login", lambda **_: False)
    with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
        log_of(tmp_path / "other", report_to=["wandb"])
