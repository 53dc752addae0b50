"""README.md and docs/ are true: blocks run as they stand, flags, files and links exist, metrics are explained."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from live import SMALL, running, trainer
from server_fixture import ROOT, make_tiny

import train_grpo
import train_ppo
from cli import ConfigError
from config import load_config
from runlog.reading import read_metrics

PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(page for page in (ROOT / "docs").glob("*.md"))], key=str
)
PAGES = [page for page in PAGES if page.name != "reliability.md"]  # written by a program, about other commits


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


def edited_copy(folder: Path) -> Path:
    """train_grpo.py with every block of the README that is no file of its own."""
    text, knob = (ROOT / "train_grpo.py").read_text(), None
    edits = [block for block in blocks(ROOT / "README.md", "python") if not block.startswith("# my_")]
    for block in edits:
        where = "CONFIG = parse_args" if block.startswith("class TrainConfig") else "# ==== main "
        assert text.count(where) == 1
        text, knob = text.replace(where, f"{block}\n\n{where}"), knob or block.startswith("class TrainConfig")
    assert knob and len(edits) >= 6
    copy = folder / "my_grpo.py"
    copy.write_text(text)
    return copy


def check(*arguments: str) -> str:
    """What scripts/check.py prints."""
    make_tiny()
    command = [sys.executable, "scripts/check.py", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # a copy lies beside the script; here it lies elsewhere
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_check_sees_that_the_script_learns():
    assert "it learns" in check()


def test_a_copy_with_all_edits_of_the_readme_learns(tmp_path):
    flags = "--advantage best_of_group --policy_loss clipped_reinforce --my_coef 0.3"
    assert "it learns" in check(str(edited_copy(tmp_path)), *flags.split())


def test_the_check_fails_where_nothing_is_learned(tmp_path):
    """With the sign of the loss turned round."""
    text = (ROOT / "train_grpo.py").read_text()
    assert text.count("return (weights * per_token).sum()") == 1
    (tmp_path / "wrong.py").write_text(text.replace("return (weights *", "return -(weights *"))
    with pytest.raises(AssertionError, match="it does not learn"):
        check(str(tmp_path / "wrong.py"), "--max_steps", "4")


def test_files_of_the_readme_run_and_their_metrics_are_explained(tmp_path):
    for page in (ROOT / "README.md", ROOT / "docs" / "environments.md"):
        for block in blocks(page, "python"):
            if name := re.match(r"# (my_\w+\.py)\n", block):
                (tmp_path / name[1]).write_text(block)
    flags = f"{SMALL} --dataset_id {tmp_path}/my_rows.py:rows --reward_funcs {tmp_path}/my_rewards.py:concise "
    flags += f"--tools {tmp_path}/my_tools.py:weather --max_completion_length 16 --max_prompt_length 512 --max_steps 1 "
    flags += f"--max_turn_length 8 --max_turns 2 --eval_steps 1 --output_dir {tmp_path} --run_name run --beta 0.01"
    make_tiny()
    with running(trainer(tmp_path / "log", *flags.split())) as run:
        assert run.end() == 0, run.text
    glossary = re.findall(r"`([\w@/]+)`", (ROOT / "docs" / "metrics.md").read_text())
    known = {re.sub("NAME|PART|ORIGIN", "[^/]+", name).replace("@k", r"@\d+") for name in glossary}
    seen = {name for line in read_metrics(tmp_path / "run") for name in line} - {"step"}
    assert "rewards/concise/right/mean" in seen and "turns/mean" in seen
    assert not {name for name in seen if not any(re.fullmatch(pattern, name) for pattern in known)}
    play = [sys.executable, "rollouts.py", "--env", f"{tmp_path}/my_env.py:Guess", "--policy", "random"]
    done = subprocess.run(play, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "mean reward" in done.stdout, done.stderr


def commands() -> list[tuple[str, list[str]]]:
    """Every command of a train script on the pages: (script, flags); those with `...` in them are no whole ones."""
    found = []
    for page in PAGES:
        for block in blocks(page, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                scripts = [n for n, word in enumerate(words) if word in ("train_grpo.py", "train_ppo.py")]
                if scripts and "..." not in words and words[0] != "bash" and words[0] != "cp":
                    found.append((words[scripts[0]], words[scripts[0] + 1 :]))
    return found


def test_flags_of_all_commands_are_known(tmp_path):
    assert len(commands()) >= 2
    for block in (block for page in PAGES for block in blocks(page, "yaml")):
        if named := re.match(r"# (\w+\.yaml)\n", block):
            (tmp_path / named[1]).write_text(block)
    for script, flags in commands():
        flags = [str(tmp_path / flag) if (tmp_path / flag).is_file() else flag for flag in flags]
        try:
            load_config((train_ppo if script == "train_ppo.py" else train_grpo).TrainConfig, flags)
        except ConfigError as error:
            pytest.fail(f"{script} {shlex.join(flags)}: {error}")
    known = {name for module in (train_grpo, train_ppo) for name in module.TrainConfig.__dataclass_fields__}
    text = "".join(page.read_text() for page in PAGES if page.name in ("algorithms.md", "memory-and-speed.md"))
    flags = {name.removeprefix("no-") for name in re.findall(r"`--([\w-]+)", text)}
    assert flags <= known | {"config"}, flags - known


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"
    rooms = "algorithms|benchmarks|docs|envs|examples|inputs|looking|runlog|safety|scoring|scripts|serving|tests"
    for path in re.findall(rf"(?<![\w/])(?:{rooms})/[\w/.-]+\.(?:py|sh|md|json|svg|png)\b", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"
    for name in re.findall(r"`([a-z_]+\.py)`", page.read_text()):
        yours = name.startswith(("my_", "from_", "grpo_")) or name == "file.py"
        assert yours or list(ROOT.rglob(f"[!.]*/{name}")) or (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_linter_of_the_hooks_is_the_pinned_one():
    pinned = re.search(r"^ruff==(\S+)$", (ROOT / "requirements-dev.txt").read_text(), re.M)[1]
    assert f"rev: v{pinned}\n" in (ROOT / ".pre-commit-config.yaml").read_text()
