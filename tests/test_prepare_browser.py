"""The tabs of look.py --prepare in a real browser, against a copy of the checkout: rows, rewards, tools over MCP, an
environment that is played, a run that is started, followed, stopped and resumed; keys and contrast."""

import json
import sys
import time
from urllib.parse import urlencode

import pytest
import test_look_browser
from looking_at import ROOT, checkout, looking
from test_look_browser import CHROMIUM, CONTRAST, opened, until

from looking.launches import born

browser = test_look_browser.browser  # a fixture
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)"),
    pytest.mark.in_turn,
]

SMALL = dict(model_id="models/tiny", generator="hf", dataset_id="examples/sums.py:rows", reward_funcs="last_number")
SMALL |= dict(compute_dtype="float32", prompts_per_step="4", num_generations="4", max_prompt_length="64")
SMALL |= dict(max_completion_length="8", learning_rate="1e-3", print_samples_every="0")
GAME = SMALL | dict(env="frozenlake", dataset_id="seeds:20", reward_funcs="environment", max_prompt_length="600")
GAME |= dict(max_completion_length="400")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    here = checkout(tmp_path_factory.mktemp("look") / "here")
    with looking(here / "runs", "--prepare", cwd=here) as page:
        page.here = here
        yield page


@pytest.fixture
def tab(browser, site):
    with opened(browser, site) as tab:
        tab.set_default_timeout(90_000)
        tab.wait_for_selector("tbody tr")
        yield tab


def show(tab, name: str, settings: dict, **plan: str) -> None:
    query = {"tab": name} | {f"s.{k}": v for k, v in settings.items()} | {f"p.{k}": v for k, v in plan.items()}
    tab.show(f"prepare?{urlencode(query)}")
    tab.wait_for_selector("section.result", state="attached")
    if tab.locator("text=Run it").count():  # not entered in this tab so far
        tab.click("text=Run it")


def test_a_link_runs_nothing_by_itself(tab, site):
    trace = site.here / "ran"
    text = f"def rows(split, seed, n):\n    open({str(trace)!r}, 'a').write('x')\n    return [{{'prompt': 'p'}}] * n\n"
    (site.here / "traced.py").write_text(text, encoding="utf-8")
    own = SMALL | {"dataset_id": "traced.py:rows?n=4"}
    for name in ("rows", "rewards", "tools"):
        tab.show(f"prepare?{urlencode({'tab': name} | {f's.{key}': value for key, value in own.items()})}")
        tab.wait_for_selector(".note:has-text('--dataset_id=traced.py:rows?n=4')")
    tab.fill("#settings-max_turns", "3")  # one of them was entered
    tab.click("nav.tabs a[data-tab=rows]")
    tab.wait_for_selector(".note:has-text('--max_turns=3')")
    assert not trace.exists()
    tab.click("text=Run it")
    tab.wait_for_selector(".token-view .token")
    assert trace.exists() and not tab.locator("text=Run it").count()
    tab.fill("#settings-dataset_id", "traced.py:rows?n=5")
    tab.click("nav.tabs a[data-tab=rewards]")
    tab.wait_for_selector(".answer:has-text('p')")
    other = SMALL | {"dataset_id": "traced.py:rows?n=6"}
    tab.show(f"prepare?{urlencode({'tab': 'rows'} | {f's.{key}': value for key, value in other.items()})}")
    tab.wait_for_selector("text=Run it")


def test_rows_with_a_bad_line_then_a_csv_whose_question_becomes_the_prompt(tab, site):
    lines = [json.dumps({"prompt": f"What is {n} + {n}?", "answer": str(2 * n)}) for n in range(6)]
    (site.here / "bad.jsonl").write_text("\n".join([*lines[:3], '{"prompt": "cut', *lines[3:]]), encoding="utf-8")
    show(tab, "rows", SMALL | {"dataset_id": "bad.jsonl", "prompts_per_step": "2"})
    tab.wait_for_selector(".note.bad:has-text('bad.jsonl, line 4: not valid jsonl')")
    (site.here / "bad.jsonl").write_text("\n".join([*lines, json.dumps({"prompt": "long " * 99})]), encoding="utf-8")
    tab.click("text=Read the rows")
    tab.wait_for_selector(".token-view .token")
    assert "left out" in tab.locator("tr.out").inner_text() and tab.locator(".rows-list tbody tr").count() == 7
    tiles = tab.locator(".tile .big").all_inner_texts()
    assert tiles[:2] == ["7", "1"]
    assert tab.locator(".token.special").first.inner_text() == "<|im_start|>"
    file = {"name": "questions.csv", "mimeType": "text/csv"}
    rows = "".join(f"What is {n} + 1?,{n + 1}\n" for n in range(30))
    tab.set_input_files("input[type=file]", files=[file | {"buffer": f"question,answer\n{rows}".encode()}])
    tab.wait_for_selector("text=Which column is the question?")
    assert tab.input_value("#settings-dataset_id") == "dropped/questions.csv"
    tab.click("text=Write a python file that does this")
    until(lambda: tab.locator(".tile .big").all_inner_texts()[:1] == ["27"])
    assert tab.input_value("#settings-dataset_id") == "my_rows.py:rows"


def test_a_reward_of_ones_own_is_begun_raises_and_is_mended(tab, site):
    show(tab, "rewards", SMALL)
    tab.click("text=Begin a reward of my own")
    tab.wait_for_selector("text=is written, for an answer in the column answer: open it")
    file = site.here / "my_rewards.py"
    assert tab.input_value("#settings-reward_funcs") == "my_rewards.py:right" and file.is_file()
    tab.locator("textarea").nth(0).fill("It is 20.")
    tab.locator("textarea").nth(1).fill("It is 21.")
    tab.click("button:text-is('Score them')")
    tab.wait_for_selector("tr.sum")
    numbers = [row.locator("td.n").all_inner_texts()[-2:] for row in tab.locator(".result tbody tr").all()]
    assert numbers == [["1", "0"], ["1", "0"], ["0.707", "-0.707"]]
    text = file.read_text(encoding="utf-8")
    file.write_text(
        text + "\n\ndef right(completions, **_):\n    return [1 / 0 for _ in completions]\n", encoding="utf-8"
    )
    tab.click("button:text-is('Score them')")
    tab.wait_for_selector(".note.bad:has-text('my_rewards.py, line 13')")
    file.write_text(text, encoding="utf-8")
    tab.fill("input[aria-label='How many to sample']", "3")
    tab.click("button:text-is('Sample')")
    tab.wait_for_selector("tr.sum")
    until(lambda: tab.locator("textarea").count() == 3)
    tab.locator("details.card summary").nth(2).click()
    assert tab.locator(".token-view .token").count() > 0


def test_a_tool_over_mcp_is_called_and_frozen_lake_is_played(tab, site):
    server = {"command": sys.executable, "args": [str(ROOT / "tests" / "mcp_server.py")]}
    (site.here / "mcp.json").write_text(json.dumps({"mcpServers": {"files": server}}), encoding="utf-8")
    show(tab, "tools", SMALL | {"mcp_config": "mcp.json", "max_prompt_length": "4000"})
    tool = tab.locator("section.turn", has=tab.locator("h3", has_text="echo"))
    tool.locator("textarea").fill('{"text": "is this mic on?"}')
    tool.locator("text=Call it").click()
    tool.locator(".call:has-text('is this mic on?')").wait_for()
    tool.locator("textarea").fill('{"text": 2')
    tool.locator("text=Call it").click()
    tool.locator(".note.bad:has-text('no JSON')").wait_for()
    tab.route("**/api/prepare/tools", lambda route: None)  # its answer may come after the first turn, or never
    show(tab, "tools", GAME)
    tab.click("text=Play it as the model")
    for turn in range(8):
        tab.wait_for_selector(f".card:has(h2:text-is('{'So far' if turn else 'The prompt'}'))")
        tab.locator("button:has-text('Right')").first.click()
        until(lambda n=turn: tab.locator(".turn-mark").count() > 2 * n or tab.locator("h2:has-text('Over')").count())
        if tab.locator("h2:has-text('Over')").count():
            break
    tab.wait_for_selector("h2:has-text('Over: reward')")
    assert tab.locator(".token.masked").count() > 10
    assert tab.locator(".result table").inner_text().count("environment") == 1


def test_a_run_is_started_followed_stopped_and_resumed_from_the_page(tab, site):
    slow = "import time\n\n\ndef slow(completions, **_):\n    time.sleep(0.3)\n    return [0.0] * len(completions)\n"
    (site.here / "slow.py").write_text(slow, encoding="utf-8")
    own = {"reward_funcs": "slow.py:slow", "max_steps": "14", "save_steps": "2", "run_name": "from the page"}
    show(tab, "launch", SMALL | own)
    tab.wait_for_selector("pre.command:has-text('--save_steps=2')")
    tab.fill("#settings-learning_rate", "-1")
    tab.wait_for_selector("[data-field=learning_rate] .fault:has-text('must be above 0')")
    assert tab.locator("button:text-is('Start it')").is_disabled()
    tab.fill("#settings-learning_rate", "1e-3")
    tab.locator("button:text-is('Start it'):enabled").click()
    tab.click(".launched >> button:text-is('log')")
    until(lambda: (site.folder / "from the page" / "checkpoints").is_dir() and "step 4/" in tab.inner_text("pre.log"))
    tab.click(".launched >> button:text-is('stop')")
    tab.wait_for_selector(".launched button:text-is('resume')")
    state = json.loads((site.folder / "from the page" / "state.json").read_text(encoding="utf-8"))
    assert state["state"] == "interrupted"
    tab.click(".launched >> button:text-is('resume')")
    tab.wait_for_selector(".launched .state.finished")
    state = json.loads((site.folder / "from the page" / "state.json").read_text(encoding="utf-8"))
    assert state["state"] == "finished" and "step 14/" in tab.inner_text("pre.log")
    tab.click(".launched >> text=settings")
    until(lambda: tab.input_value("#settings-save_steps") == "2" and tab.input_value("#settings-run_name") == "")
    tab.click(".launched >> text=curves")
    tab.wait_for_selector("h1:has-text('from the page')")


def test_a_log_stays_where_it_is_read_and_is_asked_for_once_a_second(tab):
    text, asked = "".join(f"line {n}\n" for n in range(300)), []
    one = dict(name="n", script="train_grpo.py", time=1e9, command="c", run="n", alive=True, status=None, why="")
    one |= dict(state="running", has_run=False, can_resume=False, settings=None)

    def about(route):
        told = route.fetch().json()
        route.fulfill(json=told | {"launched": [one | {"step": int(10 * time.monotonic())}]})

    def log(route):
        start = int(route.request.url.partition("from=")[2])
        asked.append(time.monotonic())
        route.fulfill(json={"text": text[start:], "from": start, "end": len(text)})

    tab.route("**/api/prepare?*", about)
    tab.route("**/api/launch_log*", log)
    show(tab, "launch", SMALL)
    tab.click(".launched >> button:text-is('log')")
    tab.wait_for_selector("pre.log:has-text('line 299')")
    top = "document.querySelector('pre.log').scrollTop"
    tab.evaluate(f"{top} = 1000")
    step = tab.locator(".launched .state").inner_text()
    until(lambda: tab.locator(".launched .state").inner_text() != step)
    assert tab.evaluate(top) == 1000
    for _ in range(6):
        tab.click(".launched >> button:text-is('log')")
    tab.wait_for_selector("pre.log:has-text('line 299')")
    assert tab.locator("pre.log").text_content().count("line 299") == 1
    begun = time.monotonic()
    tab.wait_for_timeout(3500)
    assert sum(at > begun for at in asked) <= 4


def test_a_run_goes_on_when_its_page_is_killed_and_the_next_one_stops_it(browser, site, tmp_path):
    with looking(site.folder, "--prepare", cwd=site.here) as first, opened(browser, first) as tab:
        tab.set_default_timeout(90_000)
        tab.wait_for_selector("tbody tr")
        show(tab, "launch", SMALL | {"reward_funcs": "zero", "max_steps": "2000", "run_name": "outlives"})
        tab.locator("button:text-is('Start it'):enabled").click()
        metrics = site.folder / "outlives" / "metrics.jsonl"
        until(lambda: metrics.exists() and metrics.stat().st_size)
        first.process.kill()
        first.process.wait()
        size = metrics.stat().st_size
        until(lambda: metrics.stat().st_size > size)
    with looking(site.folder, "--prepare", cwd=site.here) as next_one, opened(browser, next_one) as tab:
        tab.set_default_timeout(90_000)
        tab.wait_for_selector("tbody tr")
        show(tab, "launch", SMALL)
        tab.locator(".launched", has_text="outlives").locator("button:text-is('stop')").click()
        tab.locator(".launched", has_text="outlives").locator(".state.interrupted").wait_for()
    record = json.loads((site.folder / ".launched" / "outlives.launch").read_text(encoding="utf-8"))
    assert born(record["pid"]) is None


def test_keys_reach_every_tab_and_text_stands_out(tab, site):
    unnamed = """[...document.querySelectorAll('a, button, input, select, textarea')].filter(e => e.offsetParent
        && !(e.textContent.trim() || e.getAttribute('aria-label') || e.closest('label') || e.labels?.length))"""
    ready = {"rows": ".token", "rewards": "textarea", "tools": ".result p", "fit": ".memory", "launch": ".knobs .field"}
    for name, selector in ready.items():
        show(tab, name, SMALL | {"epsilon": "0.3"}, gpus="1", gpu_memory="24")
        if name == "fit":
            tab.focus("button:text-is('Will it fit?')")
            tab.keyboard.press("Enter")
        if name == "rewards":
            tab.locator("textarea").nth(0).fill("20")
            tab.focus("button:text-is('Score them')")
            tab.keyboard.press("Enter")
            tab.wait_for_selector("tr.sum")
        tab.wait_for_selector(selector)
        assert tab.evaluate(f"{unnamed}.map(e => e.outerHTML)") == [], name
        assert tab.evaluate(CONTRAST)[1] == [], name
    tab.focus("nav.tabs a[aria-current=page]")
    for _ in range(3):
        tab.keyboard.press("Shift+Tab")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("nav.tabs a[data-tab=rewards][aria-current=page]")
    tab.focus("#settings-advantage")
    tab.keyboard.type("no_such")
    tab.wait_for_selector("[data-field=advantage] .fault:has-text('unknown name')")
    assert tab.get_attribute("#settings-advantage", "aria-invalid") == "true"
    assert "s.advantage=no_such" in tab.url
