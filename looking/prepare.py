"""What the page does beside looking, with `look.py --prepare` alone: reads rows, calls rewards, plays, starts runs.

All of it is asked for by POST, of who has the token in the cookie or a header, from the page's own address: `checked`.
Code of users runs in processes of its own (bench.py, by way of sessions.py), each with a time limit, so that one that
never ends, or crashes, takes nothing along. What is started outlives the page (launches.py).
"""

import contextlib
import hmac
import json
import keyword
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cli import ConfigError, known_name, nearest
from data import FILE_TYPES
from looking.launches import Launches
from looking.sessions import Failed, Sessions, scripts

MAX_BODY = 1 << 20  # bytes of a request
MAX_DROPPED = 256 << 20  # bytes of a file that is dropped
DROPPED = "dropped"  # the folder that takes such files
LOCAL = ("127.0.0.1", "localhost", "[::1]")
REMEMBERED = 1000  # forms that were sent


ROWS = '''"""Rows of {file} for --dataset_id {name}:rows. Every tenth is held out, as the split "test"."""

from data import load_file


def rows(split, seed):
    for number, row in enumerate(load_file({file})):
        if (number % 10 == 9) == (split == "test"):
            yield row | {{"prompt": row[{prompt}]}}
'''
REWARD = '''"""A reward for --reward_funcs {name}:right. Columns of the row arrive by name, as lists. Edit it."""

from rewards import completion_text


def right(completions, {answer}, **columns):
    """1 where the answer stands in the completion."""
    texts = [completion_text(completion) for completion in completions]
    return [float(str(wanted).strip() in text) for text, wanted in zip(texts, {answer}, strict=True)]
'''
BEGINNINGS = {"rows": ("my_rows", "rows", ROWS), "reward": ("my_rewards", "right", REWARD)}  # file, function, text


class Refused(PermissionError):
    """A request that is not the page's own."""


class Prepare:
    """What `--prepare` adds. folder: where look.py was started, whose scripts can be run; runs: of the run folders."""

    def __init__(self, folder: Path, runs: Path, others: bool = False):
        self.folder, self.others = folder.resolve(), others
        self.sessions = Sessions(self.folder)
        self.launches = Launches(self.folder, runs.resolve())
        self.sent: OrderedDict[str, None] = OrderedDict()
        self.lock = threading.Lock()

    # -- who may ask ----------------------------------------------------------------------------------------------

    def checked(self, request: Request, given: tuple[str | None, str], token: str) -> None:
        """Refused for what is not the page's own request. given: the token, in the cookie and in the header; in the
        address it does not count here, where it could be a link's.

        A browser says where a request comes from, and no site can make it lie. The host is the page's, not a name of
        somebody's that points here."""
        if not any(hmac.compare_digest(word.encode("utf-8", "replace"), token.encode()) for word in given if word):
            raise Refused("Take the address that look.py printed when it started: it ends with ?token=...")
        headers = request.headers
        host, origin, site = headers.get("host", ""), headers.get("origin"), headers.get("sec-fetch-site")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
        if not self.others and name not in LOCAL:
            raise Refused(f"{host[:80]!r} is not this machine; open the page as 127.0.0.1 or localhost (ssh -L).")
        if site not in (None, "same-origin") or origin not in (None, f"{request.url.scheme}://{host}"):
            raise Refused(f"This comes from another page ({(origin or site)[:80]}), and is not done.")
        if origin is None and not given[1]:  # a cookie alone: a browser always says the origin of a POST
            raise Refused("This does not say which page it comes from, and is not done.")

    def once(self, form: str) -> None:
        """Refused for a form that was sent before: pressed twice, or repeated by somebody."""
        if not isinstance(form, str) or not 8 <= len(form) <= 64:
            raise Refused("What changes something carries the number of its form.")
        with self.lock:
            if form in self.sent:
                raise Refused("This form was sent before, and is not done twice. Look at the list; press again.")
            self.sent[form] = None
            while len(self.sent) > REMEMBERED:
                self.sent.popitem(last=False)

    # -- what can be asked ------------------------------------------------------------------------------------------

    def answer(self, action: str, given: dict):
        own: dict[str, Callable] = {"launch": self.launch, "stop": self.stop, "kill": self.kill, "resume": self.resume}
        own["write"] = self.write
        if action in own:
            self.once(given.pop("form", ""))
            return own[action](given)
        if action == "close":
            return self.sessions.close(text(given, "session"))
        return self.sessions.ask(text(given, "session"), self.script(given), action, given)

    def script(self, given: dict) -> str:
        """The name of a train script in the folder. ConfigError for any other path."""
        name, known = text(given, "script"), scripts(self.folder)
        if name not in known:
            guess = nearest(name, known)
            hint = f" Did you mean {guess}?" if guess else ""
            raise ConfigError(
                f"script {name!r:.80}: only copies of train_grpo.py in {self.folder} are run from here: "
                f"{', '.join(known) or 'there is none'}.{hint}"
            )
        return name

    def launch(self, given: dict) -> dict:
        script = self.script(given)
        told = self.sessions.ask(text(given, "session"), script, "check", given)
        if told.get("error"):
            raise ConfigError(told["error"])
        return self.launches.start(script, told)

    def stop(self, given: dict) -> dict:
        return self.launches.stop(text(given, "name"))

    def kill(self, given: dict) -> dict:
        return self.launches.kill(text(given, "name"))

    def resume(self, given: dict) -> dict:
        return self.launches.resume(text(given, "name"), scripts(self.folder))

    def write(self, given: dict) -> dict:
        """Begin a python file in the folder, of rows or of a reward, for somebody to edit; none is overwritten."""
        kind = text(given, "kind")
        known_name("kind of file", kind, BEGINNINGS)
        name, function, content = BEGINNINGS[kind]
        values = {key: repr(given.get(key)) for key in ("file", "prompt", "answer")}
        if kind == "reward":
            answer = given.get("answer")
            if not isinstance(answer, str) or not answer.isidentifier() or keyword.iskeyword(answer):
                raise ConfigError(f"column {answer!r:.80} cannot be an argument's name; rename it in the rows first.")
            values["answer"] = answer
        for number in range(1, 100):
            path = self.folder / (f"{name}.py" if number == 1 else f"{name}_{number}.py")
            with contextlib.suppress(FileExistsError), open(path, "x", encoding="utf-8") as file:
                file.write(content.format(name=path.name, **values))
                return {"path": path.name, "spec": f"{path.name}:{function}", "answer": given.get("answer")}
        raise ConfigError(f"there are 99 files {name}*.py already; edit one of them.")

    def dropped(self, name: str, content: bytes) -> dict:
        """Put a file of rows into the folder, under its own name or, where another file has that, a further one."""
        if not name or name != Path(name).name or name.startswith(".") or "\0" in name or len(name) > 120:
            raise ConfigError(f"{name!r:.80} is no plain name of a file.")
        if Path(name).suffix.lower() not in FILE_TYPES:
            raise ConfigError(f"{name}: rows come from {' '.join(FILE_TYPES)} files.")
        into = self.folder / DROPPED
        into.mkdir(exist_ok=True)
        if into.resolve() != into:
            raise ConfigError(f"{into} is a link, and nothing is put behind it.")
        stem, suffix, number = Path(name).stem, Path(name).suffix, 1
        while True:
            path = into / (f"{stem}{suffix}" if number == 1 else f"{stem}-{number}{suffix}")
            try:
                with open(path, "xb") as file:
                    file.write(content)
                break
            except FileExistsError:
                if path.is_file() and path.read_bytes() == content:
                    break
                number += 1
        return {"path": f"{DROPPED}/{path.name}", "bytes": len(content)}

    def about(self) -> dict:
        """For the first look: scripts, and what was started from here."""
        runs = os.path.relpath(self.launches.runs, self.folder)
        runs = str(self.launches.runs) if runs.startswith("..") else runs
        told = {"folder": str(self.folder), "runs": runs, "scripts": scripts(self.folder)}
        return told | {"launched": self.launches.all()}

    def end(self) -> None:
        self.sessions.end()


def text(given: dict, name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value or len(value) > 300:
        raise ConfigError(f"{name} is {value!r:.80}; give a text.")
    return value


# ---- requests -------------------------------------------------------------------------------------------------------


async def body_of(request: Request, most: int) -> bytes:
    """The body, of at most `most` bytes; ConfigError for more."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise ConfigError(f"The request has more than {most >> 20} MiB.")
        parts.append(part)
    return b"".join(parts)


def posted(prepare: Prepare, respond: Callable, presented: Callable) -> Callable:
    """The endpoint of all POSTs. respond: (value, status) -> Response; presented: (request) -> (cookie, header)."""

    async def endpoint(request: Request) -> Response:
        action = request.path_params["action"]
        try:
            prepare.checked(request, presented(request), request.app.state.token)
            kind = request.headers.get("content-type", "").partition(";")[0].strip()
            if kind != ("application/octet-stream" if action == "drop" else "application/json"):
                raise Refused(f"content type {kind[:40]!r} is not what the page sends.")
            if action == "drop":
                content = await body_of(request, MAX_DROPPED)
                name = request.query_params.get("name", "")
                return respond(await run_in_threadpool(prepare.dropped, name, content), 200)
            given = json.loads(await body_of(request, MAX_BODY))
            if not isinstance(given, dict):
                raise ValueError("no object")
            return respond(await run_in_threadpool(prepare.answer, action, given), 200)
        except Refused as error:
            refused = respond({"error": str(error)}, 403)
            refused.headers["Connection"] = "close"
            return refused
        except (ConfigError, Failed) as error:
            return respond({"error": str(error), "said": getattr(error, "said", "")}, 422)
        except (ValueError, RecursionError):
            return respond({"error": "The request is no JSON object."}, 400)
        except ClientDisconnect:
            return respond({"error": "gone"}, 400)

    return endpoint
