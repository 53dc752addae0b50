"""The processes of a server: what they show of its token, where their files lie, and that none outlives its parent."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
from certificates import Authority
from live import SMALL, running, trainer
from safetensors.torch import load_file
from server_fixture import ROOT, free_port, make_tiny
from test_push import check, push_all
from transformers import AutoModelForCausalLM

import teachers
from config import ConfigError, TrainConfig
from inputs.processor import load_processor
from vllm_client import ServerError, VLLMClient

pytestmark = pytest.mark.in_turn


@pytest.fixture(scope="module")
def odd_server(tmp_path_factory):
    """In bfloat16, behind TLS, with a token as people write them, in a file, started by a process that can be killed;
    its temporary files in a folder of their own, where a server that was killed has left its own."""
    folder = Path(tempfile.mkdtemp(prefix="odd_"))
    (folder / "token").write_text("Größe-☃-s3cret \n", encoding="utf-8")
    (folder / "token").chmod(0o600)
    left = folder / "vllm_server_left"
    left.mkdir()
    (left / "lock").touch()
    (left / "socket").touch()
    port, log = free_port(), folder / "log"
    server = [str(ROOT / "vllm_server.py"), "--model", str(make_tiny()), "--port", str(port), "--exit-with-parent"]
    authority = Authority(tmp_path_factory.mktemp("certificates"))
    server += ["--ssl-certfile", str(authority.sign("server"))]
    server += ["--token-file", str(folder / "token"), "--dtype", "bfloat16", "--max-model-len", "512"]
    script = "import subprocess, sys; p = subprocess.Popen([sys.executable, *sys.argv[1:]]); print(p.pid, flush=True); "
    script += "p.wait()"
    env = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    env |= {"TMPDIR": str(folder), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with open(log, "w", encoding="utf-8") as out:
        launcher = subprocess.Popen(
            [sys.executable, "-c", script, *server],
            stdout=subprocess.PIPE,
            stderr=out,
            env=env,
            text=True,
            encoding="utf-8",
        )
    main = psutil.Process(int(launcher.stdout.readline()))
    try:
        for line in launcher.stdout:
            if "ready" in line:
                break
        with mock.patch.dict(os.environ, SSL_CERT_FILE=str(authority.file)):
            yield launcher, main, f"https://127.0.0.1:{port}", folder
    finally:
        for process in (launcher, main):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(folder)


def test_right_tokens_with_odd_characters_are_right(odd_server):
    _, _, url, _ = odd_server
    for token in ("Größe-☃-s3cret", "Größe-☃-s3cret\n", " Größe-☃-s3cret "):
        assert VLLMClient([url], token).server_info()[0]["policy_version"] == 0
    with pytest.raises(ServerError, match="refuses the token"):
        VLLMClient([url], "Größe-?-s3cret").server_info()


def test_a_teacher_behind_tls_is_asked_with_its_token(odd_server, monkeypatch):
    """By the certificates of SSL_CERT_FILE: --server_ca is for the policy's own server. Without one nobody waits."""
    _, _, url, folder = odd_server
    monkeypatch.setenv("TEACHER_TOKEN", "Größe-☃-s3cret")
    how = dict(model_id="models/tiny", teacher_urls=[url], advantage="distill", max_prompt_length=64)
    how |= dict(max_completion_length=64, server_ca=str(folder / "none.pem"), client_cert=str(folder / "none.pem"))
    processor = load_processor("models/tiny")
    teachers._servers.cache_clear()
    teachers.connect(TrainConfig(**how), processor, [])
    said = asyncio.run(teachers.servers(TrainConfig(**how)).score(list(range(40, 60)), 3))
    assert len(said.logprobs) == 19 and all(-40 < p <= 0 for p in said.logprobs) and said.top_ids.shape == (19, 3)
    teachers._servers.cache_clear()
    monkeypatch.delenv("SSL_CERT_FILE")
    start = time.monotonic()
    with pytest.raises(ConfigError, match=f"{url}: no secure connection .*certificate.*SSL_CERT_FILE"):
        teachers.connect(TrainConfig(**how, server_timeout=60), processor, [])
    assert time.monotonic() - start < 20


def test_no_process_of_the_server_shows_the_token(odd_server):
    _, main, _, folder = odd_server
    family = [main, *main.children(recursive=True)]
    for process in family:
        shown = " ".join(process.cmdline()) + json.dumps(process.environ(), ensure_ascii=False)
        assert "s3cret" not in shown, process.name()


def test_what_would_let_others_in_is_off():
    """Set to 1 where the server was started. (Its engine's own environment cannot be read: it changes its title.)"""
    look = "import os, vllm_server as v; v.set_environment(); print(os.environ['VLLM_ALLOW_INSECURE_SERIALIZATION'])"
    env = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", look], capture_output=True, text=True, timeout=60, env=env, encoding="utf-8"
    )
    assert done.stdout == "0\n", done.stderr


def test_a_server_ends_an_engine_that_has_no_name_yet(tmp_path):
    """It was spared when those to end were known by their names, which they set after half a second of imports."""
    (tmp_path / "starts.py").write_text(
        "import multiprocessing, time, psutil, vllm_server\n"
        "if __name__ == '__main__':\n"
        "    engine = multiprocessing.get_context('spawn').Process(target=time.sleep, args=[600])\n"
        "    engine.start()\n"
        "    vllm_server.end_children()\n"
        "    print(psutil.pid_exists(engine.pid))\n"
        "    engine.kill()\n",
        encoding="utf-8",
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "starts.py"], cwd=tmp_path, env=env, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.stdout == "False\n", done.stderr


def test_sockets_lie_in_a_folder_of_ones_own(odd_server):
    """And what a killed server had left was removed when this one started."""
    _, _, _, folder = odd_server
    (own,) = folder.glob("vllm_server_*")
    assert own.name != "vllm_server_left" and own.stat().st_mode & 0o777 == 0o700
    assert not [path for path in folder.rglob("*") if path.is_socket() and path.parent != own]
    assert [path for path in own.iterdir() if path.is_socket()]


def test_pushed_weights_are_the_trainers_in_bf16(odd_server, tmp_path):
    server = SimpleNamespace(url=odd_server[2], token="Größe-☃-s3cret", model_dir=make_tiny())
    check(push_all(server, "bfloat16", tmp_path / "out.json"), 0.05)


RECORDER = """
import json
from pathlib import Path
def even(completion_ids, trajectories, **_):
    with open(Path(__file__).with_name("sampled.jsonl"), "a") as file:
        for t in trajectories:
            print(json.dumps([t.policy_version, t.prompt_ids, t.token_ids, t.logprobs]), file=file)
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]
"""


@pytest.mark.parametrize("ranks, more", [(1, ""), (1, "--use_peft"), (2, "--strategy fsdp2")])
def test_a_checkpoint_gives_the_logprobs_that_the_server_gave(odd_server, ranks, more, tmp_path):
    """The one between and the last: in the server's dtype, and its log-probs are those of the weights it was pushed."""
    (tmp_path / "even.py").write_text(RECORDER, encoding="utf-8")
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "1 + 1 ="}\n' * 2, encoding="utf-8")
    flags = f"{SMALL} --generator vllm --server_urls {odd_server[2]} --reward_funcs {tmp_path}/even.py:even {more} "
    flags += f"--max_steps 2 --save_steps 1 --output_dir {tmp_path} --run_name run --learning_rate 1e-2 "
    flags += f"--eval_steps 1 --eval_dataset_id {tmp_path}/held_out.jsonl --eval_split train"
    token = dict(VLLM_SERVER_TOKEN="Größe-☃-s3cret")
    with running(trainer(tmp_path / "log", *flags.split(), ranks=ranks, **token)) as run:
        assert run.end() == 0, run.text[-3000:]
    sampled = [json.loads(line) for line in (tmp_path / "sampled.jsonl").read_text(encoding="utf-8").splitlines()]
    folders = [make_tiny(), *(tmp_path / "run" / "checkpoints" / f"step_{step}" for step in (1, 2))]
    for folder in folders[1:]:
        weights = load_file(folder / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values() if tensor.ndim > 1} == {torch.bfloat16}
    far = torch.tensor([[difference(folder, sampled, version) for folder in folders] for version in range(3)])
    assert (far.diag() < 0.03).all() and (far + torch.eye(3) > 0.1).all(), far


def difference(folder: Path, sampled: list, version: int) -> float:
    """Mean |server - model| of the log-probs that weights of this version gave, by the model in this folder."""
    model, differences = AutoModelForCausalLM.from_pretrained(folder), []
    for _, prompt, tokens, given in (each for each in sampled if each[0] == version):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        differences += (logprobs.gather(1, torch.tensor(tokens)[:, None])[:, 0] - torch.tensor(given)).abs().tolist()
    return sum(differences) / len(differences)


def test_the_server_ends_with_the_process_that_started_it(odd_server):
    """Last: it ends that server. kill -9 of the parent; everything gone within 10 s, the folder, too."""
    launcher, main, _, folder = odd_server
    family = [main, *main.children(recursive=True)]
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert {path.name for path in folder.iterdir()} <= {"token", "log"} | {
        path.name for path in folder.glob("torchinductor*")
    }


# ---- scripts/serve_and_train.sh -------------------------------------------------------------------------------------

FLAGS = (
    "--dataset_id examples/sums.py:rows --reward_funcs last_number --max_prompt_length 128 --max_completion_length 12 "
)
FLAGS += "--prompts_per_step 2 --num_generations 2 --max_steps 1000 --learning_rate 1e-6 --compute_dtype float32"


def test_kill_9_of_the_launcher_leaves_nothing(tmp_path):
    """Server, trainer and whatever they started are gone within 30 s: 10 s for the trainer to write its report, 10 s
    for the server, and what has not ended by then is killed."""
    command = ["bash", "scripts/serve_and_train.sh", "left", str(make_tiny()), "512", "train_grpo.py", *FLAGS.split()]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    temporary = Path(tempfile.mkdtemp(prefix="left_"))  # a short name: addresses of sockets are
    env = os.environ | {"PATH": path, "TMPDIR": str(temporary), "SERVER_FLAGS": "--dtype float32"}
    with open(tmp_path / "log", "w", encoding="utf-8") as out:
        launcher = subprocess.Popen(
            [*command, "--output_dir", str(tmp_path)], cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 240
        while "step" not in (text := (tmp_path / "log").read_text(encoding="utf-8")) or "reward" not in text:
            assert launcher.poll() is None and time.monotonic() < deadline, text[-3000:]
            time.sleep(0.5)
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert len(family) > 3
        start = time.monotonic()
        launcher.kill()
        launcher.wait()
        _, alive = psutil.wait_procs(family, timeout=30)
        alive = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        assert not alive, [process.cmdline() for process in alive]
        print(f"all gone after {time.monotonic() - start:.1f} s")
        assert not [path for path in temporary.iterdir() if "vllm" in path.name]
    finally:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR", "").startswith(str(temporary)):
                    process.kill()
        shutil.rmtree(temporary)
