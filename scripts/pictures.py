"""Pictures of a run's page and of its report: bash scripts/pictures.sh RUN [STEP ROW]."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runlog import samples  # noqa: E402
from runlog.report import write_report  # noqa: E402
from safety.orphans import ends_with_us  # noqa: E402

IMAGES = ROOT / "docs" / "images"
WIDTH = 1300


@contextlib.contextmanager
def page(folder: Path) -> Iterator[str]:
    """The address of look.py on the folder."""
    command = [sys.executable, str(ROOT / "look.py"), str(folder), "--prepare"]
    options = dict(stdout=subprocess.PIPE, text=True, encoding="utf-8", preexec_fn=ends_with_us())
    process = subprocess.Popen(command, **options)
    try:
        yield re.search(r"http://\S+", process.stdout.readline())[0]
    finally:
        process.terminate()
        process.wait(10)


def shown(run: Path, arguments: list[str]) -> dict:
    """The trajectory to show: as given, or of the last step the best of the group that differs most."""
    if len(arguments) == 2:
        return {"kind": "completions", "step": arguments[0], "row": arguments[1]}
    path = samples.first_and_last(run / "completions")[-1]
    return {"kind": "completions", "step": samples.step_of(path), "row": samples.telling(path)[0][0]}


def settings(run: Path) -> dict:
    """Those of the run that say what its rows are, as they stand in the page's address."""
    known = json.loads((run / "config.json").read_text(encoding="utf-8"))
    return {f"s.{name}": known[name] for name in ("model_id", "dataset_id", "max_prompt_length")}


def main(arguments: list[str]) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if len(arguments) not in (1, 3) or not Path(arguments[0]).is_dir() or not chromium:
        raise SystemExit(__doc__ if chromium else "pictures: no Chromium here; on Debian: apt install chromium")
    from playwright.sync_api import sync_playwright

    run = Path(arguments[0]).resolve()
    place = shown(run, arguments[1:])
    views = {
        "look-run": ("run", {"run": run.name}, ".top-charts svg.main-svg", 860),
        "look-group": ("trajectories", {"run": run.name, **place}, ".completion", 760),
        "look-tokens": ("trajectory", {"run": run.name, **place, "colour": "weight"}, ".token-view .token", 640),
        "look-prepare": ("prepare", {"tab": "rows", **settings(run)}, ".token-view .token", 1010),
    }
    with sync_playwright() as playwright, page(run.parent) as address:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": WIDTH, "height": 800})
        tab.goto(address)
        for name, (view, given, ready, height) in views.items():
            tab.set_viewport_size({"width": WIDTH, "height": height})
            tab.goto(f"{address.partition('?')[0]}#/{view}?{urlencode(given)}")
            tab.wait_for_selector(ready)
            if view == "trajectory":
                tab.hover(".token-view > .tokens .token >> nth=5")
            tab.wait_for_timeout(1500)  # charts and fonts
            tab.screenshot(path=IMAGES / f"{name}.png")
            print(f"docs/images/{name}.png")
        tab.set_viewport_size({"width": WIDTH, "height": 900})
        tab.goto(write_report(run).as_uri())
        tab.wait_for_selector("img")
        tab.screenshot(path=IMAGES / "report.png", full_page=True)
        print("docs/images/report.png")
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
