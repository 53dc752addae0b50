"""look.py --prepare: requests that are not the page's own, paths and scripts outside, code that never ends or crashes,
two tabs, and a page that is killed while what it started goes on."""

import contextlib
import json
import os
import re
import signal
import threading
import time

import psutil
import requests
from case import Seen, shorten, wait_until
from looking_at import checkout, looking

SETTINGS = dict(model_id="models/tiny", generator="hf", dataset_id="examples/sums.py:rows", reward_funcs="length")
SETTINGS |= dict(compute_dtype="float32", prompts_per_step="4", num_generations="4", max_prompt_length="64")
SETTINGS |= dict(max_completion_length="8", print_samples_every="0", max_steps="400")


class _Tab:
    """A page in a checkout of its own, and a browser's requests to it."""

    def __init__(self, at):
        self.here = checkout(at.given / "here")
        self.page = at.stack.enter_context(looking(self.here / "runs", "--prepare", cwd=self.here))
        self.cookie = requests.get(self.page.address, timeout=20).headers["Set-Cookie"].split(";")[0]
        at.stack.callback(self.clear)

    def post(self, action: str, headers: dict | None = None, body=None, **given) -> requests.Response:
        own = {"Cookie": self.cookie, "Origin": self.page.root, "Content-Type": "application/json"} | (headers or {})
        own = {name: value for name, value in own.items() if value is not None}
        given = {"session": "tab", "script": "train_grpo.py", "settings": SETTINGS, "runs": "runs"} | given
        data = json.dumps(given) if body is None else body
        return requests.post(f"{self.page.root}/api/prepare/{action}", headers=own, data=data, timeout=200)

    def launch(self, name: str, headers: dict | None = None, form: str | None = None, **more: str):
        settings = SETTINGS | {"run_name": name} | more
        return self.post("launch", headers, form=form or f"form of {name}", settings=settings)

    def score(self, code: str, **given) -> requests.Response:
        (self.here / "own.py").write_text(f"def own(completions, **_):\n    {code}\n", encoding="utf-8")
        settings = SETTINGS | {"reward_funcs": "own.py:own", "reward_timeout": "2"}
        return self.post("score", settings=settings, row=0, completions=[{"text": "1"}], **given)

    def started(self) -> list[dict]:
        return self.page.ask("/api/prepare").json()["launched"]

    def answers(self) -> bool:
        return self.page.ask("/api/runs").status_code == 200

    def trains(self, name: str) -> bool:
        """Whether the run has written a line of metrics."""
        path = self.here / "runs" / name / "metrics.jsonl"
        return path.exists() and path.stat().st_size > 0

    def clear(self) -> None:
        for path in (self.here / "runs" / ".launched").glob("*.launch"):
            found = re.search(r'"pid": (\d+)', path.read_text(encoding="utf-8")) if path.is_file() else None
            with contextlib.suppress(ProcessLookupError):
                if found and int(found[1]) > 1:
                    os.killpg(int(found[1]), signal.SIGKILL)


def _refused(at, ask, statuses=(403,), said: str = "") -> Seen:
    """`ask(tab)` must be refused, with nothing started and the page as before."""
    tab = _Tab(at)
    answer = ask(tab)
    if answer.status_code not in statuses or said not in answer.text:
        return Seen("ended", f"{answer.status_code}: {shorten(answer.text)}")
    if tab.started() or not tab.answers():
        return Seen("silent", f"started: {tab.started()}")
    return Seen("survived", f"{answer.status_code}: {shorten(answer.json().get('error', ''))}")


# ---- whose request --------------------------------------------------------------------------------------------------


def foreign_origin(at):
    """another site's page posts a form with the reader's cookie -> survived: refused, nothing is started"""
    return _refused(at, lambda tab: tab.launch("x", {"Origin": "https://evil.example"}))


def origin_of_a_sandbox(at):
    """a sandboxed frame posts, whose origin is null -> survived: refused"""
    return _refused(at, lambda tab: tab.launch("x", {"Origin": "null"}))


def no_origin(at):
    """a request with the cookie that says no origin -> survived: refused"""
    return _refused(at, lambda tab: tab.launch("x", {"Origin": None}))


def another_port(at):
    """a page of another port of this machine posts -> survived: refused"""
    return _refused(at, lambda tab: tab.launch("x", {"Origin": "http://127.0.0.1:1", "Sec-Fetch-Site": "same-site"}))


def rebound_name(at):
    """a name of somebody's that points to this machine (DNS rebinding) -> survived: refused"""

    def ask(tab):
        host = f"evil.example:{tab.page.port}"
        headers = {"Host": host, "Origin": f"http://{host}", "Authorization": f"Bearer {tab.page.token}"}
        return tab.launch("x", headers)

    return _refused(at, ask)


def plain_form(at):
    """a form of plain text, which browsers send without asking first -> survived: refused"""
    return _refused(at, lambda tab: tab.launch("x", {"Content-Type": "text/plain"}))


def token_in_a_link(at):
    """the token in the address of a POST, and no cookie -> survived: refused"""

    def ask(tab):
        address = f"{tab.page.root}/api/prepare/launch?token={tab.page.token}"
        return requests.post(address, json={"form": "12345678"}, headers={"Origin": tab.page.root}, timeout=20)

    return _refused(at, ask)


def started_by_get(at):
    """GET on what starts and stops -> survived: 405"""
    return _refused(at, lambda tab: tab.page.ask("/api/prepare/launch", form="12345678"), (405,))


def replayed_form(at, limit=120):
    """the form that started a run is sent again, and again -> survived: one run"""
    tab = _Tab(at)
    first = tab.launch("one")
    again = [tab.launch("one"), tab.launch("two", form="form of one")]
    codes = [answer.status_code for answer in (first, *again)]
    right = codes == [200, 403, 403] and [one["name"] for one in tab.started()] == ["one"]
    return Seen("survived", "one run") if right else Seen("silent", f"{codes}, {tab.started()}")


# ---- what may be named ----------------------------------------------------------------------------------------------


def script_outside(at):
    """a script by a path out of the folder -> survived: refused"""

    def ask(tab):
        (at.given / "x.py").write_text("parse_args(TrainConfig)\nopen('/tmp/ran', 'w')\n", encoding="utf-8")
        return tab.post("check", script="../x.py")

    return _refused(at, ask, (422,), "only copies of train_grpo.py")


def script_behind_a_link(at):
    """a script in the folder that is a link out of it -> survived: refused"""

    def ask(tab):
        (at.given / "x.py").write_text("parse_args(TrainConfig)\n", encoding="utf-8")
        (tab.here / "mine.py").symlink_to(at.given / "x.py")
        return tab.post("check", script="mine.py")

    return _refused(at, ask, (422,), "only copies of train_grpo.py")


def reward_outside(at, limit=120):
    """a reward file outside of the folder -> survived: not run"""

    def ask(tab):
        (at.given / "x.py").write_text(f"open({str(at.given / 'ran')!r}, 'w')\n", encoding="utf-8")
        settings = SETTINGS | {"reward_funcs": f"{at.given}/x.py:own"}
        return tab.post("score", settings=settings, row=0, completions=[{"text": "1"}])

    seen = _refused(at, ask, (422,), "only python files in")
    return Seen("silent", "it was run") if (at.given / "ran").exists() else seen


def dropped_outside(at):
    """a dropped file whose name leads out of the folder -> survived: refused"""

    def ask(tab):
        kind = {"Content-Type": "application/octet-stream"}
        return tab.post("drop?name=..%2F..%2Fx.csv", kind, body=b"a\n1\n")

    return _refused(at, ask, (422,), "no plain name")


def dropped_behind_a_link(at):
    """the folder for dropped files is a link to another -> survived: nothing is put there"""

    def ask(tab):
        (at.given / "elsewhere").mkdir()
        (tab.here / "dropped").symlink_to(at.given / "elsewhere")
        return tab.post("drop?name=x.csv", {"Content-Type": "application/octet-stream"}, body=b"a\n1\n")

    seen = _refused(at, ask, (422,), "is a link")
    return Seen("silent", "it was put there") if list((at.given / "elsewhere").iterdir()) else seen


def log_outside(at):
    """the log of a run whose name is a path -> survived: refused"""
    return _refused(at, lambda tab: tab.page.ask("/api/launch_log", name="../../../../etc/passwd"), (422,), "no name")


def words_of_a_shell(at, limit=120):
    """a shell's $(...), ; and quotes in settings and in a run's name -> survived: they are text"""
    tab = _Tab(at)
    mark = at.given / "ran"
    name = f"a; touch {mark.name} $(touch {mark.name}) `touch {mark.name}`"
    answer = tab.launch(
        name, system_prompt=f"$(touch {mark}); touch {mark} '\"", max_steps="2", max_prompt_length="400"
    )
    if answer.status_code != 200:
        return Seen("ended", shorten(answer.text))
    wait_until(lambda: not tab.started()[0]["alive"], 90)
    ran = mark.exists() or (tab.here / mark.name).exists()
    if ran or tab.started()[0]["status"]:
        return Seen("silent", f"ran: {ran}, {shorten(tab.page.ask('/api/launch_log', name=name).text[-300:])}")
    return Seen("survived", "they were text")


# ---- code that never ends, or crashes -------------------------------------------------------------------------------


def endless_reward(at, limit=150):
    """a reward that never gives up the interpreter -> survived: the page answers, and "stop" ends it"""
    tab = _Tab(at)
    tab.post("rows")
    answers = []
    code = "import re; re.match('(a*)*$', 'a' * 40 + 'b')"
    thread = threading.Thread(target=lambda: answers.append(tab.score(code)))
    thread.start()
    time.sleep(4)
    free = tab.answers()
    tab.post("close")
    thread.join(30)
    if not free or not answers:
        return Seen("hung", f"answered: {free}, ended: {bool(answers)}")
    right = tab.score("return [1.0]").status_code == 200
    return Seen("survived", shorten(answers[0].text)) if right else Seen("ended", "no further score")


def crashing_reward(at, limit=120):
    """a reward that ends its process by SIGSEGV -> survived: named, and the next score works"""
    tab = _Tab(at)
    answer = tab.score("import os; os.kill(os.getpid(), 11)")
    right = "SIGSEGV" in answer.text and tab.score("return [1.0]").status_code == 200 and tab.answers()
    return Seen("survived" if right else "ended", shorten(answer.text))


def printing_reward(at, limit=120):
    """a reward that prints without end -> survived: its last words are kept, and no more"""
    tab = _Tab(at)
    answer = tab.score("\n    ".join(["while True:", "    print('x' * 10000)"]))
    size = psutil.Process(tab.page.process.pid).memory_info().rss >> 20
    right = answer.status_code == 200 and len(answer.text) < 1 << 20 and size < 600
    return Seen("survived" if right else "leaked", f"{len(answer.text) >> 10} KiB, the page has {size} MiB")


def edited_script(at, limit=150):
    """the script gets a syntax error while the page is open, and is mended -> survived: named, then it works again"""
    tab = _Tab(at)
    script = tab.here / "train_grpo.py"
    before, first = script.read_text(encoding="utf-8"), tab.post("check").status_code
    script.write_text(before + "\ndef (:\n", encoding="utf-8")
    broken = tab.post("check")
    script.write_text(before, encoding="utf-8")
    right = first == 200 and "SyntaxError" in broken.text and tab.post("check").status_code == 200
    return Seen("survived" if right else "ended", shorten(broken.text))


# ---- two tabs, and a page that is killed ----------------------------------------------------------------------------


def two_tabs_start_one_run(at, limit=120):
    """two tabs start a run of the same name at once -> survived: one run"""
    tab = _Tab(at)
    tab.post("check")
    answers = []

    def start(number: int) -> None:
        answers.append(tab.launch("same", form=f"form {number} of two"))

    pair = [threading.Thread(target=start, args=(number,)) for number in (1, 2)]
    [thread.start() for thread in pair]
    [thread.join(90) for thread in pair]
    codes = sorted(answer.status_code for answer in answers)
    right = codes == [200, 422] and len(tab.started()) == 1
    return Seen("survived" if right else "silent", f"{codes}, {len(tab.started())} started")


def two_tabs_in_one_session(at, limit=150):
    """ten questions at once to one session -> survived: each gets its own answer"""
    tab = _Tab(at)
    found = {}

    def ask(number: int) -> None:
        answer = tab.post("row", row=number)
        found[number] = answer.json().get("columns", {}).get("answer")

    several = [threading.Thread(target=ask, args=(number,)) for number in range(10)]
    [thread.start() for thread in several]
    [thread.join(120) for thread in several]
    right = found == {number: str(20 + number) for number in range(10)}
    return Seen("survived" if right else "silent", shorten(str(found)))


def killed_while_a_run_trains(at, limit=150):
    """kill -9 of the page while a run trains -> survived: the run goes on, and the next page stops it"""
    tab = _Tab(at)
    tab.launch("on", max_steps="5000")
    if not wait_until(lambda: tab.trains("on"), 90):
        return Seen("hung", "the run did not begin")
    tab.page.process.kill()
    tab.page.process.wait()
    path = tab.here / "runs" / "on" / "metrics.jsonl"
    size = path.stat().st_size
    if not wait_until(lambda: path.stat().st_size > size, 30):
        return Seen("ended", "the run ended with its page")
    with looking(tab.here / "runs", "--prepare", cwd=tab.here) as page:
        head = {"Authorization": f"Bearer {page.token}"}
        body = {"form": "the next page", "name": "on"}
        answer = requests.post(f"{page.root}/api/prepare/stop", json=body, headers=head, timeout=20)
        ended = wait_until(lambda: not page.ask("/api/prepare").json()["launched"][0]["alive"], 40)
    return Seen("survived", "stopped by the next page") if ended else Seen("hung", shorten(answer.text))


def killed_while_it_works(at, limit=120):
    """kill -9 of the page while a reward is computed -> survived: no process of it is left"""
    tab = _Tab(at)
    tab.post("rows")
    threading.Thread(target=lambda: _quietly(lambda: tab.score("__import__('time').sleep(600)")), daemon=True).start()
    time.sleep(1)
    family = psutil.Process(tab.page.process.pid).children(recursive=True)
    tab.page.process.kill()
    tab.page.process.wait()
    _, left = psutil.wait_procs(family, timeout=15)
    return Seen("leaked", f"{len(left)} of {len(family)}") if left or not family else Seen("survived", f"{len(family)}")


def _quietly(function) -> None:
    try:
        function()
    except requests.RequestException:
        pass


def torn_record(at):
    """a torn file, a FIFO and a folder among what the page remembers of its runs -> survived: the others are shown"""
    tab = _Tab(at)
    kept = tab.here / "runs" / ".launched"
    kept.mkdir()
    right = {"name": "right", "script": "train_grpo.py", "command": ["python"], "run_dir": str(kept), "pid": 1}
    (kept / "right.launch").write_text(json.dumps(right | {"born": 1.0, "time": 1.0}), encoding="utf-8")
    (kept / "torn.launch").write_text('{"name": "torn"', encoding="utf-8")
    (kept / "list.launch").write_text("[]", encoding="utf-8")
    os.mkfifo(kept / "pipe.launch")
    (kept / "folder.launch").mkdir()
    names = [one["name"] for one in tab.started()]
    return Seen("survived" if names == ["right"] else "ended", str(names))
