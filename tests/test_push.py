"""Weights really arrive: six kinds of policy on two ranks, a large edit, a push, and what the server then says."""

import json
from pathlib import Path

from live import Process, running


def push_all(server, compute_dtype: str, out: Path) -> list[dict]:
    command = ["tests/push_worker.py", str(server.model_dir), server.url, compute_dtype, str(out)]
    with running(Process(command, out.with_suffix(".log"), 2, VLLM_SERVER_TOKEN=server.token)) as ranks:
        assert ranks.end() == 0, ranks.text[-4000:]
    return json.loads(out.read_text(encoding="utf-8"))


def check(results: list[dict], limit: float) -> None:
    assert len(results) == 6
    for result in results:
        assert result["before"] > 0.1 > result["after"], result  # the edit was large, and it arrived
        assert result["after"] < limit and result["later"] < limit, result
        assert result["version"] and result["untouched"] and result["saved"], result
        # Of a model of 164 MiB: a layer gathered, the bucket filled from it, that packed for the wire; 13 MiB each.
        assert result["extra_mb"] < 3 * 13 + 16, result


def test_pushed_weights_are_the_trainers_in_fp32(server, tmp_path):
    check(push_all(server, "float32", tmp_path / "out.json"), 1e-4)
