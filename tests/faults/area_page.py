"""The page and the run folder: full disks, odd files in folders, strangers at the page's door, other locales."""

import contextlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import requests
from area_checkpoints import _small_disk
from case import BASE, ROOT, SMALL, Seen, goes_on, named, shorten, wait_until
from looking_at import looking
from made_runs import make_run

LONG = "--max_steps 60 --log_tokens_every 1 "
REMEDY = "Free some space|output_dir"

# ---- disks -----------------------------------------------------------------------------------------------------------


def _fill(at) -> None:
    with contextlib.suppress(OSError), open(at.runs / "filler", "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 8):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def _torn(at) -> str | None:
    """What is wrong with the lines of metrics, if anything is."""
    lines = (at.runs / "run" / "metrics.jsonl").read_text(encoding="utf-8").split("\n")
    try:
        steps = [json.loads(line)["step"] for line in lines if line]
    except ValueError:
        return "a torn line in metrics.jsonl"
    return None if steps == list(range(1, len(steps) + 1)) else f"steps {steps}"


def _state(at) -> str:
    return json.loads((at.runs / "run" / "state.json").read_text(encoding="utf-8"))["state"]


def _on_full_disk(at, flags: str = "", megabytes: int = 12, filled=_fill):
    """A run on a small disk that is full from its third step on; None where nothing can be mounted."""
    if not _small_disk(at, megabytes):
        return None
    run = at.start(LONG + flags)
    if at.reached(run, "step 3/"):
        filled(at)
        at.reached(run, "could not be written")
    return run


def disk_full_for_a_while(at, limit=90):
    """the disk of the run folder is full for some steps -> survived: every step and completion is in its file"""
    run = _on_full_disk(at, megabytes=60)
    if run is None:
        return Seen("skipped", "no mounts allowed here")
    said = "could not be written" in run.text
    (at.runs / "filler").unlink(missing_ok=True)
    end = at.ended(run)
    wrong = _torn(at) or (None if said else "no warning was given")
    missing = 60 - len(list(at.runs.glob("run/completions/*.parquet")))
    given_up = end.text.count("is given up")
    return goes_on(end, wrong or (f"{missing} files of completions missing" if missing > given_up else None), steps=60)


def disk_full_to_the_end(at, limit=90):
    """the disk of the run folder stays full -> named: which file and what helps; state.json says failed"""
    run = _on_full_disk(at)
    if run is None:
        return Seen("skipped", "no mounts allowed here")
    seen = named(at.ended(run), "could not be written|space", REMEDY)
    if wrong := _torn(at) or (None if _state(at) == "failed" else f"state.json says {_state(at)}"):
        return Seen("silent", wrong)
    return seen


def disk_full_at_start(at):
    """the disk is full before the run begins -> named: before anything is sampled"""
    if not _small_disk(at, 5):
        return Seen("skipped", "no mounts allowed here")
    _fill(at)
    end = at.train("")
    return Seen("silent", "a step was made") if "step 1/" in end.text else named(end, "space left", REMEDY)


def disk_full_and_killed(at, limit=120):
    """kill -9 while the disk is full, then room again and --resume -> survived: the same lines as without"""
    run = _on_full_disk(at, "--save_steps 2 ", megabytes=60)
    if run is None:
        return Seen("skipped", "no mounts allowed here")
    run.kill()
    (at.runs / "filler").unlink(missing_ok=True)
    end = at.train("--resume --save_steps 2 --max_steps 8 ")
    return goes_on(end, _torn(at), steps=8)


def disk_full_and_interrupted(at, limit=90):
    """SIGTERM while the disk is full -> survived: state.json does not go on saying running"""
    run = _on_full_disk(at)
    if run is None:
        return Seen("skipped", "no mounts allowed here")
    os.kill(run.members[0].pid, signal.SIGTERM)
    end = at.ended(run, 30)
    if end.status is None:
        return Seen("hung", end.tail)
    return Seen("silent", "still running") if _state(at) == "running" else Seen("survived", f"state {_state(at)}")


def no_inodes(at, limit=90):
    """no new file can be made (tmpfs with few inodes), old ones can grow -> survived or named: no line is lost"""

    def used_up(at):
        for _ in range(20):  # the run makes files meanwhile, and fewer than are in use are refused
            used = os.statvfs(at.runs)
            options = f"remount,nr_inodes={used.f_files - used.f_ffree}"
            if subprocess.run(["mount", "-o", options, str(at.runs)]).returncode == 0:
                return
        raise RuntimeError("the disk's inodes could not be limited")

    run = _on_full_disk(at, filled=used_up)
    if run is None:
        return Seen("skipped", "no mounts allowed here")
    end = at.ended(run)
    if wrong := _torn(at) or (f"state.json says {_state(at)}" if _state(at) == "running" else None):
        return Seen("silent", wrong)
    return named(end, "could not be written|space", REMEDY) if end.status else goes_on(end, steps=60)


def metrics_over_the_limit(at, limit=90):
    """files may have 12 KB from step 3 on (RLIMIT_FSIZE), and later more -> survived: no torn line, none missing"""
    run = at.start(LONG + "--no-log_completions ")
    if not at.reached(run, "step 3/"):
        return Seen("broken", run.text[-200:])
    pid = run.members[0].pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (12 << 10, hard))
    said = at.reached(run, "metrics.jsonl could not be written", 30)
    wrong = _torn(at)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    end = at.ended(run)
    return goes_on(end, wrong or _torn(at) or (None if said else "no warning was given"), steps=60)


def report_on_full_disk(at):
    """python -m runlog where the disk is full -> named: no half page"""
    if not _small_disk(at, 5):
        return Seen("skipped", "no mounts allowed here")
    make_run(at.runs / "run", steps=6, files=1)
    _fill(at)
    end = at.ended(at.command(sys.executable, "-m", "runlog", at.runs / "run"))
    return Seen("silent", "half a page") if (at.runs / "run" / "report.html").exists() else named(end, "space", REMEDY)


def output_on_full_disk(at, limit=90):
    """the trainer's output goes to a file whose disk gets full -> survived: lines of progress are lost, no step is"""
    disk = at.given / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        return Seen("skipped", "no mounts allowed here")
    at.stack.callback(subprocess.run, ["umount", "-l", str(disk)])
    flags = f"{SMALL} {BASE}--max_steps 30 --print_samples_every 1 --output_dir {at.runs} --run_name run"
    run = at.command("sh", "-c", f"exec {sys.executable} train_grpo.py {flags} > {disk}/log 2>&1")
    (disk / "log").touch()  # before the shell has come to it
    wait_until(lambda: "step 2/" in (disk / "log").read_text(encoding="utf-8", errors="replace"), 60)
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(100))
    end = at.ended(run)
    said = (disk / "log").read_text(encoding="utf-8", errors="replace")
    return goes_on(end, "all was said" if "step 30/" in said else None, steps=30)


def metrics_is_a_fifo(at):
    """--resume of a run whose metrics.jsonl is a FIFO -> named: to open it would wait for ever"""
    (at.runs / "run").mkdir()
    os.mkfifo(at.runs / "run" / "metrics.jsonl")
    return named(at.train("", 30), "no regular file", "remove|another name")


# ---- folders of others -----------------------------------------------------------------------------------------------


def _ward(at, harm, why: str = "", path: str = "", secret: str = "outside-text") -> Seen:
    """A sound run and one that `harm(folder)` breaks: the table must have both, the broken one with the reason."""
    for name in ("sound", "broken"):
        make_run(at.given / "runs" / name, steps=4, files=1)
    harm(at.given / "runs" / "broken")
    with looking(at.given / "runs") as page:
        answer = page.ask("/api/runs")
        if answer.status_code != 200:
            return Seen("ended", f"the table answers {answer.status_code}: {answer.text[:100]}")
        found = {run["name"]: run for run in answer.json()["runs"]}
        if found.get("sound", {}).get("state") != "finished" or "broken" not in found:
            return Seen("ended", f"the table has {list(found)}")
        asked = [f"/api/{name}?run=broken" for name in ("run", "notes", "steps", "compare")] + [path] * bool(path)
        answers = [page.ask(one) for one in asked]
        if bad := [f"{one.status_code} {one.url}" for one in answers if one.status_code >= 500]:
            return Seen("ended", f"the page answers {bad[0]}")
        if secret in answer.text + "".join(one.text for one in answers):
            return Seen("leaked", "a file outside of the run folder was read")
        said = found["broken"]["why"] + "".join(one.text for one in answers)
    state = found["broken"]["state"]
    return Seen("survived" if why in said else "silent", shorten(f"{state}: {found['broken']['why']}", 120))


def _replaced(name: str, make):
    def harm(folder) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return harm


def _changed(**changes):
    def harm(folder) -> None:
        told = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        (folder / "state.json").write_text(json.dumps(told | changes), encoding="utf-8")

    return harm


def _away(at, name: str):
    def link(path) -> None:
        target = at.file(
            f"away/{name}", json.dumps({"model_id": "outside-text", "step": 3, "outside-text": 1.0}) + "\n"
        )
        path.symlink_to(target)

    return _replaced(name, link)


def metrics_fifo(at):
    """a run whose metrics.jsonl is a FIFO among others -> survived: it alone is shown as unreadable"""
    return _ward(at, _replaced("metrics.jsonl", os.mkfifo), "metrics.jsonl is no regular file")


def state_fifo(at):
    """a run whose state.json is a FIFO -> survived: it alone is shown as unreadable"""
    return _ward(at, _replaced("state.json", os.mkfifo), "state.json is no regular file")


def lock_fifo(at):
    """a running run whose lock is a FIFO -> survived: it alone is shown as unreadable"""

    def harm(folder) -> None:
        _changed(state="running")(folder)
        _replaced("lock", os.mkfifo)(folder)

    return _ward(at, harm, "lock is no regular file")


def completions_fifo(at):
    """the newest file of completions is a FIFO -> survived: said where it is asked for"""
    harm = _replaced("completions/step_000009.parquet", os.mkfifo)
    return _ward(at, harm, "is no regular file", "/api/listing?run=broken&kind=completions&step=9")


def metrics_device(at):
    """metrics.jsonl is a link to /dev/zero -> survived: it alone is shown as unreadable"""
    return _ward(
        at, _replaced("metrics.jsonl", lambda path: path.symlink_to("/dev/zero")), "leads out of the run folder"
    )


def metrics_node(at):
    """metrics.jsonl is a device node without end -> survived: it alone is shown as unreadable"""

    def node(path) -> None:
        os.mknod(path, 0o20644, os.makedev(1, 5))

    return _ward(at, _replaced("metrics.jsonl", node), "is no regular file")


def updated_text(at):
    """state.json says "updated": "x" -> survived: it alone is shown as unreadable"""
    return _ward(at, _changed(state="running", host="elsewhere", updated="x"), "updated is 'x'")


def state_of_odd_types(at):
    """lists and dicts where state.json has numbers and words -> survived: it alone is shown as unreadable"""
    return _ward(at, _changed(state={"a": 1}, num_steps=[1], host=["h"], pid={}, why=[1]), "num_steps is [1]")


def state_of_brackets(at):
    """state.json is 100,000 brackets -> survived: taken for torn"""
    return _ward(at, _replaced("state.json", lambda path: path.write_text("[" * 100_000, encoding="utf-8")))


def huge_numbers(at):
    """metrics with numbers of 400 digits, infinite ones and text -> survived: unreadable, or shown without them"""

    def harm(folder) -> None:
        lines = [{"step": 5, "reward": 10**400, "time/unix": 10**400}, {"step": 6, "reward": "high", "kl": [1]}]
        with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    return _ward(at, harm, "reward is 'high'")


def config_of_odd_types(at):
    """config.json with a number for the domains, a dict for the model, text for max_steps -> survived"""
    text = json.dumps({"domains": 5, "model_id": {"a": 1}, "max_steps": "ten", "preset": []})
    harm = _replaced("config.json", lambda path: path.write_text(text, encoding="utf-8"))
    return _ward(at, lambda folder: (harm(folder), (folder / "state.json").unlink()), "domains is 5")


def config_link(at):
    """config.json is a link to a file outside of the run folder -> survived: not read"""
    return _ward(at, _away(at, "config.json"), "leads out of the run folder")


def metrics_link(at):
    """metrics.jsonl is a link to a file outside of the run folder -> survived: not read"""
    return _ward(at, _away(at, "metrics.jsonl"), "leads out of the run folder")


def command_link(at):
    """git.diff is a link to a file outside of the run folder -> survived: not read"""
    return _ward(at, _away(at, "git.diff"), "leads out of the run folder")


def completions_folder_link(at):
    """completions/ is a link to another folder -> survived: neither listed nor read"""

    def harm(folder) -> None:
        make_run(at.given / "other", steps=4, files=1)
        shutil.rmtree(folder / "completions")
        (folder / "completions").symlink_to(at.given / "other" / "completions")

    path = "/api/over_time?run=broken&kind=completions&step=4&row=0"
    return _ward(at, harm, "leads out of the run folder", path, secret='"found":[{')


def links_in_a_circle(at):
    """config.json is a link to itself -> survived: it alone is shown as unreadable"""
    return _ward(at, _replaced("config.json", lambda path: path.symlink_to(path.name)), "config.json cannot be read")


def names_of_any_bytes(at):
    """run folders whose names are no UTF-8, or turn the direction of text -> survived: each can be opened"""
    runs = at.given / "runs"
    make_run(runs / "sound", steps=4, files=1)
    for name in (b"caf\xe9", b"caf\\xe9", "\u202egnorw".encode(), b"a%2fb?x#y&z", b"new\nline"):
        shutil.copytree(runs / "sound", runs / os.fsdecode(name))
    with looking(runs) as page:
        names = [run["name"] for run in page.ask("/api/runs").json()["runs"]]
        failed = [name for name in names if page.ask("/api/run", run=name).status_code != 200]
    wrong = len(names) != 6 or failed
    return Seen("ended", f"{failed} of {names}") if wrong else Seen("survived", "6 runs")


def deleted_while_read(at):
    """run folders come, go and change into files while ten clients ask for the table -> survived"""
    runs = at.given / "runs"
    make_run(runs / "sound", steps=4, files=1)
    over, wrong = threading.Event(), []

    def ask(page) -> None:
        while not over.is_set():
            answer = page.ask("/api/runs")
            if answer.status_code != 200 or "sound" not in answer.text:
                wrong.append(answer.text[:100])

    with looking(runs) as page:
        clients = [threading.Thread(target=ask, args=(page,)) for _ in range(10)]
        [client.start() for client in clients]
        for number in range(60):
            shutil.copytree(runs / "sound", runs / "other")
            if number % 3 == 0:
                (runs / "other" / "metrics.jsonl").unlink()
                (runs / "other" / "metrics.jsonl").mkdir()
            shutil.rmtree(runs / "other")
            (runs / "other").touch()
            (runs / "other").unlink()
        over.set()
        [client.join(30) for client in clients]
    return Seen("ended", wrong[0]) if wrong else Seen("survived", "60 times")


# ---- strangers -------------------------------------------------------------------------------------------------------


def _besieged(at, attack, bound: float = 5.0) -> Seen:
    """While `attack(port)` goes on, whoever has the token must be answered within `bound` seconds."""
    make_run(at.given / "runs" / "sound", steps=4, files=1)
    with looking(at.given / "runs") as page:
        attack(page.port)
        start, answered = time.monotonic(), False
        while not answered and time.monotonic() - start < 4 * bound:
            with contextlib.suppress(requests.RequestException):
                answered = page.ask("/api/runs").status_code == 200
        seconds, memory = time.monotonic() - start, _memory(page.process.pid)
        if not answered:
            return Seen("hung", f"no answer for {seconds:.0f} s")
        if seconds > bound * at.patience or memory > 600:
            return Seen("leaked", f"answered after {seconds:.1f} s, {memory} MiB")
        return Seen("survived", f"answered after {seconds:.1f} s, {memory} MiB")


def _memory(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
        return next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM"))


def _opened(at, port: int) -> socket.socket:
    return at.stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))


def header_without_end(at):
    """60 MB of header lines, on five connections at once -> survived: refused, memory stays"""

    def attack(port: int) -> None:
        def send(connection) -> None:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n")
                for number in range(60):
                    connection.sendall(b"X-%d: " % number + b"a" * 2**20 + b"\r\n")

        senders = [threading.Thread(target=send, args=(_opened(at, port),)) for _ in range(5)]
        [sender.start() for sender in senders]
        [sender.join(30) for sender in senders]

    return _besieged(at, attack)


def half_open(at):
    """1,500 connections that say nothing or half a request -> survived: they keep nobody out"""

    def attack(port: int) -> None:
        for number in range(1500):
            connection = _opened(at, port)
            if number % 3:
                with contextlib.suppress(OSError):
                    connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n"[: number % 25])

    return _besieged(at, attack)


def body_by_drops(at):
    """400 strangers who announce a body and send a byte a second -> survived: refused and closed"""

    def attack(port: int) -> None:
        opened = [_opened(at, port) for _ in range(400)]

        def drip() -> None:
            for _ in range(20):
                for connection in opened:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"x")
                time.sleep(1)

        for connection in opened:
            with contextlib.suppress(OSError):
                connection.sendall(b"GET /api/runs HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
        threading.Thread(target=drip, daemon=True).start()
        time.sleep(2)

    return _besieged(at, attack)


def not_http(at):
    """TLS, binary noise and a WebSocket upgrade at the page's port -> survived"""

    def attack(port: int) -> None:
        upgrade = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        upgrade += b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n"
        for said in (b"\x16\x03\x01\x02\x00\x01\x00", bytes(range(256)) * 64, upgrade):
            connection = _opened(at, port)
            with contextlib.suppress(OSError):
                connection.sendall(said)
                connection.settimeout(2)
                connection.recv(100)

    return _besieged(at, attack)


def two_pages_one_browser(at):
    """two pages whose ports are forwarded to others, in one browser -> survived: neither takes the other's cookie"""
    make_run(at.given / "runs" / "sound", steps=4, files=1)
    with looking(at.given / "runs") as first, looking(at.given / "runs") as second:
        jar = {}
        for page, port in ((first, 7001), (second, 7002)):
            jar |= dict(requests.get(page.address, headers={"Host": f"127.0.0.1:{port}"}, timeout=20).cookies)
        given = "; ".join(f"{name}={value}" for name, value in jar.items())
        for page, port in ((first, 7001), (second, 7002)):
            headers = {"Host": f"127.0.0.1:{port}", "Cookie": given}
            if requests.get(f"{page.root}/api/runs", headers=headers, timeout=20).status_code != 200:
                return Seen("ended", f"the page at {port} no longer lets its reader in")
    return Seen("survived", f"{len(jar)} cookies")


# ---- locales and odd bytes -------------------------------------------------------------------------------------------

ASCII = dict(LC_ALL="C", LANG="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii", PYTHONCOERCECLOCALE="0", TERM="dumb")


def ascii_settings(at, limit=90):
    """no UTF-8 in the locale; a --config file and a reward file with other letters -> survived"""
    text = "# é ü \N{GRINNING FACE}\ndef own(completions, **columns):\n    return [len('é') for _ in completions]\n"
    config = at.file("own.yaml", f"# Größe\nsystem_prompt: Grüße\nreward_funcs: ['{at.file('own.py', text)}:own']\n")
    flags = f"{SMALL} --max_steps 2 --output_dir {at.runs} --run_name run --config {config}".split()
    return goes_on(at.ended(at.command(sys.executable, "train_grpo.py", *flags, **ASCII)), steps=2)


def ascii_page(at):
    """no UTF-8 in the locale; look.py at runs with other letters in names and files -> survived"""
    make_run(at.given / "läufe" / "größe", steps=4, files=1, model_id="modèle")
    run = at.command(sys.executable, "look.py", at.given / "läufe", "--port", "0", **ASCII)
    if not at.reached(run, "token="):
        return Seen("ended", run.text[-200:])
    address = run.text.split("http://")[1].split()[0]
    root, _, token = address.partition("/?token=")
    answer = requests.get(f"http://{root}/api/runs", headers={"Authorization": f"Bearer {token}"}, timeout=20)
    right = answer.status_code == 200 and answer.json()["runs"][0]["model"] == "modèle"
    return Seen("survived", "shown") if right else Seen("ended", answer.text[:160])


def diff_of_any_bytes(at, limit=90):
    """an edited copy of the script with a comment in Latin-1 in its repository's diff -> survived: kept as it is"""
    here = at.given / "copy"
    here.mkdir()
    shutil.copy(ROOT / "train_grpo.py", here / "mine.py")
    (here / "notes.txt").write_bytes(b"caf\n")
    git = ["git", "-C", str(here), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    (here / "notes.txt").write_bytes(b"caf\xe9\n")
    flags = f"{SMALL} {BASE}--output_dir {at.runs} --run_name run".split()
    end = at.ended(at.command(sys.executable, here / "mine.py", *flags, PYTHONPATH=str(ROOT)))
    diff = at.runs / "run" / "git.diff"
    return goes_on(end, None if diff.exists() and b"caf\xe9" in diff.read_bytes() else "the diff is not kept", steps=2)


def process_of_any_name(at):
    """model-written code renames its process to bytes that are no text -> survived: its limits are still watched"""
    from safety.sandbox import run_python

    code = "import ctypes, time\nctypes.CDLL(None).prctl(15, b'\\xff\\xfe', 0, 0, 0)\nprint('begun', flush=True)\n"
    slow = run_python(code + "time.sleep(1)\nprint('done')", seconds=20)
    large = run_python(code + "kept = []\nwhile True: kept.append(bytes(1 << 22))", seconds=20)
    if "done" not in slow.stdout:
        return Seen("ended", shorten(slow.stderr))
    ends = "memory" in large.stderr.lower() or large.status != 0
    return Seen("survived", "watched") if ends else Seen("silent", "memory was not watched")


def direction_of_text(at):
    """a completion with characters that turn the direction of text -> survived: spelled out on a terminal"""
    end = at.scripted(
        ["right \u202egnorw\u202c \u2066x\u2069 \u200f"], "--reward_funcs length --print_samples_every 1 "
    )
    raw = [hex(ord(c)) for c in "\u202e\u202c\u2066\u2069\u200f" if c in end.text]
    wrong = f"{raw} reached the terminal" if raw else None if "gnorw" in end.text else "the sample was not shown"
    return goes_on(end, wrong)
