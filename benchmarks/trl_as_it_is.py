"""What TRL's own documentation shows, run here as it is: rewards, tools, environments, and scripts as command lines.

    git clone --depth 1 --branch v1.16.0 https://github.com/huggingface/trl /tmp/trl
    python benchmarks/trl_as_it_is.py /tmp/trl         # needs trl: pip install -r benchmarks/requirements-bench.txt

1. Every script and every python block of the documentation that makes a GRPOConfig or a GRPOTrainer goes through
   scripts/from_trl.py; what it prints goes through our parser.
2. Every reward function of docs/source/grpo_trainer.md, and all six of `trl.rewards`, score groups of completions
   through rewards.py, and must give what they give when they are called as TRL calls them.
3. Every tool function of that page is called, and every environment played by a model that says what it is told to.

Prints a line for each that does not, and the counts. The exit status tells whether there was one.
"""

import ast
import asyncio
import inspect
import json
import math
import re
import sys
import tempfile
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]

import from_trl  # noqa: E402
from test_turns import Scripted, tokenizer_of  # noqa: E402

import rewards  # noqa: E402
from config import ConfigError, TrainConfig  # noqa: E402
from envs.adapters import environment_maker  # noqa: E402
from envs.tools import from_function  # noqa: E402
from plugins import load_function, require  # noqa: E402
from rollouts import Trajectory, play  # noqa: E402

SIX = """
from trl.rewards import accuracy_reward, reasoning_accuracy_reward, think_format_reward
from trl.rewards import get_cosine_scaled_reward, get_repetition_penalty_reward, get_soft_overlong_punishment

cosine = get_cosine_scaled_reward(max_len=100)
repetition = get_repetition_penalty_reward(ngram_size=3, max_penalty=-1.0)
overlong = get_soft_overlong_punishment(max_completion_len=30, soft_punish_cache=20)
"""
SIX_NAMES = "accuracy_reward reasoning_accuracy_reward think_format_reward cosine repetition overlong".split()
ANSWERS = ["<think>\nIt is two times two.\n</think>\n\\boxed{4}", "\\boxed{5}", "It is 4. " * 12, "4", ""]


def blocks(path: Path) -> list[str]:
    return [
        textwrap.dedent(block)
        for block in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    ]


def scripts(source: Path) -> dict[str, str]:
    """Those that make a GRPOConfig or a GRPOTrainer, and that are python."""
    found = {
        str(p.relative_to(source)): p.read_text(encoding="utf-8") for p in sorted((source / "examples").rglob("*.py"))
    }
    for page in sorted((source / "docs").rglob("*.md")):
        found |= {f"{page.relative_to(source)}, block {n}": text for n, text in enumerate(blocks(page), 1)}
    return {name: text for name, text in found.items() if re.search(r"GRPO(Config|Trainer)(\[.*?\])?\(", text)}


def check_scripts(source: Path, folder: Path) -> list[str]:
    wrong, made, unread = [], 0, 0
    for name, text in scripts(source).items():
        path = folder / "script.py"
        path.write_text(text, encoding="utf-8")
        try:
            found = from_trl.commands(path)
        except ConfigError as error:
            unread += 1
            if "no python" not in str(error) and "no call" not in str(error):  # `...` between arguments; in a class
                wrong.append(f"{name}: {error}")
            continue
        made += len(found)
        wrong += [f"{name}: {line}" for command in found for line in command.said if "refuses this" in line]
    print(f"scripts: {made} commands, {len(wrong)} refused; {unread} blocks are not python by themselves")
    return wrong


def defined(source: Path, folder: Path) -> dict[str, tuple[Path, ast.AST]]:
    """{"file:name": (file, its node)} of functions and classes in blocks of the GRPO page, each block a file."""
    found = {}
    for number, text in enumerate(blocks(source / "docs/source/grpo_trainer.md"), 1):
        try:
            nodes = ast.parse(text.partition("trainer = ")[0]).body  # behind it, `...` stands between arguments
        except SyntaxError:
            continue
        kept = [n for n in nodes if isinstance(n, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef |
                                       ast.ClassDef | ast.Assign)]  # fmt: skip
        kept = [n for n in kept if not re.search(r"Trainer\(|load_dataset\(", ast.unparse(n))]
        path = folder / f"block_{number}.py"
        path.write_text("\n".join(ast.unparse(node) for node in kept), encoding="utf-8")
        found |= {f"{path}:{n.name}": (path, n) for n in kept if hasattr(n, "name")}
    return found


def group(conversational: bool, columns: dict) -> list[Trajectory]:
    prompt = [{"role": "user", "content": "2 x 2?"}] if conversational else "2 x 2?"
    made = []
    for answer in ANSWERS:
        ids = [*answer.encode(), 0]  # with an end
        zeros = [0.0] * len(ids)
        row = {"prompt": prompt} | columns
        made.append(Trajectory(row, 0, [1], ids, [1] * len(ids), zeros, list(zeros), info={"completion": answer}))
    return made


def scored(spec: str, conversational: bool, columns: dict) -> tuple[list, list]:
    """(what rewards.py makes of a reward function, what the function gives when it is called as TRL calls it)."""
    trajectories = group(conversational, columns)
    cfg = TrainConfig(reward_funcs=[spec])
    asyncio.run(rewards.score(trajectories, rewards.get_reward_functions(cfg, ["prompt", *columns]), cfg))
    found = [t.info["reward_components"][0] for t in trajectories]
    function = load_function(spec)
    called = dict(
        prompts=[t.row["prompt"] for t in trajectories],
        completions=[[{"role": "assistant", "content": answer}] if conversational else answer for answer in ANSWERS],
        completion_ids=[t.token_ids for t in trajectories],
        **{name: [value] * len(trajectories) for name, value in columns.items()},
    )
    extra = {
        name: (lambda *_: None) for name in ("log_extra", "log_metric") if name in str(inspect.signature(function))
    }
    wanted = function(**called, **extra)
    return found, asyncio.run(wanted) if inspect.isawaitable(wanted) else wanted


def shortened(error: Exception) -> bool:
    """Whether the page leaves something out: a name that it does not define, a body of `...`, a docstring."""
    return any(word in str(error) for word in ("is not defined", "returned None, a NoneType", "has no docstring"))


def check_rewards(specs: dict[str, bool | None]) -> list[str]:
    """specs: {spec: whether prompts are messages; None: try both}."""
    wrong, incomplete = [], []
    columns = dict(solution="\\boxed{4}", ground_truth="4", task="math")
    for spec, kind in specs.items():
        errors = []
        for conversational in (True, False) if kind is None else (kind,):
            try:
                found, wanted = scored(spec, conversational, columns)
            except Exception as error:  # whatever a reward function of others raises
                if shortened(error):
                    incomplete.append(spec)
                    break
                errors.append(f"{type(error).__name__}: {error}"[:300])
                continue
            same = [math.isnan(f) if w is None else f == w for f, w in zip(found, wanted, strict=True)]
            errors += [] if all(same) else [f"{found} here, {wanted} there"]
            break
        else:
            wrong.append(f"{spec}: {errors}")
    print(f"rewards: {len(specs)}, {len(wrong)} failed, {len(incomplete)} are shortened on the page")
    return wrong


def call_of(name: str, schema: dict) -> str:
    """A call with a value for each argument, as the model would write it."""
    kinds = {"integer": 3, "number": 2.5, "string": "up", "boolean": True, "array": [1], "object": {}}
    arguments = {n: kinds[p.get("type", "string")] for n, p in schema["function"]["parameters"]["properties"].items()}
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def check_played(specs: list[str], env: bool) -> list[str]:
    """Each tool, and each public method of each environment, is called in a trajectory of its own, and must answer."""
    wrong, calls, incomplete = [], 0, []
    for spec in specs:
        cfg = TrainConfig(
            env=spec if env else None, tools=[] if env else [spec], max_completion_length=4000, num_generations=1,
            reward_funcs=["environment"] if env and hasattr(load_function(spec), "get_reward") else ["length"],
        )  # fmt: skip
        try:
            if env:
                schemas = {m.name: m.schema() for m in environment_maker(cfg)().methods.values()}
            else:
                tool = from_function(load_function(spec))
                schemas = {tool.name: tool.schema()}
            for name, schema in schemas.items():
                generator = Scripted(tokenizer_of("qwen2_5"), [call_of(name, schema), "Done."])
                row = {"prompt": [{"role": "user", "content": "Go."}], "target": 3}
                trajectory = asyncio.run(play(row, 0, environment_maker(cfg)(), generator, cfg))
                asyncio.run(rewards.score([trajectory], rewards.get_reward_functions(cfg), cfg))
                text = generator.tokenizer.decode(trajectory.token_ids)
                calls += 1
                if "No such file" in text:  # a picture that the page has not
                    incomplete.append(spec)
                elif "Error" in text or trajectory.turns != 2:
                    wrong.append(f"{spec}, {name}: {text}")
        except Exception as error:  # whatever others' code raises
            if shortened(error):
                incomplete.append(spec)
                continue
            wrong.append(f"{spec}: {type(error).__name__}: {error}"[:400])
    print(f"{'environments' if env else 'tools'}: {len(specs)}, {calls} called, {len(wrong)} failed, "
          f"{len(incomplete)} are shortened on the page")  # fmt: skip
    return wrong


def main(source: Path) -> int:
    require("trl", "benchmarks/trl_as_it_is.py")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wrong = check_scripts(source, folder)
        parts = defined(source, folder)
        functions = {spec: n for spec, (_, n) in parts.items() if not isinstance(n, ast.ClassDef)}
        arguments = {spec: {a.arg for a in n.args.args} for spec, n in functions.items()}
        of_rewards = [spec for spec, names in arguments.items() if names & {"completions", "completion_ids"}]
        tools = [s for s, n in functions.items() if s not in of_rewards and ast.get_docstring(n)]
        environments = [s for s, (_, n) in parts.items() if isinstance(n, ast.ClassDef)]
        (folder / "six.py").write_text(SIX, encoding="utf-8")
        wrong += check_rewards({f"{folder / 'six.py'}:{name}": True for name in SIX_NAMES})
        wrong += check_rewards(dict.fromkeys(of_rewards))
        wrong += check_played(tools, env=False)
        wrong += check_played(environments, env=True)
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) == 2 else sys.exit(__doc__)))
