"""The page's server: answers to GET alone, about run folders alone, for those who have the token.

What it answers is JSON; a model's text never becomes HTML here. The page is static files (page/), which put text into
the document as text; the content security policy lets no other script run.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import signal
import sys
import threading
import time
from itertools import chain
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from config import ConfigError
from looking.runs import Gone, Run, Runs, digest, plain, stamp
from looking.told import all_notes, compared, described, standing_out
from runlog import samples
from runlog.reading import readable_prompt
from safety.storable import storable

PAGE = Path(__file__).parent / "page"
TRY = Path(__file__).parent.parent / "scripts" / "try.py"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
COMPARED = 40  # runs at once
TRY_SECONDS = 300  # that scripts/try.py may take
NOTED_SECONDS = 10.0  # between two looks at what stands out in the runs
SECONDS = 1.0  # that one request looks for a prompt in files


def make_app(root: Path, token: str, flags: list[str] | None = None) -> Starlette:
    """The page about the run folders below `root`, for those who give `token`: in the address, a cookie or a header.
    flags: those of a training that the page "Try" tries; None: there is no such page."""
    names = {"/": page, "/page/{name}": file} | {f"/api/{name}": answer for name, answer in ANSWERS.items()}
    routes = [Route(path, guarded(answer)) for path, answer in names.items()]
    if flags is not None:
        routes.append(Route("/api/try", tried, methods=["POST"]))
    app = Starlette(routes=routes, exception_handlers={HTTPException: missing, 500: failed})
    app.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=1)
    app.state.runs, app.state.token, app.state.flags = Runs(root), token, flags
    app.state.files = {path.name: path.read_bytes() for path in PAGE.iterdir() if path.suffix in TYPES}
    if flags is not None:
        app.state.files["index.html"] = app.state.files["index.html"].replace(b"<body>", b"<body data-try>")
    threading.Thread(target=look_ahead, args=(app.state.runs,), daemon=True).start()
    return app


def new_token() -> str:
    return secrets.token_urlsafe(18)


def look_ahead(runs: Runs) -> None:
    """What stands out in each run that has changed, again and again, with four fifths of the time free."""
    while True:
        for run in runs.all():
            begun = time.monotonic()
            with contextlib.suppress(Exception):  # a run that cannot be read says so on its page
                if run.noted[0] != run.version():
                    run.noted = run.version(), standing_out(run)
            time.sleep(4 * (time.monotonic() - begun))
        time.sleep(NOTED_SECONDS)


# ---- who may ask, and how answers look ------------------------------------------------------------------------------


def cookie(request: Request) -> str:
    """The cookie's name. Cookies do not know ports, so pages on two ports need two names: ports as the browser sees
    them, which forwards by `ssh -L` choose, not those on which the pages listen."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"look_{port}" if port.isdecimal() and len(port) < 6 else "look"


def presented(request: Request) -> tuple[str | None, str]:
    """The token, as it stands in the cookie and in the header."""
    return request.cookies.get(cookie(request)), request.headers.get("authorization", "").removeprefix("Bearer ")


def allowed(request: Request) -> bool:
    given = (request.query_params.get("token"), *presented(request))
    return any(same(word, request.app.state.token) for word in given if word)


def same(word: str, token: str) -> bool:
    return hmac.compare_digest(word.encode("utf-8", "replace"), token.encode())


def guarded(answer):
    """`answer(request)`, a value for JSON or a Response, for those with the token."""

    def endpoint(request: Request) -> Response:
        if not allowed(request):
            text = "Take the address that look.py printed when it started: it ends with ?token=..."
            reads = "text/html" in request.headers.get("accept", "")  # a browser's own request, such as a reload
            return Response(text, 401, HEADERS, "text/plain") if reads else respond({"error": text}, 401)
        try:
            made = answer(request)
        except Gone as error:
            return respond({"error": str(error)}, 404)
        except (ConfigError, samples.Unreadable) as error:
            return respond({"error": str(error)}, 422)
        return made if isinstance(made, Response) else respond(made)

    return endpoint


def missing(request: Request, error: HTTPException) -> Response:
    return respond({"error": f"There is nothing at {request.url.path}."}, error.status_code)


def failed(request: Request, error: Exception) -> Response:
    return respond({"error": f"{type(error).__name__} in look.py; its terminal shows where."}, 500)


def respond(value, status: int = 200) -> Response:
    """JSON in ASCII: half a surrogate pair, which a model may write, has no UTF-8."""
    body = json.dumps(plain(value), separators=(",", ":"), allow_nan=False)
    return Response(body, status, HEADERS | {"Cache-Control": "no-store"}, "application/json")


def unless_known(request: Request, tag: str | None, make) -> Response:
    """make(), or 304 where the browser has it: its ETag is `tag`, or follows from the answer itself."""
    if tag is not None and request.headers.get("if-none-match") == f'"{tag}"':
        return Response(status_code=304, headers=HEADERS | {"ETag": f'"{tag}"'})
    answer = make()
    if tag is None:
        tag = hashlib.sha256(answer.body).hexdigest()[:16]
        if request.headers.get("if-none-match") == f'"{tag}"':
            return Response(status_code=304, headers=HEADERS | {"ETag": f'"{tag}"'})
    answer.headers.update(HEADERS | {"Cache-Control": "no-cache", "ETag": f'"{tag}"'})
    return answer


def integer(text: str) -> int:
    if not text.isdecimal() or len(text) > 12:
        raise Gone(f"{text[:40]!r} is no number.")
    return int(text)


def whole(request: Request, name: str) -> int:
    return integer(request.query_params.get(name, ""))


def choice(request: Request, name: str, allowed: tuple[str, ...]) -> str:
    value = request.query_params.get(name, allowed[0])
    if value not in allowed:
        raise Gone(f"{name} is {value[:40]!r}; it is one of {', '.join(allowed)}.")
    return value


# ---- what can be asked ----------------------------------------------------------------------------------------------


def runs_of(request: Request) -> Runs:
    return request.app.state.runs


def page(request: Request) -> Response:
    answer = Response(
        request.app.state.files["index.html"], media_type="text/html", headers=HEADERS | {"Cache-Control": "no-store"}
    )
    # Not by a redirect: after one that begins on another site, as in a web terminal, a strict cookie is not sent.
    only = dict(httponly=True, samesite="strict", secure=request.url.scheme == "https")
    answer.set_cookie(cookie(request), request.app.state.token, path="/", **only)
    return answer


def file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in request.app.state.files:
        raise Gone(f"There is no file {name!r}.")
    kind = TYPES[Path(name).suffix]
    tag = hashlib.sha256(request.app.state.files[name]).hexdigest()[:16]
    return unless_known(request, tag, lambda: Response(request.app.state.files[name], media_type=kind))


def table(request: Request) -> Response:
    found = [run.summary() | run.noted[1] for run in runs_of(request).all()]
    found.sort(key=lambda run: -(run["updated"] or 0))
    return unless_known(request, None, lambda: respond({"root": storable(str(runs_of(request).root)), "runs": found}))


def of(request: Request) -> Run:
    return runs_of(request).get(request.query_params.get("run", ""))


def run(request: Request) -> Response:
    found, axis = of(request), choice(request, "x", ("step", "tokens", "seconds"))
    tag = digest(found.version(), found.state(), axis)
    return unless_known(request, tag, lambda: respond(described(found, axis)))


def notes(request: Request) -> Response:
    found = of(request)
    tag = digest(found.version(), found.state())
    return unless_known(request, tag, lambda: respond({"notes": all_notes(found)}))


def compare(request: Request) -> Response:
    names = list(dict.fromkeys(request.query_params.getlist("run")))[:COMPARED]
    axis = choice(request, "x", ("step", "tokens", "seconds"))
    seeds = request.query_params.get("seeds") == "1"
    chosen, gone = [], []
    for name in names:
        try:
            chosen.append(runs_of(request).get(name))
        except Gone:
            gone.append(name)
    tag = digest([(one.name, one.version()) for one in chosen], gone, axis, seeds)
    return unless_known(request, tag, lambda: respond(compared(chosen, axis, seeds) | {"gone": gone}))


def steps(request: Request) -> Response:
    """Of which there are files, as [first, how many, distance]."""
    found = {kind: of(request).steps(kind) for kind in samples.KINDS}
    told = {kind: [(part.start, len(part), part.step) for part in parts] for kind, parts in found.items()}
    return unless_known(request, None, lambda: respond(told))


def step_file(request: Request) -> Path:
    """The file of `kind` and `step`, found among those that are there."""
    kind, step = choice(request, "kind", samples.KINDS), whole(request, "step")
    return of(request).file(kind, samples.name_of(step))


def listing(request: Request) -> Response:
    path = step_file(request)
    return unless_known(request, digest(stamp(path)), lambda: respond(samples.listing(path)))


def found_text(request: Request) -> dict:
    text = request.query_params.get("text", "")[:1000]
    return {"rows": samples.search(step_file(request), text) if text else []}


def several(request: Request) -> dict:
    numbers = [integer(word) for word in request.query_params.get("rows", "").split(",") if word][:128]
    return {"rows": samples.described(step_file(request), numbers, 6000)}


def one(request: Request) -> dict:
    path, number = step_file(request), whole(request, "row")
    names = samples.opened(path).schema_arrow.names
    picture = "picture" in names and samples.image(path, number) is not None
    total = samples.count(path)
    return samples.described(path, [number])[0] | {"picture": picture, "total": total, "tokens": "token_ids" in names}


def tokens(request: Request) -> dict:
    return samples.tokens(step_file(request), whole(request, "row"), of(request).vocabulary()) or {}


def scales(request: Request) -> dict:
    return samples.scales(step_file(request))


def picture(request: Request) -> Response:
    data = samples.image(step_file(request), whole(request, "row"))
    if data is None:
        raise Gone("This row has no picture.")
    return Response(data, media_type="image/png", headers=HEADERS)


def over_time(request: Request) -> dict:
    """The completions of a row's prompt in all files of its kind, SECONDS of looking at a time."""
    path, number, kind = step_file(request), whole(request, "row"), choice(request, "kind", samples.KINDS)
    prompt, later = samples.prompt_of(path, number), integer(request.query_params.get("from", "0"))
    found, begun, asked = [], time.monotonic(), of(request)
    steps = [*chain.from_iterable(asked.steps(kind))]
    told = {"found": found, "files": len(steps), "next": None, "prompt": readable_prompt(prompt)[:20_000]}
    for place in range(later, len(steps)):
        if time.monotonic() - begun > SECONDS:
            return told | {"next": place}
        with contextlib.suppress(Gone, samples.Unreadable):  # the list of the step says so
            if rows := samples.of_prompt(asked.file(kind, samples.name_of(steps[place])), prompt, 2000):
                found.append({"step": steps[place], "rows": rows})
    return told


ANSWERS = {"runs": table, "run": run, "notes": notes, "compare": compare, "steps": steps, "listing": listing}
ANSWERS |= {"search": found_text, "rows": several, "row": one, "tokens": tokens, "picture": picture}
ANSWERS |= {"over_time": over_time, "scales": scales}


# ---- "Try": scripts/try.py with the flags that look.py was started with ---------------------------------------------


async def tried(request: Request) -> Response:
    """What scripts/try.py prints for the row, completions and call of the request. Only the page itself may ask: the
    token in the cookie (sent from its own address alone) or the header, not in an address, which could be a link's."""
    if not any(same(word, request.app.state.token) for word in presented(request) if word):
        return respond({"error": "Take the address that look.py printed when it started."}, 401)
    try:
        given = await request.json()
        words = ["--json", "--row", str(int(given.get("row", 0)))]
        for text in given.get("completions", []):
            words.append(f"--completion={text}")
        words += [f"--sample={int(given['sample'])}"] if given.get("sample") else []
        words += [f"--call={given['call']}"] if given.get("call") else []
    except (ValueError, TypeError, AttributeError):
        return respond({"error": "row and sample are numbers, completions a list of texts, call a text."}, 422)
    command = [sys.executable, str(TRY), *request.app.state.flags, *words]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, start_new_session=True)
    try:
        out, said = await asyncio.wait_for(process.communicate(), TRY_SECONDS)
    except TimeoutError:
        return respond({"error": f"scripts/try.py took more than {TRY_SECONDS} s and was ended."}, 422)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended; what it started may still run
            os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        return respond({"error": said.decode("utf-8", "replace")[-3000:]}, 422)
    return respond(json.loads(out.splitlines()[-1]))
