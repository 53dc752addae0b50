"""Runs: two with one name, numbers that are not finite, signals, lost ranks and launchers."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

from case import BASE, ROOT, SMALL, Ended, Seen, alive, either, goes_on, named, shorten, wait_until
from server_fixture import TINY

# ---- one name twice --------------------------------------------------------------------------------------------------


def two_with_one_name(at):
    """two trainers with one run name, started at once -> named: the second is refused"""
    runs = [at.start("--max_steps 15 ") for _ in range(2)]
    ends = [at.ended(run, 25) for run in runs]
    failed = [end for end in ends if end.status]
    if len(failed) != 1:
        return Seen("silent" if not failed else "ended", f"{2 - len(failed)} of 2 went on; {ends[0].tail}")
    return named(failed[0], "run holds|lock|in use|another process|already", "another name|resume|end it|stop")


def resumed_while_it_runs(at):
    """--resume of a run that still runs -> named: refused, the first goes on"""
    first = at.start("--max_steps 400 --save_steps 1 ")
    if not at.reached(first, "step 2/"):
        return Seen("broken", first.text[-300:])
    second = at.train("--resume --max_steps 400 --save_steps 1 ", 20)
    still = first.members[0].poll() is None
    seen = named(second, "lock|in use|still runs|another process|already", "end it|stop|wait|another")
    return seen if still else Seen("ended", f"the first ended: {seen.what}")


def resumed_twice_after_kill(at):
    """kill -9 of a run, then --resume -> survived: the lock of the dead one does not hold it up"""
    run = at.start("--max_steps 400 --save_steps 1 ")
    at.reached(run, "step 2/")
    run.kill()
    newest = max(int(p.name.split("_")[1]) for p in (at.runs / "run" / "checkpoints").glob("step_*"))
    return goes_on(at.train(f"--resume --max_steps {newest + 1} "), steps=newest + 1)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def huge_learning_rate(at):
    """a learning rate of 1e38 -> named: weights that are not finite are never saved"""
    end = at.train("--learning_rate 1e38 --max_steps 1 --reward_funcs repetition length ")
    from safetensors.torch import load_file

    for path in at.runs.glob("run/checkpoints/*/model.safetensors"):
        if not all(bool(t.isfinite().all()) for t in load_file(path).values()):
            return Seen("silent", f"status {end.status}, weights that are not finite in {path.parent.name}")
    return named(end, "finite|nan|inf", "learning_rate|lower")


def weights_not_finite(at):
    """a model whose weights hold a NaN -> named: before training"""
    from safetensors.torch import load_file, save_file

    folder = at.given / "broken"
    shutil.copytree(TINY, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return named(at.train(f"--model_id {folder} "), "finite|nan", "model|weights")


def model_files_damaged(at):
    """a model folder with a torn config.json, a cut safetensors file, or no tokenizer -> named: each"""
    for number, (name, keep) in enumerate((("config.json", 40), ("model.safetensors", 5000), ("tokenizer.json", 100))):
        folder = at.given / f"broken_{number}"
        shutil.copytree(TINY, folder)
        (folder / name).write_bytes((folder / name).read_bytes()[:keep])
        seen = named(
            at.train(f"--model_id {folder} --run_name r{number} "),
            f"broken_{number}",
            "model_id|folder|damaged|complete|copy",
        )
        if seen.verdict != "named":
            return Seen(seen.verdict, f"{name}: {seen.what}")
    return seen


# ---- signals and ranks -----------------------------------------------------------------------------------------------


def _signalled(at, *signals, gap: float = 0.5, ranks: int = 1, flags: str = "") -> tuple:
    run = at.start(f"--max_steps 2000 {flags}", ranks=ranks)
    if not at.reached(run, "step 2/"):
        raise RuntimeError(run.text[-300:])
    for name in signals:
        with contextlib.suppress(ProcessLookupError):
            os.kill(run.members[0].pid, name)
        wait_until(lambda: run.members[0].poll() is not None, gap)
    return run, at.ended(run, 30)


def interrupt(at):
    """Ctrl-C -> named: what is lost, and a report is written"""
    _, end = _signalled(at, signal.SIGINT)
    seen = named(end, "interrupted", "save_steps")
    return seen if (end.run / "report.html").exists() else Seen("ended", f"no report ({seen.what})")


def interrupt_twice(at):
    """Ctrl-C twice in a tenth of a second -> named: ends at once"""
    _, end = _signalled(at, signal.SIGINT, signal.SIGINT, gap=0.1)
    return named(end, "interrupt", "")


def terminated(at):
    """SIGTERM -> named"""
    _, end = _signalled(at, signal.SIGTERM)
    return named(end, "SIGTERM", "")


def hung_up(at):
    """SIGHUP, as when a terminal closes -> named: no process is left"""
    _, end = _signalled(at, signal.SIGHUP)
    return named(end, "", "") if end.status else goes_on(end, "status 0")


def stopped_and_continued(at):
    """SIGSTOP for 3 s, then SIGCONT -> survived"""
    run = at.start("--max_steps 12 ")
    at.reached(run, "step 2/")
    os.kill(run.members[0].pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(run.members[0].pid, signal.SIGCONT)
    return goes_on(at.ended(run), steps=12)


def output_pipe_closed(at):
    """the reader of the run's output goes away (| head -1) -> survived or named: complete, or not status 0"""
    flags = f"{SMALL} {BASE}--output_dir {at.runs} --run_name run --max_steps 4 ".split()
    run = subprocess.Popen(
        [sys.executable, "train_grpo.py", *flags], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    run.stdout.readline()
    run.stdout.close()
    try:
        status = run.wait(at.remaining)
    except subprocess.TimeoutExpired:
        run.kill()
        return Seen("hung", "still running")
    end = Ended(status, "", run=at.runs / "run")
    return goes_on(end, steps=4) if status == 0 else Seen("named", f"status {status}")


def plain_terminal(at):
    """no UTF-8 (LC_ALL=C, PYTHONUTF8=0, ascii), a prompt with emoji, samples printed -> survived"""
    rows = at.rows([{"prompt": f"\N{GRINNING FACE} é {n}", "answer": "1"} for n in range(8)])
    env = dict(LC_ALL="C", LANG="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0", TERM="dumb")
    flags = f"{SMALL} {BASE}{rows} --print_samples_every 1 --output_dir {at.runs} --run_name run".split()
    return goes_on(at.ended(at.command(sys.executable, "train_grpo.py", *flags, **env)), steps=2)


def rank_killed(at):
    """kill -9 of one of two ranks, under torchrun -> named: signal 9 and how to go on"""
    run, ranks = _torchrun(at)
    ranks[1].kill()
    end = at.ended(run, 40)
    seen = named(end, "SIGKILL|signal 9", "resume")
    left = [p for p in ranks if alive(p)]
    return Seen("leaked", f"{len(left)} ranks live on") if left else seen


def rank_stopped(at):
    """one of two ranks is stopped for good -> named: after --dist_timeout"""
    run = at.start("--max_steps 2000 --dist_timeout 5 ", ranks=2)
    if not at.reached(run, "step 2/"):
        return Seen("broken", run.text[-300:])
    os.kill(run.members[1].pid, signal.SIGSTOP)
    wait_until(lambda: run.members[0].poll() is not None, 40)
    status = run.members[0].poll()
    os.kill(run.members[1].pid, signal.SIGCONT)
    return named(Ended(status, run.text, 40), "waited 5 s .* for rank 1", "dist_timeout.*resume")


def rank_raises(at):
    """one of two ranks' reward raises -> named: by that rank, the other does not wait for ever"""
    code = "import os\ndef bad(completions, **c):\n    if os.environ['RANK'] == '1': raise ValueError('rank one')\n"
    path = at.file("bad.py", code + "    return [1.0] * len(completions)\n")
    return named(at.train(f"--reward_funcs {path}:bad --dist_timeout 10 ", 40, ranks=2), "rank one", "bad")


def _torchrun(at):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train_grpo.py"]
    flags = f"{SMALL} {BASE}--output_dir {at.runs} --run_name run --max_steps 3000".split()
    run = at.command(*launch, *flags)
    if not at.reached(run, "step 2/"):
        raise RuntimeError(run.text[-300:])
    ranks = [p for p in run.children() if "train_grpo.py" in " ".join(p.cmdline()) and "RANK" in p.environ()]
    return run, sorted(ranks, key=lambda p: p.environ()["RANK"])


def launcher_killed(at):
    """kill -9 of torchrun -> survived: its ranks end by themselves"""
    run, ranks = _torchrun(at)
    run.members[0].kill()
    run.members[0].wait()
    wait_until(lambda: not any(map(alive, ranks)), 10)
    left = [p for p in ranks if alive(p)]
    return Seen("leaked", f"{len(left)} ranks live on") if left else Seen("survived", "both ended")


def launcher_terminated(at):
    """SIGTERM to torchrun -> named: its ranks end"""
    run, ranks = _torchrun(at)
    os.kill(run.members[0].pid, signal.SIGTERM)
    end = at.ended(run, 40)
    left = [p for p in ranks if alive(p)]
    return Seen("leaked", f"{len(left)} ranks live on") if left else named(end, "SIGTERM|signal", "")


def port_taken(at):
    """the rendezvous port is taken -> named"""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        env = dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]))
        return named(at.train("", **env), "EADDRINUSE|in use", "standalone|master_port")


def odd_ranks(at):
    """WORLD_SIZE that is no number, RANK without MASTER_ADDR -> named"""
    for number, env in enumerate((dict(WORLD_SIZE="two", RANK="0"), dict(WORLD_SIZE="2", RANK="0"))):
        seen = named(
            at.train(f"--run_name r{number} ", **env), "WORLD_SIZE|MASTER_ADDR", "torchrun|WORLD_SIZE|MASTER_ADDR"
        )
        if seen.verdict != "named":
            return seen
    return seen


# ---- scripts/serve_and_train.sh --------------------------------------------------------------------------------------


def _served(at):
    """The script with a server of its own and a trainer that trains; its processes."""
    name = f"fault_{at.folder.name[-8:]}"
    flags = "--dataset_id examples/sums.py:rows --prompts_per_step 2 --num_generations 2 --max_prompt_length 64 "
    flags += "--max_completion_length 200 --min_completion_length 200 --reward_funcs length --max_steps 2000 "
    flags += "--compute_dtype float32"
    command = ["bash", "scripts/serve_and_train.sh", name, "models/tiny", "512", "train_grpo.py", *flags.split()]
    path = os.pathsep.join([str(ROOT / ".venv" / "bin"), os.environ["PATH"]])
    run = at.command(*command, PATH=path, SERVER_FLAGS="--dtype float32")
    at.stack.callback(shutil.rmtree, ROOT / "runs" / name, ignore_errors=True)
    at.stack.callback(lambda: (ROOT / "runs" / f"{name}-server.log").unlink(missing_ok=True))
    if not at.reached(run, "step 1/", 120):
        raise RuntimeError(run.text[-500:])
    return run, run.children()


def script_killed(at, limit=150):
    """kill -9 of scripts/serve_and_train.sh -> survived: server and trainer end by themselves"""
    run, family = _served(at)
    run.members[0].kill()
    run.members[0].wait()
    wait_until(lambda: not any(map(alive, family)), 30)  # as SECURITY.md promises
    left = [" ".join(p.cmdline())[:60] for p in family if alive(p)]
    return (
        Seen("leaked", f"{len(left)} live on: {shorten(', '.join(left))}")
        if left
        else Seen("survived", f"{len(family)} processes ended")
    )


def script_interrupted(at, limit=150):
    """Ctrl-C (SIGTERM to the script, as in the background) -> named: server and trainer end, and it says so"""
    run, family = _served(at)
    os.kill(run.members[0].pid, signal.SIGTERM)
    end = at.ended(run, 40)
    left = [p for p in family if alive(p)]
    return Seen("leaked", f"{len(left)} live on") if left else named(end, "interrupted|stopped", "")


def scripts_server_killed(at, limit=150):
    """kill -9 of the script's server -> named: the trainer's status and the server's last lines"""
    run, family = _served(at)
    servers = [p for p in family if "vllm_server.py" in " ".join(p.cmdline())]
    servers[0].kill()
    end = at.ended(run, 40)
    left = [p for p in family if alive(p)]
    return Seen("leaked", f"{len(left)} live on") if left else named(end, "is gone", "start it again|resume")


# ---- around the run --------------------------------------------------------------------------------------------------


def tracker_out_of_reach(at):
    """--report_to wandb where it is not installed, or with a key that is none -> survived or named: before sampling"""
    end = at.train("--report_to wandb ")
    return either(end, "wandb", "install|login|report_to|WANDB_API_KEY|offline")


def hub_out_of_reach(at):
    """--push_to_hub without network -> named: the checkpoint's place is told"""
    return named(
        at.train("--push_to_hub --hub_repo_id nobody/nothing "),
        "hub|offline|connect|HF_HUB_OFFLINE",
        "checkpoints|upload|mend|network",
    )


def no_home(at):
    """no HOME, an unwritable cache, a closed standard input -> survived"""
    env = {k: v for k, v in os.environ.items() if k != "HOME"} | dict(HF_HOME="/proc/nowhere", OMP_NUM_THREADS="1")
    flags = f"{SMALL} {BASE}--output_dir {at.runs} --run_name run".split()
    end = subprocess.run(
        [sys.executable, "train_grpo.py", *flags],
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=at.remaining,
        encoding="utf-8",
    )
    return goes_on(Ended(end.returncode, end.stdout + end.stderr, run=at.runs / "run"), steps=2)


def secret_on_the_command_line(at):
    """--server_token on the command line of a run -> survived: not in its folder, and masked in what it prints"""
    token = os.environ["JUDGE_TOKEN"]
    end = at.train(f"--server_token {token} ")
    return goes_on(end, steps=2)  # every fault looks for secrets in runs/ and logs
