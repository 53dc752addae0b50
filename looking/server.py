"""The page's server: answers requests about run folders that carry the token.

Answers are JSON; a model's text never becomes HTML here. The page is static files (page/), which insert text as text;
the content security policy allows no other scripts.
"""

import base64
import hmac
import json
import subprocess
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from config import ConfigError
from looking.runs import Gone, Run, Runs, plain
from looking.told import page_content, standing_out
from runfiles import samples

PAGE = Path(__file__).parent / "page"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
POLICY += "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
HEADERS = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
HEADERS["Cache-Control"] = "no-store"
COMPARED = 40  # most runs on one page
TRY_SECONDS = 300  # limit of a trial


def make_app(root: Path, token: str, trial: list[str] | None = None) -> Starlette:
    """The page about the run folders below `root`. Requests for data need `token` in a header; the page takes it from
    its own address. trial: the command of the page "Try" (scripts/try.py with a training's flags); None: no such page.
    """
    routes = [Route("/", page), Mount("/page", StaticFiles(directory=PAGE)), Route("/api/{name}", answer)]
    app = Starlette(routes=routes)
    app.add_middleware(GZipMiddleware, minimum_size=2000, compresslevel=1)
    app.state.runs, app.state.token = Runs(root), token
    app.state.answers = ANSWERS | ({} if trial is None else {"try": partial(try_row, trial)})
    return app


def page(request: Request) -> Response:
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    if "try" in request.app.state.answers:
        text = text.replace("<body>", "<body data-try>")
    return Response(text, media_type="text/html", headers=HEADERS)


def allowed(request: Request) -> bool:
    authorization = request.headers.get("authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(authorization.encode("utf-8", "replace"), request.app.state.token.encode())


def respond(value, status: int = 200) -> Response:
    """JSON in ASCII, since a lone surrogate, which a model may write, has no UTF-8."""
    body = json.dumps(plain(value), separators=(",", ":"), allow_nan=False)
    return Response(body, status, HEADERS, "application/json")


def answer(request: Request) -> Response:
    """/api/NAME: the answer of the function of that name."""
    if not allowed(request):
        return respond({"error": "Take the address that look.py printed when it started: it ends with ?token=..."}, 401)
    state = request.app.state
    try:
        return respond(state.answers[request.path_params["name"]](state.runs, request.query_params))
    except LookupError as error:  # includes Gone
        return respond({"error": f"There is no {error}" if isinstance(error, KeyError) else str(error)}, 404)
    except (ConfigError, ValueError) as error:  # includes samples.Unreadable
        return respond({"error": str(error)}, 422)


# ---- requests -------------------------------------------------------------------------------------------------------


def table(runs: Runs, ask: QueryParams) -> dict:
    summaries = [run.summary() | standing_out(run) for run in runs.all()]
    return {"root": str(runs.root), "runs": sorted(summaries, key=lambda run: -(run["updated"] or 0))}


def runs_page(runs: Runs, ask: QueryParams) -> dict:
    names = list(dict.fromkeys(ask.getlist("run")))[:COMPARED]
    return page_content([runs.get(name) for name in names], ask.get("x", "step"))


def of(runs: Runs, ask: QueryParams) -> Run:
    return runs.get(ask["run"])


def steps(runs: Runs, ask: QueryParams) -> dict:
    """The steps that have files, by kind."""
    folders = {kind: of(runs, ask).path / kind for kind in samples.KINDS}
    return {kind: [samples.step_of(path) for path in samples.step_files(folder)] for kind, folder in folders.items()}


def step_file(runs: Runs, ask: QueryParams) -> Path:
    """The file of the request's `kind` and `step`."""
    if ask["kind"] not in samples.KINDS:
        raise Gone(f"There are no files of the kind {ask['kind']!r}.")
    return of(runs, ask).path / ask["kind"] / samples.name_of(int(ask["step"]))


def row(runs: Runs, ask: QueryParams) -> dict:
    path, number = step_file(runs, ask), int(ask["row"])
    names = samples.columns_of(path)
    image = samples.rows(path, [number], ["picture"])[0]["picture"] if "picture" in names else None
    picture = f"data:image/png;base64,{base64.b64encode(image).decode()}" if image else None
    extras = {"picture": picture, "total": samples.parquet_file(path).metadata.num_rows, "tokens": "token_ids" in names}
    return samples.readable_rows(path, [number])[0] | extras


def try_row(trial: list[str], runs: Runs, ask: QueryParams) -> dict:
    """What the command prints for a row and completions."""
    words = [f"--row={ask.get('row', 0)}", *(f"--completion={text}" for text in ask.getlist("completion"))]
    words += [f"--sample={ask['sample']}"] if "sample" in ask else []
    try:
        result = subprocess.run([*trial, *words], capture_output=True, timeout=TRY_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"The trial took more than {TRY_SECONDS} s and was ended.") from None
    if result.returncode:
        raise ConfigError(result.stderr.decode("utf-8", "replace")[-3000:])
    return {"text": result.stdout.decode("utf-8", "replace")}


def of_rows(runs: Runs, ask: QueryParams) -> dict:
    return {"rows": samples.readable_rows(step_file(runs, ask), [int(word) for word in ask["rows"].split(",")])}


ANSWERS = {
    "runs": table,
    "run": runs_page,
    "steps": steps,
    "listing": lambda runs, ask: samples.listing(step_file(runs, ask)),
    "search": lambda runs, ask: {"rows": samples.search(step_file(runs, ask), ask["text"])},
    "rows": of_rows,
    "row": row,
    "tokens": lambda runs, ask: samples.tokens(
        step_file(runs, ask), int(ask["row"]), samples.vocabulary(of(runs, ask).path)
    ),
}
