"""README.md and docs/ are true: blocks run as they stand, flags, files and links exist, metrics are explained."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from live import SMALL, trained
from ranks import on_ranks
from server_fixture import ROOT, make_tiny

import plan
import train_grpo
import train_ppo
from algorithms import optimizers
from config import ConfigError, load_config, load_function

PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "AGENTS.md",
        *(page for page in (ROOT / "docs").glob("*.md")),
    ],
    key=str,
)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def edited_copy(folder: Path) -> Path:
    """train_grpo.py with every block of the README that is no file of its own."""
    text, knob = (ROOT / "train_grpo.py").read_text(encoding="utf-8"), None
    edits = [block for block in blocks(ROOT / "README.md", "python") if not block.startswith("# my_")]
    for block in edits:
        where = "CONFIG = parse_args" if block.startswith("class TrainConfig") else "# ==== main "
        assert text.count(where) == 1
        text, knob = text.replace(where, f"{block}\n\n{where}"), knob or block.startswith("class TrainConfig")
    assert knob and len(edits) >= 3
    copy = folder / "my_grpo.py"
    copy.write_text(text, encoding="utf-8")
    return copy


def check(*arguments: str) -> str:
    """What scripts/check.py prints."""
    make_tiny()
    command = [sys.executable, "scripts/check.py", *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT)}  # a copy lies beside the script; here it lies elsewhere
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, encoding="utf-8")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_a_copy_with_all_edits_of_the_readme_learns(tmp_path):
    flags = "--advantage best_of_group --policy_loss clipped_reinforce --my_coef 0.3"
    assert "it learns" in check(str(edited_copy(tmp_path)), *flags.split())


# By hand, so that no function of ours can see it: what check.py is for.
OF_A_PART = """def mine(logprobs, batch, cfg):
    longest = (batch.loss_mask.sum(1) / batch.loss_mask.sum(1).mean())[:, None]
    return -batch.advantages * logprobs * longest, {}

POLICY_LOSSES["mine"] = mine
"""
OF_A_RANK = """def mine(batch, cfg):
    length = batch.loss_mask.sum(1)
    return spread(center_by_group(batch.scores, batch.groups) * (length < length.quantile(0.5)), batch.loss_mask)

ADVANTAGES["mine"] = mine
"""


@pytest.mark.parametrize(
    "block, flag, told",
    [
        (OF_A_PART, "--policy_loss mine", "not the same in small micro-batches as in one pass: grad_norm"),
        pytest.param(OF_A_RANK, "--advantage mine", "not the same on two ranks as in one pass", marks=pytest.mark.slow),
    ],
    ids=["part", "rank"],
)
def test_the_check_finds_what_depends_on_the_cut(block, flag, told, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from check import same, toy_task

    copy = with_optimizer(tmp_path, block)
    assert same(str(copy), toy_task(), tuple(flag.split())) == 1
    said = capsys.readouterr().out
    assert told in said and "NAME.prepare" in said, said


def with_optimizer(folder: Path, block: str) -> Path:
    text = (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    copy = folder / "my_grpo.py"
    copy.write_text(text.replace("# ==== 11 ", f"{block}\n\n# ==== 11 "), encoding="utf-8")
    return copy


def groups_of(path: str) -> dict:
    """What make_optimizer of a script makes under each --strategy: [(lr_scale, names)], or why it was refused."""
    script = sys.modules[load_function(f"{path}:train").__module__]
    found: dict = {}
    for strategy in ("ddp", "fsdp", "fsdp2"):
        cfg = script.TrainConfig(model_id=str(make_tiny()), compute_dtype="float32", strategy=strategy)
        policy = script.load_policy(cfg, torch.device("cpu"))
        try:
            groups = optimizers.check_optimizer(script.make_optimizer(policy, cfg), policy).param_groups
        except ConfigError as error:
            found[strategy] = str(error)
            continue
        names = {p: script.clean_name(name) for name, p in policy.named_parameters()}
        found[strategy] = [(group.get("lr_scale", 1), sorted(names[p] for p in group["params"])) for group in groups]
    return found


def test_optimizer_groups_of_the_docs_are_the_same_however_the_model_is_sharded(tmp_path):
    """FSDP1's pieces are flat, and whatever wraps the model renames."""
    (block,) = [b for b in blocks(ROOT / "docs" / "ideas.md", "python") if "def make_optimizer" in b]
    first, second = on_ranks(2, groups_of, str(with_optimizer(tmp_path, block)), limit=250)
    alone = first["ddp"]
    assert [scale for scale, _ in alone] == [1, 0.1] and all(names for _, names in alone)
    assert all("embed" in name for name in alone[1][1]) and not any("embed" in name for name in alone[0][1])
    assert first == second == {"ddp": alone, "fsdp": alone, "fsdp2": alone}


@pytest.mark.slow
def test_the_check_fails_where_nothing_is_learned(tmp_path):
    """With the sign of the loss turned round."""
    text = (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    assert text.count("loss = (part.weights * per_token).sum()") == 1
    (tmp_path / "wrong.py").write_text(text.replace("loss = (part.weights", "loss = -(part.weights"), encoding="utf-8")
    with pytest.raises(AssertionError, match="it does not learn"):
        check(str(tmp_path / "wrong.py"), "--max_steps", "4")


def test_files_of_the_readme_run_and_their_metrics_are_explained(tmp_path):
    for page in (ROOT / "README.md", ROOT / "docs" / "environments.md"):
        for block in blocks(page, "python"):
            if name := re.match(r"# (my_\w+\.py)\n", block):
                (tmp_path / name[1]).write_text(block, encoding="utf-8")
    flags = f"{SMALL} --dataset_id {tmp_path}/my_rows.py:rows --reward_funcs {tmp_path}/my_rewards.py:concise "
    flags += f"--tools {tmp_path}/my_tools.py:weather --max_completion_length 16 --max_prompt_length 512 --max_steps 1 "
    flags += "--max_turn_length 8 --max_turns 2 --eval_steps 1 --beta 0.01"
    make_tiny()
    seen = {name for line in trained(tmp_path, flags) for name in line} - {"step"}
    glossary = re.findall(r"`([\w@/]+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    known = {re.sub("NAME|PART|ORIGIN", "[^/]+", name).replace("@k", r"@\d+") for name in glossary}
    assert "rewards/concise/right/mean" in seen and "turns/mean" in seen
    assert not {name for name in seen if not any(re.fullmatch(pattern, name) for pattern in known)}
    flags = f"{SMALL} --dataset_id {tmp_path}/my_rows.py:rows --agent {tmp_path}/my_agent.py:run --max_steps 1 "
    flags += "--max_completion_length 64 --max_turn_length 8 --reward_funcs environment"
    seen = {name for line in trained(tmp_path, flags, "agent") for name in line} - {"step"}
    assert "agent/rows" in seen and not {name for name in seen if not any(re.fullmatch(p, name) for p in known)}
    play = [sys.executable, "scripts/try.py", "--model_id", "models/tiny", "--env", f"{tmp_path}/my_env.py:Guess"]
    how = dict(input="".join(f"{number}\n" for number in range(1, 10)), text=True, encoding="utf-8")
    done = subprocess.run([*play, "--hand", "--max_turns", "9"], cwd=ROOT, capture_output=True, timeout=100, **how)
    assert done.returncode == 0 and "reward 1," in done.stdout, done.stderr


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
            (tmp_path / named[1]).write_text(block, encoding="utf-8")
    (tmp_path / "ca.pem").touch()
    for script, flags in commands():
        flags = [str(tmp_path / flag) if (tmp_path / flag).is_file() else flag for flag in flags]
        try:
            load_config((train_ppo if script == "train_ppo.py" else train_grpo).TrainConfig, flags)
        except ConfigError as error:
            pytest.fail(f"{script} {shlex.join(flags)}: {error}")
    known = {name for module in (train_grpo, train_ppo) for name in module.TrainConfig.__dataclass_fields__}
    text = "".join(
        page.read_text(encoding="utf-8")
        for page in PAGES
        if page.name in ("algorithms.md", "distillation.md", "memory-and-speed.md")
    )
    flags = {name.removeprefix("no-") for name in re.findall(r"`--([\w-]+)", text)}
    flags = {name for name in flags if "-" not in name}  # those with hyphens are vLLM's
    of_others = {*plan.PlanConfig.__dataclass_fields__}
    assert flags <= known | of_others | {"config"}, flags - known - of_others


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_and_files_exist():
    rooms = "|".join(p.name for p in ROOT.glob("[!._]*") if p.is_dir() and p.name not in ("runs", "models"))
    lost = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not link.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
                lost.append(f"{page.name} links to {link}")
        named = re.findall(rf"(?<![\w/])(?:{rooms})/[\w/.-]+\.(?:py|sh|md|json|svg|png)\b", text)
        lost += [f"{page.name} names {path}" for path in named if not (ROOT / path).exists()]
        for name in re.findall(r"`([a-z_]+\.py)`", text):
            yours = name.startswith(("my_", "from_", "grpo_")) or name == "file.py"
            if not (yours or list(ROOT.glob(name)) or list(ROOT.glob(f"[!.]*/{name}"))):
                lost.append(f"{page.name} names {name}")
    assert not lost
