"""report.html: the page about one run in one file, data included, to send to others. It needs no server.

    python look.py runs/NAME --report

The file contains the page's scripts (page/) unchanged, and the answers to their requests: the run's curves, and a few
trajectories.
"""

import base64
import hashlib
import html
import json
import re
from pathlib import Path
from urllib.parse import urlencode

from looking.runs import Run, plain
from looking.told import page_content
from runfiles import samples
from runfiles.storable import replacing

PAGE = Path(__file__).parent / "page"
TOKENS = 2000  # most tokens of a trajectory
START = 'import "page/app.js";'


def answers_of(run: Run) -> dict:
    """{request: answer} of the page's server, and a list of the trajectories in the file, under "trajectories".

    From the first and the last step with tokens, these are the best and the worst completion of the group in which
    rewards differ most."""
    answers = {f"run?{urlencode({'run': run.name, 'x': 'step'})}": page_content([run], "step")}
    places, vocabulary = [], samples.vocabulary(run.path)
    for path in samples.first_and_last(run.path / "completions", "token_ids"):
        for number in samples.best_and_worst(path):
            place = {"run": run.name, "kind": "completions", "step": samples.step_of(path), "row": number}
            query, extras = urlencode(place), {"picture": None, "total": 0, "tokens": True}
            answers[f"row?{query}"] = samples.readable_rows(path, [number])[0] | extras
            answers[f"tokens?{query}"] = samples.tokens(path, number, vocabulary, TOKENS)
            places.append(place)
    return answers | {"trajectories": places}


def read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def module(name: str) -> str:
    """A script of the page as a data: URL, whose imports are names in the import map."""
    text = read(name).replace('from "./', 'from "page/')
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_report(folder: Path) -> Path | None:
    """Write report.html into the run folder; returns its path, or None if nothing has been logged yet."""
    folder = Path(folder).resolve()
    run = Run(folder.name, folder)
    if not run.curves().columns:
        return None
    answers = json.dumps(plain(answers_of(run)), separators=(",", ":")).replace("<", "\\u003c")  # ends no <script>
    names = [path.name for path in PAGE.glob("*.js") if path.name != "uplot.js"]
    charts = read("uplot.js")
    imports = json.dumps({"imports": {f"page/{name}": module(name) for name in sorted(names)}})
    policy = f"script-src data: {' '.join(map(digest, (charts, imports, START)))}; style-src 'unsafe-inline'"
    page = read("index.html")
    page = re.sub(r'<link rel="stylesheet" href="/page/(\S+)">', lambda link: f"<style>{read(link[1])}</style>", page)
    page = re.sub(r"\s*<(link|script) [^>]*/page/[^>]*>(</script>)?", "", page)
    head = f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; {policy}">'
    page = page.replace("<head>", f"<head>{head}").replace("<title>Runs", f"<title>{html.escape(run.name)}")
    scripts = f'<script type="application/json" id="inlined">{answers}</script><script>{charts}</script>'
    scripts += f'<script type="importmap">{imports}</script><script type="module">{START}</script>'
    page = page.replace("</body>", f"{scripts}</body>")
    with replacing(folder / "report.html") as path:
        path.write_text(page, encoding="utf-8")
    return folder / "report.html"
