"""The page of look.py in a real browser: it grows while a run trains, others' text stays text, keys and contrast."""

import json
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from live import SMALL, running, trainer
from looking_at import looking
from made_runs import completions_table, make_run, write_step
from playwright import sync_api

from looking.report import write_report
from runfiles.reading import read_metrics

EVIL = "<script>window.hacked=1</script><img src=x onerror=window.hacked=2>'\"><b>bold</b>"
ODD = f"{EVIL}\x1b[31mred \u202egnp.exe zero\u200bwidth\u2066 \ufeff\x00 {{{{7*7}}}} %3Cb%3E"


@pytest.fixture(scope="module")
def browser(chromium):
    with sync_api.sync_playwright() as playwright:
        # Without its own sandbox Chromium starts as root, too, as in a container; it opens our own page alone.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A page about two runs, one of hostile text, and one that a test trains."""
    folder = tmp_path_factory.mktemp("site") / "runs"
    make_run(folder / "good", seed=1, rows=64)
    make_run(folder / "other", seed=2, learning_rate=1e-5)
    hostile(folder / "evil <img src=x onerror=window.hacked=4>")
    with looking(folder) as page:
        yield page


@pytest.fixture(params=["light"])
def tab(browser, site, request):
    """A tab that has the token; a script error, a dialog or a script of others' fails the test."""
    problems = []
    context = browser.new_context(viewport={"width": 1400, "height": 900}, color_scheme=request.param)
    tab = context.new_page()
    tab.set_default_timeout(60_000)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("dialog", lambda dialog: (problems.append("a dialog"), dialog.dismiss()))
    tab.goto(site.address)
    assert site.token not in tab.url
    tab.show = lambda place: tab.goto(f"{site.root}/#/{place}")
    yield tab
    hacked = tab.evaluate("window.hacked")
    context.close()
    assert not problems and not hacked, (problems, hacked)


def hostile(folder) -> None:
    """Everything that a model, a data set or a tool may write, in every place where text can stand."""
    make_run(folder, files=1, rows=8, state="failed", dataset_id=ODD, **{EVIL: ODD})
    state = json.loads((folder / "state.json").read_text(encoding="utf-8")) | {"why": ODD}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        line = {"step": 41, f"rewards/{EVIL}": 0.5, EVIL: 1.0, f"time/{EVIL}": 1.0, f"{EVIL}/reward": 1}
        file.write(json.dumps(line) + "\n")
    (folder / "command.txt").write_bytes(ODD.encode() + b"\xff\xfe")
    table = completions_table(40, 8, 60)
    rows, call = table.to_pylist(), {"name": ODD, "arguments": ODD, "result": ODD, "seconds": 0.5}
    for row in rows:
        row["prompt"] = row["completion"] = row["finish_reason"] = row["domain"] = row[EVIL] = ODD
        row[f"rewards/{EVIL}"] = 1.0
        for turn in row["turns"]:
            turn |= {"text": ODD, "observation": [ODD], "state": ODD}
            turn["calls"] = [call | {"failed": True}]
    more = [pa.field(f"rewards/{EVIL}", pa.float64()), pa.field(EVIL, pa.string())]
    schema = pa.schema([*table.schema, *more])
    write_step(folder / "completions" / "step_000040.parquet", pa.Table.from_pylist(rows, schema=schema))
    pieces = [EVIL, "\u202e", "\x1b[31m", "\u200b", "</script>", "a\u0300"]
    vocabulary = {"id": pa.array(range(200), pa.int32()), "special": [n < 3 for n in range(200)]}
    vocabulary["piece"] = pa.array([pieces[n % 6].encode() if n % 7 else b"\xff" for n in range(200)], pa.binary())
    pq.write_table(pa.table(vocabulary), folder / "vocabulary.parquet")


def points(tab, title: str) -> int:
    """Of the chart with this title, as it is drawn."""
    find = "[...document.querySelectorAll('article')].find(a => a.querySelector('h3').textContent === title)"
    return int(tab.evaluate(f"(title) => {find}?.dataset.drawn ?? 0", title))


def until(condition, limit: float = 120):
    """Not by wait_for_function, which needs what the content security policy forbids."""
    deadline = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


# ---- use ------------------------------------------------------------------------------------------------------------


def test_a_run_is_followed_while_it_trains(tab, site, tmp_path):
    """A real training: its state, growing curves without a reload, then its completions."""
    slow = "import time\n\ndef slow(prompts, **_):\n    time.sleep(0.3)\n    return [1.0] * len(prompts)\n"
    (tmp_path / "slow.py").write_text(slow, encoding="utf-8")  # so that one can look meanwhile
    flags = f"{SMALL} --max_steps 12 --output_dir {site.folder} --run_name live --reward_funcs {tmp_path}/slow.py:slow"
    with running(trainer(tmp_path / "log", *flags.split())) as run:
        run.until(lambda: tab.locator("td a:has-text('live')").count())
        tab.click("td a:has-text('live')")
        tab.evaluate("window.stays = 1")
        first = until(lambda: points(tab, "Reward"))
        assert run.end() == 0, run.text
        tab.wait_for_selector(".state.finished")
        number = sum("reward" in line for line in read_metrics(site.folder / "live"))
        until(lambda: points(tab, "Reward") == number == 12)
        assert first <= 12 and tab.evaluate("window.stays") == 1
    tab.click("nav >> text=Trajectories")
    tab.wait_for_selector(".list .line")
    assert "16 completions" in tab.locator(".bar").inner_text() and tab.input_value("select.step") == "12"


def test_runs_are_filtered_and_compared(tab):
    tab.show("runs")
    tab.wait_for_selector("tbody tr:nth-child(3)")
    tab.fill("input[type=search]", "good")
    assert tab.locator("tbody tr").count() == 1
    tab.fill("input[type=search]", "")
    for name in ("good", "other"):
        tab.check(f"input[aria-label='Compare {name}']")
    tab.click("button.primary")
    card = tab.locator("article", has=tab.locator("h3", has_text="Entropy"))
    card.scroll_into_view_if_needed()
    until(lambda: card.get_attribute("data-drawn") == "80")
    settings = tab.locator(".card.settings").inner_text()
    assert "learning_rate" in settings and "0.0003" in settings and "advantage" not in settings
    labels = "import('/page/text.js').then(({ short }) => [8.291, 8.2915, 1.05e6, 9e-7].map((y) => short(y, y / 1e4)))"
    assert tab.evaluate(labels) == ["8.291", "8.2915", "1.05e6", "9e-7"]


def test_a_trajectory_is_found_and_read_by_its_tokens(tab, site):
    """By mouse, and by keys alone."""
    tab.show("trajectories?run=good")
    tab.wait_for_selector(".list .line")
    tab.fill("input[type=search]", "no such words anywhere")
    tab.wait_for_selector("text=No completion fits")
    tab.fill("input[type=search]", "")
    tab.select_option("select[aria-label=Domain]", "code")
    tab.wait_for_selector("[role=status]:has-text('16 of 64')")
    tab.wait_for_selector(".completion[aria-current]")
    assert tab.locator(".completion").count() == 8, "those of its group side by side"
    tab.click(".completion[aria-current] a")
    tab.wait_for_selector(".tokens .token")
    rows = pq.read_table(site.folder / "good/completions/step_000040.parquet").to_pylist()
    row = rows[int(tab.locator("h1").inner_text().split()[1])]
    shown = tab.locator(".token-view > .tokens .token")
    assert shown.count() == len(row["token_ids"]) and tab.locator(".call b").first.inner_text() == "calculator"
    assert tab.locator(".token.masked").count() == row["tokens/trained"].count(False) > 0
    for name in ("logprob", "entropy", "difference"):
        tab.select_option(".token-view select", name)
        assert len({span.evaluate("s => getComputedStyle(s).backgroundColor") for span in shown.all()[:12]}) > 1, name
    shown.nth(3).hover()
    numbers = tab.locator(".numbers").inner_text()
    assert f"{row['token_ids'][3]}" in numbers and "4 of" in numbers
    tab.mouse.move(0, 0)  # else it points at tokens, too
    tab.show("trajectories?run=good")
    tab.wait_for_selector(".list .line")
    tab.focus(".list")
    for key in ("ArrowDown", "End", "Enter"):
        tab.keyboard.press(key)
    tab.wait_for_selector("h1:has-text('Completion 63')")
    tab.wait_for_selector(".token-view")
    tab.keyboard.press("k")
    tab.wait_for_selector("h1:has-text('Completion 62')")
    tab.wait_for_selector(".token-view")
    tab.focus(".token-view > .tokens")
    tab.keyboard.press("ArrowRight")
    assert "2 of" in tab.locator(".numbers").inner_text()


CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, n) => sum + v * [0.2126, 0.7152, 0.0722][n], 0);
  const over = (top, under) => { const a = top[3] ?? 1; return [0, 1, 2].map((n) => a * top[n] + (1 - a) * under[n]); };
  const ground = (e) => { const layers = [];
    for (; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]); };
  const poor = [];
  for (const e of document.querySelectorAll("body *")) {
    const drawn = e instanceof SVGTextContentElement && e.getClientRects().length > 0;
    if (!(drawn || e.offsetParent) || e.closest(":disabled, [aria-disabled], .saves, option")) continue;
    if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    const style = getComputedStyle(e), under = ground(e), b = light(under);
    const a = light(over(parse(drawn ? style.fill : style.color), under));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) poor.push(`${ratio.toFixed(2)} ${e.className} ${e.textContent.slice(0, 40)}`);
  }
  return poor;
}"""
UNNAMED = """() => [...document.querySelectorAll('a, button, input, select')].filter(e => e.offsetParent
  && !(e.textContent.trim() || e.getAttribute('aria-label') || e.closest('label'))).map(e => e.outerHTML)"""


@pytest.mark.parametrize("tab", ["light", "dark"], indirect=True)
def test_text_stands_out_and_what_can_be_used_has_a_name(tab):
    """WCAG 2.2 AA: 4.5 to 1, 3 to 1 for large text."""
    place = "run=good&kind=completions&step=40&row=9"
    views = {"runs": "tbody tr", "run?run=good": "article[data-drawn]", "trajectories?run=good": ".completion"}
    views |= {"run?run=good&run=other": "article[data-drawn]"}
    views |= {f"trajectory?{place}&colour={name}": ".token" for name in ("trained", "weight", "entropy", "difference")}
    for view, ready in views.items():
        tab.show(view)
        tab.wait_for_selector(ready)
        assert tab.evaluate(CONTRAST) == [] == tab.evaluate(UNNAMED), view


# ---- others' text ---------------------------------------------------------------------------------------------------


def test_hostile_text_is_shown_and_never_run(tab, site):
    name = next(path.name for path in site.folder.iterdir() if path.name.startswith("evil"))
    place = f"run={name.replace(' ', '+').replace('=', '%3D')}&kind=completions&step=40&row=0"
    for view, ready in (
        ("runs", "tbody tr:nth-child(3)"),
        (f"run?{place}", "article[data-drawn]"),
        (f"run?{place}&run=good", "article[data-drawn]"),
        (f"trajectories?{place}", ".completion"),
        (f"trajectory?{place}", ".token"),
    ):
        tab.show(view)
        tab.wait_for_selector(ready)
        tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        content = tab.locator("main")
        assert content.locator("script, img").count() == 0, view
        assert "bold" not in content.locator("b").all_text_contents(), view
        assert view == "runs" or "onerror=window.hacked" in content.inner_text(), view
    text = tab.locator("main").inner_text()
    for shown in (
        "<script>window.hacked=1</script>",
        "U+202E",
        "U+200B",
        "U+001B[31mred",
        "U+0000",
        "{{7*7}}",
        "\\xff",
    ):
        assert shown in text, shown
    marks = "[\\u0000-\\u0008\\u001b\\u200b\\u202e\\u2066]"
    assert not tab.evaluate(f"new RegExp('{marks}').test(document.querySelector('main').textContent)")


def test_the_report_shows_tokens_by_itself(browser, site):
    """One file, from disk, without a server: the same view, no request, and no script but its own."""
    report = write_report(next(path for path in site.folder.iterdir() if path.name.startswith("evil")))
    context = browser.new_context()
    tab, problems = context.new_page(), []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
    tab.goto(report.as_uri())
    tab.wait_for_selector("article[data-drawn]")
    unchanged = tab.locator("article", has=tab.locator("h3", has_text="Age of the weights"))
    assert unchanged.is_hidden() and "policy_lag 0," in tab.locator("main").inner_text()
    assert tab.evaluate(CONTRAST) == []
    tab.locator("a[href*='trajectory?']").first.click()
    tab.wait_for_selector(".token-view .token")
    assert tab.locator(".token.masked").count() > 0 and tab.evaluate("window.hacked") is None
    context.close()
    assert not problems and report.stat().st_size < 3_000_000
