"""Our command line for a script that trains with TRL's GRPOTrainer or AsyncGRPOTrainer.

    python scripts/from_trl.py MY_SCRIPT.py [--processes 8] [-- the script's own flags, as --learning_rate 1e-5]

The script is read, not run. Of its GRPOConfig(...) and GRPOTrainer(...), or of its own subclasses of these, values that
are written down count: numbers, texts, lists, and names that are given one once and not changed. What is computed
is listed; give its flag yourself. A script that has its config from a command line (TrlParser) is given that behind
`--`. What the script leaves unset is as TRL has it by default, where that changes what is learned. Comments say what
differs; docs/coming-from-trl.md has all of it.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import operator
import re
import shlex
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from trl_table import ASYNC_HERE, ASYNC_NOT_HERE, FIELDS, HERE, NOT_HERE, SERVER, tables  # noqa: E402

from cli import ConfigError, nearest  # noqa: E402
from config import TrainConfig, check, load_config  # noqa: E402

CONFIGS = {"GRPOConfig": "train_grpo.py", "AsyncGRPOConfig": "train_async.py"}
TRAINERS = {"GRPOTrainer": "GRPOConfig", "AsyncGRPOTrainer": "AsyncGRPOConfig"}
OLDER = {"max_prompt_length": "max_prompt_length", "warmup_ratio": "warmup_ratio"}  # fields of earlier TRLs
COUNTS = "per_device_train_batch_size gradient_accumulation_steps generation_batch_size steps_per_generation "
COUNTS = (COUNTS + "num_generations num_generations_eval num_iterations max_completion_length").split()
# What TRL's own scripts have beside a config (ScriptArguments, ModelConfig).
SCRIPTS_OWN = {
    "model_name_or_path": "model_id", "attn_implementation": "attn_implementation", "dataset_name": "dataset_id",
    "dataset_config": "dataset_config", "dataset_train_split": "dataset_split", "use_peft": "use_peft",
    "lora_r": "lora_r", "lora_alpha": "lora_alpha", "lora_target_modules": "lora_targets",
}  # fmt: skip
LORA = {"r": ("lora_r", 8), "lora_alpha": ("lora_alpha", 8)}  # peft's defaults
OVERRIDDEN = {  # methods of TRL's trainer, and where their work is done here
    "_compute_loss compute_loss get_off_policy_mask get_high_entropy_mask": "a function in POLICY_LOSSES, or own_term, "
    "for a term that is added (docs/ideas.md)",
    "_generate_and_score_completions _prepare_inputs": "what happens to completions between sampling and loss is "
    "after_rollout, leave_out, or a function in ADVANTAGES (docs/ideas.md)",
    "_calculate_rewards": "a reward function gets all completions of a prompt; after_rollout sees all of a step",
    "_generate _generate_single_turn _tool_call_loop": "a coroutine in ROLLOUTS (rollouts.py)",
    "_get_train_sampler get_train_dataloader _get_eval_sampler": "PromptSampler draws the rows",
    "create_optimizer create_optimizer_and_scheduler create_scheduler": "make_optimizer and lr_at in train_grpo.py",
    "_get_per_token_logps_and_entropies _get_last_hidden_state": "compute_logprobs in train_grpo.py",
    "log": "numbers that after_rollout, losses and advantages return are logged",
    "evaluate prediction_step": "evaluate() in train_grpo.py",
}
ARGUMENTS = {  # of a trainer, in their order
    "GRPOTrainer": "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes "
    "callbacks optimizers quantization_config peft_config tools rollout_func environment_factory".split(),
    "AsyncGRPOTrainer": "model reward_funcs args train_dataset processing_class callbacks optimizers peft_config tools "
    "environment_factory rollout_worker weight_transfer".split(),
}
LOAD = ("path", "name", "data_dir", "data_files", "split")  # arguments of load_dataset, in their order
SAME_ROWS = ("num_proc", "cache_dir", "keep_in_memory", "streaming", "token", "download_mode", "verification_mode")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
SCOPES = (*DEFINITIONS, ast.Module, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Methods that change lists, dicts and sets; beside them, whatever begins with set_.
CHANGES = "append extend insert remove pop clear sort reverse update setdefault popitem add discard __setitem__".split()
ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow}
ARITHMETIC |= {ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv}
PAGE = Path(__file__).resolve().parent.parent / "docs" / "coming-from-trl.md"
BEGIN, END = "<!-- tables: scripts/from_trl.py --write_tables -->\n", "<!-- end of tables -->\n"


# ---- reading a script -----------------------------------------------------------------------------------------------


class Unread:
    """An expression whose value does not stand in the script."""

    def __init__(self, node: ast.AST):
        self.text = " ".join(ast.unparse(node).split())

    def __repr__(self) -> str:
        return self.text if len(self.text) <= 80 else self.text[:77] + "..."


class Script:
    """What a script writes down: calls, names that are given a value once, functions, imports."""

    def __init__(self, path: Path):
        try:
            self.tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a python file.") from None
        except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError, MemoryError) as error:
            where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            reason = getattr(error, "msg", None) or error
            raise ConfigError(f"{path}{where}: no python that can be read ({reason}).") from None
        self.path, self.imported = path, {}
        self.nodes = list(ast.walk(self.tree))
        self.parent = {inner: node for node in self.nodes for inner in ast.iter_child_nodes(node)}
        self.bound = {node: set() for node in self.nodes if isinstance(node, SCOPES)}  # names that are given a value
        for node in self.nodes:
            if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)):
                self.bound[self.around(node)].add(node.arg if isinstance(node, ast.arg) else node.id)
            for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                module = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
                self.imported[alias.asname or alias.name] = f"{module}{alias.name}".lstrip(".")
        for node in self.nodes:
            if isinstance(node, ast.Global | ast.Nonlocal):
                self.bound[self.around(node)] -= set(node.names)
        self.assigned, self.changed = defaultdict(list), defaultdict(list)  # of a name, by its scope
        for node in self.nodes:
            if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)):
                self.assigned[self.meant(node)].append(self.assigned_to(node))
            elif isinstance(node, ast.Name) and (change := self.change(node)) is not None:
                self.changed[self.meant(node)].append(change)
        self.top = {
            n.name for n in self.tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        self.top |= {name for node in self.tree.body for name in self._targets(node)} | set(self._top_imports())
        self.classes = {n.name: n for n in self.nodes if isinstance(n, ast.ClassDef)}

    def around(self, node: ast.AST) -> ast.AST:
        """The function, class, comprehension or file that a node stands in."""
        while not isinstance(node := self.parent[node], SCOPES):
            pass
        return node

    def meant(self, node: ast.Name | ast.arg) -> tuple[ast.AST, str]:
        """A name, and where it belongs: equal ones in two functions, or a parameter, are not the same."""
        name = node.arg if isinstance(node, ast.arg) else node.id
        inner = scope = self.around(node)
        while scope is not self.tree and (
            name not in self.bound[scope] or (isinstance(scope, ast.ClassDef) and scope is not inner)
        ):
            scope = self.around(scope)
        return scope, name

    def assigned_to(self, node: ast.Name | ast.arg) -> ast.AST | None:
        """The value, if the name is all that it is given to."""
        outer = self.parent[node]
        plain = isinstance(outer, ast.Assign) and node in outer.targets
        return outer.value if plain or isinstance(outer, ast.AnnAssign | ast.NamedExpr) else None

    def change(self, node: ast.Name) -> ast.AST | None:
        """What changes the value that a name stands for: `x.y = ...`, `del x[0]`, `x.append(...)`."""
        inner = node
        while isinstance(outer := self.parent[inner], ast.Attribute | ast.Subscript) and outer.value is inner:
            inner = outer
        if not isinstance(inner.ctx, ast.Load):
            return inner
        if not isinstance(outer, ast.Call):
            return None
        method = getattr(inner, "attr", "") if outer.func is inner else ""
        stored = inner is node and node in outer.args[:1] and self.called(outer) in ("setattr", "delattr")
        return outer if stored or method in CHANGES or method.startswith("set_") else None

    @staticmethod
    def _targets(node: ast.AST) -> list[str]:
        return [t.id for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign) else []

    def _top_imports(self):
        for node in self.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from (alias.asname or alias.name for alias in node.names)

    def calls(self, names) -> list[tuple[str, ast.Call]]:
        """Calls of classes of these names, as they were imported: by name, under another, or as an attribute; and of
        their subclasses in the script."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Call) and (name := self.kind(node, names)):
                found.append((name, node))
        return sorted(found, key=lambda each: each[1].lineno)

    def kind(self, node: ast.AST | None, names) -> str | None:
        """Which class of these names a call makes one of, itself or by a subclass in the script."""
        if not isinstance(node, ast.Call):
            return None
        found = {self.called(node), *(self.name(base) for own in self.own_classes(node) for base in own.bases)}
        return next((name for name in names if name in found), None)

    def own_classes(self, node: ast.Call) -> list[ast.ClassDef]:
        """The script's own class that a call makes one of, and those it is made from, the nearest first."""
        found, names = [], [self.called(node)]
        for name in names:  # which grows
            if (own := self.classes.get(name)) and own not in found:
                found.append(own)
                names += [self.name(base) for base in own.bases]
        return found

    def called(self, node: ast.Call) -> str:
        return self.name(node.func)

    def name(self, node: ast.AST) -> str:
        """Of a class or function: the last part of what it was imported as."""
        while isinstance(node, ast.Subscript):  # GRPOTrainer[...](...)
            node = node.value
        if isinstance(node, ast.Attribute):
            return node.attr
        name = node.id if isinstance(node, ast.Name) else ""
        return self.imported.get(name, name).split(".")[-1]

    def once(self, node: ast.AST, changed: bool = False) -> ast.AST:
        """What a name stands for, if it is given a value once and that is not changed; `changed`: even if it is."""
        seen = set()
        while isinstance(node, ast.Name) and (key := self.meant(node)) not in seen:
            values = self.assigned.get(key, [])
            if len(values) != 1 or values[0] is None or (key in self.changed and not changed):
                break
            seen.add(key)
            node = values[0]
        return node

    def is_list(self, node: ast.AST) -> bool:
        """Whether a name is given a list, be that changed afterwards."""
        lists = ast.List | ast.Tuple | ast.ListComp
        return isinstance(node, ast.Name) and any(isinstance(v, lists) for v in self.assigned.get(self.meant(node), []))

    def value(self, node: ast.AST):
        """A literal, also by name and from arithmetic with numbers; else Unread."""
        try:
            return self._value(node)
        except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError):
            return Unread(node)

    def _value(self, node: ast.AST):
        found = self.once(node)
        if isinstance(found, ast.BinOp):
            left, right = self._value(found.left), self._value(found.right)
            numbers = all(isinstance(v, int | float) and abs(v) < 1e12 for v in (left, right))
            if numbers and type(found.op) in ARITHMETIC and (not isinstance(found.op, ast.Pow) or abs(right) < 64):
                return ARITHMETIC[type(found.op)](left, right)
            raise ValueError
        if isinstance(found, ast.UnaryOp) and isinstance(found.op, ast.USub):
            return -self._value(found.operand)
        if isinstance(found, ast.List | ast.Tuple | ast.Set):
            return [self._value(each) for each in found.elts]
        if isinstance(found, ast.Dict):
            return {self._value(k): self._value(v) for k, v in zip(found.keys, found.values, strict=True)}
        return ast.literal_eval(found)

    def arguments(self, call: ast.Call, first: tuple[str, ...]) -> dict[str, ast.AST]:
        """{name: node}; `first`: names of those that come without one. `**{...}` and dict(...) are looked into."""
        named = dict(zip(first, call.args, strict=False))
        for keyword in call.keywords:
            if keyword.arg:
                named[keyword.arg] = keyword.value
                continue
            inner = self.once(keyword.value)
            if isinstance(inner, ast.Dict) and all(isinstance(k, ast.Constant) for k in inner.keys):
                named |= {str(k.value): v for k, v in zip(inner.keys, inner.values, strict=True)}
            elif isinstance(inner, ast.Call) and self.called(inner) == "dict" and all(k.arg for k in inner.keywords):
                named |= {k.arg: k.value for k in inner.keywords}
            else:
                named["**"] = keyword.value
        return named

    def around_all(self, node: ast.AST | None) -> list[ast.AST]:
        """A node and all that it stands in."""
        found = [node]
        while found[-1] in self.parent:
            found.append(self.parent[found[-1]])
        return found

    def set_later(self, config: ast.Call | None, name: ast.AST | None, trainer: ast.Call | None):
        """Of a config, which `name` may stand for: {field: node} of each `args.field = value` that is reached if the
        config and its trainer are, and the other statements that change it."""
        keys = {k for k, vs in self.assigned.items() if config and config in [self.once(v, True) for v in vs if v]}
        keys |= {self.meant(name)} if isinstance(name, ast.Name) else set()
        nodes = sorted((n for key in keys for n in self.changed.get(key, [])), key=lambda n: (n.lineno, n.col_offset))
        reached = {*self.around_all(config), *self.around_all(trainer)}
        fields, others = {}, []
        for node in nodes:
            statement = next(each for each in self.around_all(node) if isinstance(each, ast.stmt))
            plain = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            plain = plain and isinstance(statement, ast.Assign) and node in statement.targets
            before = trainer is None or node.lineno < trainer.lineno
            if plain and before and self.parent[statement] in reached and (not config or node.lineno > config.lineno):
                fields[node.attr] = statement.value
            else:
                others.append(statement)
        return fields, others

    def runs_when_imported(self, call: ast.Call) -> bool:
        """Whether importing the file would make this call: it stands at the top, under no `if __name__`."""
        for node in self.tree.body:
            if call in ast.walk(node):
                guard = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
                return not guard and not isinstance(node, DEFINITIONS)
        return False


# ---- the command line -----------------------------------------------------------------------------------------------


@dataclass
class Command:
    """Our flags, and what there is to say about them."""

    script: str
    processes: int
    flags: dict[str, object] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    given: dict[str, object] = field(default_factory=dict)  # the script's values
    known: dict[str, object] = field(default_factory=dict)  # TRL's defaults, and the script's values that could be read

    def say(self, text: str) -> None:
        if text not in self.said:
            self.said.append(text)

    def words(self) -> list[str]:
        """Of the command line, flags that are as ours are by default left out."""
        words = []
        for name, value in self.flags.items():
            if value is True or value is False:
                words.append(f"--{name}" if value else f"--no-{name}")
            elif isinstance(value, list):
                words += [f"--{name}", *map(str, value)]
            elif value is not None:
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                words += [f"--{name}", text.removesuffix(".0") if isinstance(value, float) else text]
        return words

    def text(self) -> str:
        lines = [f"# {line}" for line in self.said]
        start = "python" if self.processes == 1 else f"torchrun --nproc_per_node={self.processes}"
        words, flags = self.words(), []
        for word in words:
            if word.startswith("--"):
                flags.append(shlex.quote(word))
            else:
                flags[-1] += f" {shlex.quote(word)}"
        return "\n".join([*lines, " \\\n    ".join([f"{start} {self.script}", *flags])])


def defaults(kind: str) -> dict:
    """Ours, of the script that takes the place of `kind`."""
    made = {
        f.name: f.default_factory() if f.default is dataclasses.MISSING else f.default
        for f in dataclasses.fields(TrainConfig)
    }
    return made | ({"max_staleness": 1} if kind == "AsyncGRPOConfig" else {})


def steps(count: float, updates: int) -> int:
    return max(1, math.ceil(count / updates))


def batch(c: Command) -> int:
    """prompts_per_step and num_minibatches; returns the updates of a step."""
    v, world = c.known, c.processes
    size, accumulated, group = v["per_device_train_batch_size"], v["gradient_accumulation_steps"], v["num_generations"]
    per_update = size * accumulated * world
    per_micro, asked = size * world, v.get("generation_batch_size")
    held = asked / per_micro if asked else v.get("steps_per_generation") or accumulated
    sampled, parts = max(held * per_micro, per_update), Fraction(held / accumulated).limit_denominator(1000)
    c.say(
        f"{size} completions a micro-batch x {accumulated} accumulated x {world} process(es) = {per_update} an update; "
        f"steps_per_generation {held:g} x {size} x {world} = {held * per_micro:g} sampled at once"
        + (f", so {parts} updates a step" if parts != 1 else "")
    )
    if world == 1 and "processes" not in c.given:
        c.say("counted for one process; --processes N is for accelerate's num_processes")
    minibatches = max(1, round(parts))
    if parts != minibatches:
        c.say(
            f"an update there takes the completions of {1 / parts} generations, all by the same weights: one step here"
            if parts < 1
            else f"{parts} updates a generation is no whole number; {minibatches} here"
        )
    prompts = Fraction(sampled / group).limit_denominator(1000)
    c.say(f"{sampled:g} completions / num_generations {group} = {prompts} prompts a step, over all processes")
    whole = math.ceil(prompts)
    minibatches = max(m for m in range(1, minibatches + 1) if minibatches % m == 0 and whole >= m * world or m == 1)
    unit = world * minibatches
    if whole % unit or whole != prompts:
        whole = -(-whole // unit) * unit
        c.say(
            f"here each process has whole prompts in each of {minibatches} update(s): {whole} prompts, and "
            f"{'more' if whole > prompts else 'as many'} completions a step"
        )
    c.flags |= {"prompts_per_step": whole, "num_generations": group, "num_minibatches": minibatches}
    return minibatches * v.get("num_iterations", 1)


def length(c: Command, updates: int) -> None:
    """How long a run is, and what happens every so many steps."""
    v, given = c.known, c.given
    if updates > 1:
        c.say(
            f"a step here is {updates} updates: numbers of updates (max_steps, save_steps ...) are divided by {updates}"
        )
    if v["max_steps"] > 0:
        c.flags["max_steps"] = steps(v["max_steps"], updates)
    else:
        c.flags["num_epochs"] = float(v["num_train_epochs"])
    if v["eval_strategy"] != "no" or given.get("do_eval"):
        every = v["eval_steps"] or v["logging_steps"]
        if v["eval_strategy"] == "epoch" or every < 1:
            c.say("eval_strategy by epochs or shares: give --eval_steps a number of steps")
            every = 100 * updates
        c.flags["eval_steps"] = steps(every, updates)
        c.flags["eval_generations"] = v.get("num_generations_eval") or v["num_generations"]
    if "save_steps" in given or v["save_strategy"] == "steps":
        if v["save_steps"] >= 1:
            c.flags["save_steps"] = steps(v["save_steps"], updates)
    if v["save_strategy"] == "no":
        c.flags.pop("save_steps", None)
        c.say("save_strategy no: the last step is saved in any case")
    if v["save_strategy"] == "epoch" or v["save_steps"] < 1:
        c.flags.pop("save_steps", None)
        c.say("saving by epochs or shares: give --save_steps a number of steps")
    if given.get("save_total_limit"):
        c.flags["save_total_limit"] = given["save_total_limit"]
    elif c.flags.get("save_steps"):
        c.say("save_total_limit is unset: TRL keeps all checkpoints, here 2; --save_total_limit keeps more")
    if "logging_steps" in given and v["logging_steps"] >= 1:
        c.flags["log_steps"] = steps(v["logging_steps"], updates)


def from_json(c: Command, name: str) -> dict | None:
    """A setting that may be a dict or JSON of one."""
    found = c.known.get(name)
    try:
        return json.loads(found) if isinstance(found, str) else found
    except ValueError:
        c.say(f"{name} = {found!r} is no JSON, and not read")
        return None


def optimisation(c: Command, updates: int) -> None:
    v = c.known
    for name in ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"):
        c.flags[name] = float(v[name])
    if v["weight_decay"]:
        c.say("weight_decay: TRL leaves out biases and norms, here all weights have it; see make_optimizer")
    name = c.flags["lr_schedule"] = v["lr_scheduler_type"]
    if name in ("reduce_lr_on_plateau", "greedy"):
        c.flags["lr_schedule"] = "constant"
        c.say(f"lr_scheduler_type {name} follows a metric, which none does here: constant")
    kwargs = from_json(c, "lr_scheduler_kwargs")
    if kwargs and c.flags["lr_schedule"] == name:
        c.flags["lr_scheduler_kwargs"] = kwargs
    warmup, ratio = v["warmup_steps"], c.given.get("warmup_ratio", 0)
    warmup, ratio = (0, warmup) if 0 < warmup < 1 else (warmup, 0 if warmup else ratio)
    if name == "constant" and (warmup or ratio):
        c.say("lr_scheduler_type constant has no warm-up in transformers, so there is none here")
    elif warmup:
        c.flags["warmup_steps"] = steps(warmup, updates)
    elif ratio:
        c.flags["warmup_ratio"] = float(ratio)
    if c.flags.keys() & {"warmup_steps", "warmup_ratio"} and name in ("linear", "cosine"):
        c.say(f"{name}: the first update of the warm-up has a learning rate of 0 there, here it is above 0")
    optim = str(v["optim"])
    if "adafactor" in optim:
        c.say("optim adafactor is transformers' own, without scaling by the weights' size; torch's Adafactor scales. "
              "AdamW here")  # fmt: skip
    elif optim not in ("adamw_torch", "adamw_torch_fused"):
        from algorithms import optimizers

        c.flags["optim"] = optim
        with contextlib.suppress(ConfigError):  # a name that is not known is said in the end, by our own parser
            taken = optimizers.takes(optimizers.optimizer_class(TrainConfig(optim=optim)))
            for flag in {"weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"} - taken.keys():
                del c.flags[flag]


def loss(c: Command) -> None:
    v = c.known
    kind, level = v.get("loss_type", "token mean"), v.get("importance_sampling_level", "token")
    if kind in ("dapo", "bnpo", "cispo", "vespo", "token mean"):
        c.flags["loss_agg"] = "token_mean"
    else:
        c.flags["loss_agg"] = {"dr_grpo": "constant", "luspo": "seq_sum"}.get(kind, "seq_mean")
    if kind in ("cispo", "sapo", "vespo"):
        c.flags["policy_loss"] = kind
        if level == "sequence" and kind != "vespo":
            c.say(f"importance_sampling_level sequence: {kind} has a ratio of each token here; write one of sequences "
                  "into algorithms/losses.py (gspo has one)")  # fmt: skip
    elif level == "sequence":
        c.flags["policy_loss"] = "gspo"
    if kind == "bnpo":
        c.say("bnpo counts the tokens of a micro-batch, here those of the whole update are counted")
    if kind == "dapo":
        c.say(
            "loss_type dapo is how tokens are weighted, --loss_agg token_mean; --preset dapo would be the whole paper"
        )
    low = v["epsilon"]
    high = low if v.get("epsilon_high") is None else v["epsilon_high"]
    if kind == "cispo":
        c.say(f"cispo: epsilon_high {high} bounds the ratio there, without a lower bound; here 1 + epsilon_high does")
        if high < 1:
            c.say(f"cispo: the bound is at least 1 here; {high} scales the whole loss there, which counts where "
                  "max_grad_norm clips. ScaleRL has 5.0")  # fmt: skip
        low, high = 1.0, max(0.0, float(Fraction(str(high)) - 1))  # 0.28 of 1.28, not 0.28000000000000003
    if low > 1:
        c.say(f"epsilon {low}: no ratio is below 0, so 1 is as much")
        low = 1.0
    c.flags |= {"epsilon": float(low), "epsilon_high": float(high)}
    if v.get("delta") is not None:
        if "policy_loss" in c.flags:
            c.say(f"delta {v['delta']}: --dual_clip belongs to --policy_loss ppo, so it is left out")
        else:
            c.flags["dual_clip"] = float(v["delta"])
    if kind == "sapo":
        c.flags |= {"sapo_tau_pos": float(v["sapo_temperature_pos"]), "sapo_tau_neg": float(v["sapo_temperature_neg"])}
    if "loss_type" not in v:  # AsyncGRPOConfig has no more
        return
    c.flags["scale_rewards"] = {True: "group", False: "none"}.get(v["scale_rewards"], v["scale_rewards"])
    if v["multi_objective_aggregation"] == "normalize_then_sum":
        c.flags["advantage"] = "gdpo"
    c.flags |= {"beta": float(v["beta"]), "mask_truncated": bool(v["mask_truncated_completions"])}
    if v["beta"] and v["use_bias_correction_kl"]:
        c.say("use_bias_correction_kl (TRL's default) multiplies the KL term by the ratio; not here")
    c.flags["top_entropy_quantile"] = float(v["top_entropy_quantile"])
    if v["off_policy_mask_threshold"] is not None:
        c.flags["off_policy_threshold"] = float(v["off_policy_mask_threshold"])
    if v["router_aux_loss_coef"] is not None:
        c.flags["router_aux_coef"] = float(v["router_aux_loss_coef"])
    c.flags["entropy_coef"] = float(v["entropy_coef"])
    bonus, few = v["entropy_coef"] or v["use_adaptive_entropy"], v["top_entropy_quantile"] < 1
    if bonus and c.flags["loss_agg"] != "token_mean":
        c.say(f"the entropy bonus is a mean over tokens there, here --loss_agg {c.flags['loss_agg']} holds for it, too")
    if bonus and few:
        c.say("the entropy bonus is of the tokens that top_entropy_quantile keeps there, of all here")
    by_token = few or (v["use_vllm"] and str(v["vllm_importance_sampling_mode"]).startswith("token"))
    if c.flags.get("policy_loss") == "gspo" and by_token:
        c.say("gspo: what multiplies one token's loss (top_entropy_quantile, a correction by tokens) counts for the "
              "whole completion there, as its ratio is the completion's; here for that token alone")  # fmt: skip
    if v["mask_truncated_completions"] and c.flags["loss_agg"] in ("seq_mean", "seq_sum"):
        c.say("mask_truncated_completions: the mean divides by all completions there, here by those that are left")
    if v["use_adaptive_entropy"]:
        c.flags |= {"entropy_target": float(v["entropy_target"]), "entropy_coef_step": float(v["entropy_coef_delta"])}
        c.say(
            "entropy_coef is adapted each update there, each step here; there the bonus counts only while the entropy "
            "is at or below the target, and stays within entropy_coef_min and _max"
        )


def reference(c: Command, updates: int) -> None:
    if c.known.get("sync_ref_model"):
        if c.flags.get("use_peft") or not c.flags.get("beta"):
            c.say("sync_ref_model: there is no reference model to move (beta 0, or adapters); left out")
            return
        c.flags["ref_sync_steps"] = steps(c.known["ref_model_sync_steps"], updates)
        c.flags["ref_sync_alpha"] = float(c.known["ref_model_mixup_alpha"])


def sampling(c: Command, kind: str) -> None:
    v = c.known
    c.flags |= {"max_completion_length": v["max_completion_length"], "temperature": float(v["temperature"])}
    if v["top_p"] not in (None, 1):
        c.flags["top_p"] = float(v["top_p"])
    if v["top_k"]:
        c.flags["top_k"] = v["top_k"]
    if v["min_p"] is not None:
        c.flags["min_p"] = float(v["min_p"])
    if kind == "AsyncGRPOConfig":
        c.flags |= {"server_urls": [v["vllm_server_base_url"]], "max_staleness": v["max_staleness"]}
        c.flags["push_steps"] = v["weight_sync_steps"]
        return
    if not v["use_vllm"]:
        c.flags |= {"generator": "hf", "correction": "none"}
        c.say("use_vllm is off: --generator hf samples in the process. Faster: start vllm_server.py, leave this out")
        return
    c.say(f"first, in another terminal: python vllm_server.py --model {c.flags.get('model_id', 'MODEL')}")
    if v["vllm_mode"] == "server":
        host = "127.0.0.1" if v["vllm_server_host"] == "0.0.0.0" else v["vllm_server_host"]
        c.flags["server_urls"] = [v["vllm_server_base_url"] or f"http://{host}:{v['vllm_server_port']}"]
    elif c.processes == 1:
        c.flags["colocate"] = True
        c.say(
            "vllm_mode colocate: the server is a process of its own on the same GPU; start it with --enable-sleep-mode"
        )
    else:
        c.say("vllm_mode colocate on several GPUs: give the server a GPU of its own")
    if not v["vllm_importance_sampling_correction"]:
        c.flags["correction"] = "none"
        return
    if c.flags.get("policy_loss") == "vespo":
        c.flags |= {"old_logprobs": "sampler", "correction": "none"}
        c.say("vespo: the ratio is to the generator's log-probs, as there, but vllm_importance_sampling_clip_max "
              "bounds each token's there (token_mask: leaves out its completion), and nothing does here")  # fmt: skip
        return
    most = v["vllm_importance_sampling_cap"] or v["vllm_importance_sampling_clip_max"]
    c.flags["correction"], _, c.flags["correction_mode"] = v["vllm_importance_sampling_mode"].partition("_")
    c.flags |= {"correction_max": float(math.inf if most is None else most)}
    c.flags |= {"correction_min": float(v["vllm_importance_sampling_clip_min"] or 0)}


def run(c: Command) -> None:
    """Where a run goes, what it runs on, what it says."""
    v, given = c.known, c.given
    folder = Path(str(given.get("output_dir") or "runs"))
    name = str(given["run_name"]).replace("/", "_") if given.get("run_name") else None
    if given.get("output_dir"):
        c.flags["output_dir"] = str(folder if name else folder.parent)
        name = name or folder.name or None
    c.flags["run_name"] = name
    c.flags["seed"] = v["seed"]
    if v["bf16"] is False and not v["fp16"]:
        c.flags["compute_dtype"] = "float32"
    if not v["gradient_checkpointing"]:
        c.flags["gradient_checkpointing"] = False
    c.flags["compile"] = bool(v["torch_compile"])
    trackers = given.get("report_to") or []
    trackers = trackers if isinstance(trackers, list) else [trackers]
    c.flags["report_to"] = [each for each in trackers if each in ("wandb", "tensorboard", "trackio")]
    if other := [each for each in trackers if each not in ("wandb", "tensorboard", "trackio", "none")]:
        c.say(f"report_to {', '.join(map(str, other))}: known here are wandb, tensorboard, trackio")
    if "project" in given:
        c.flags["wandb_project"] = given["project"]
    c.flags["log_unique_prompts"] = bool(v.get("log_unique_prompts"))
    if v.get("fsdp") or v.get("deepspeed"):
        c.flags["strategy"] = "fsdp2"
        c.say("fsdp or deepspeed: --strategy fsdp2 shards weights, gradients and optimizer state")
    if given.get("ddp_timeout"):
        c.flags["dist_timeout"] = float(given["ddp_timeout"])
    if given.get("vllm_server_timeout"):
        c.flags["server_timeout"] = float(given["vllm_server_timeout"])
    if given.get("resume_from_checkpoint") and name:
        c.flags["resume"] = True
    if v["push_to_hub"]:
        c.flags |= {"push_to_hub": True, "hub_repo_id": given.get("hub_model_id") or name or "NAME/REPO"}
        if v["hub_private_repo"] is not True:
            c.flags["hub_private"] = False
    if kwargs := from_json(c, "chat_template_kwargs"):
        c.flags["chat_template_kwargs"] = kwargs
    if (most := v.get("max_tool_calling_iterations")) is not None:
        c.flags["max_turns"] = most + 1
    for ours in ("request_timeout", "token_budget"):
        if given.get(ours, 0) and given[ours] > 0:
            c.flags[{"token_budget": "tokens_per_microbatch"}.get(ours, ours)] = given[ours]
    if given.get("dtype") in ("float32", "bfloat16"):
        c.flags["dtype"] = given["dtype"]
    if isinstance(kwargs := given.get("model_init_kwargs"), dict):
        for key, value in kwargs.items():
            key, value = ("dtype" if key == "torch_dtype" else key), str(value).removeprefix("torch.")
            if key == "attn_implementation" or (key == "dtype" and value in ("float32", "bfloat16")):
                c.flags[key] = value
            else:
                c.say(f"model_init_kwargs {key}: not here, {dict(NOT_HERE)['model_init_kwargs']}")


# ---- the trainer's arguments ----------------------------------------------------------------------------------------


def place(script: Script, trainer: ast.Call, node: ast.AST, c: Command, home: str, what: str) -> str:
    """FILE.py:NAME of a function or class that the trainer is given."""
    node = node if isinstance(node, ast.Name) else script.once(node)
    name = node.id if isinstance(node, ast.Name) else None
    if name is None:
        name = node.attr if isinstance(node, ast.Attribute) else what
        c.say(f"{what} {Unread(node)!r}: give it a name at the top of {home}: {name} = {Unread(node)!r}")
        return f"{home}:{name}"
    if name not in script.top:
        c.say(f"{what} {name} is not at the top of {script.path.name}: move it to the top of {home}")
        return f"{home}:{name}"
    if script.runs_when_imported(trainer):
        c.say(f"{what} {name}: {script.path.name} trains when it is imported, so move {name} to {home} (or put the "
              f"training under `if __name__ == \"__main__\":` and name {script.path.name})")  # fmt: skip
        return f"{home}:{name}"
    return f"{script.path}:{name}"


def trained_on(script: Script, trainer: ast.Call | None, given: dict[str, ast.AST], c: Command) -> None:
    """Model, rewards, data, adapters, tools and environment of the GRPOTrainer call."""
    if "model" in given:
        model = script.value(given["model"])
        if isinstance(model, str):
            c.flags["model_id"] = model
        elif "model_id" not in c.flags:
            call = script.once(given["model"], changed=True)
            inner = script.value(call.args[0]) if isinstance(call, ast.Call) and call.args else model
            if isinstance(inner, str):
                c.flags["model_id"] = inner
                c.say(f"model {Unread(call)!r}: of its arguments, the name alone is taken")
            else:
                c.say(f"model = {model!r} does not stand in the script: give --model_id")
    if "reward_funcs" in given:
        rewards(script, trainer, given["reward_funcs"], c)
    if "environment_factory" in given:
        node = given["environment_factory"]
        if isinstance(found := script.once(node), ast.Lambda | ast.Call):
            c.say(f"environment_factory {Unread(found)!r}: arguments may stand behind the name, as in NAME?key=value")
        c.flags["env"] = place(script, trainer, node, c, "environments.py", "environment")
        scored = has_get_reward(script, node)
        if scored:
            c.flags["reward_funcs"] = [*c.flags.get("reward_funcs", []), "environment"]
            if "reward_weights" in c.flags:
                c.flags["reward_weights"] += [1.0]
            c.say("get_reward counts as `environment`, last of --reward_funcs and with a weight of 1, as there")
        elif scored is None and c.flags.get("reward_funcs"):  # without them it counts in any case
            c.say(f"whether {Unread(node)!r} has get_reward is not seen: if it has, add `environment` to "
                  "--reward_funcs, as the last, and 1 to --reward_weights, if those are given")  # fmt: skip
    if "tools" in given:
        found = script.once(given["tools"])
        nodes = found.elts if isinstance(found, ast.List | ast.Tuple) else None
        if nodes is None:
            c.say(f"tools = {Unread(found)!r} does not stand in the script: give --tools FILE.py:NAME ...")
        else:
            c.flags["tools"] = [place(script, trainer, node, c, "tools.py", "tool") for node in nodes]
    if c.flags.get("env") or c.flags.get("tools"):
        if c.known.get("max_tool_calling_iterations") is None:
            c.say("max_tool_calling_iterations is unset: no limit there, here --max_turns 8")
    if "peft_config" in given:
        adapters(script, given["peft_config"], c)
    for name, flag in (("train_dataset", "dataset_id"), ("eval_dataset", "eval_dataset_id")):
        if name in given:
            dataset(script, given[name], c, name, flag)
    for name, why in (
        ("callbacks", "the loop is train() in the script: change it there"),
        ("rollout_func", "a coroutine in ROLLOUTS (rollouts.py)"),
        ("reward_processing_classes", "the reward model's own tokenizer is used"),
        ("processing_class", "the tokenizer of --model_id is used"),
        ("optimizers", "make_optimizer and lr_at in the script"),
        ("quantization_config", "--use_peft --load_in 4bit for QLoRA, nothing else"),
        ("**", "what is in it does not stand in the script"),
    ):
        if name in given:
            c.say(f"{name} = {Unread(given[name])!r}: {why}")


def rewards(script: Script, trainer: ast.Call, node: ast.AST, c: Command) -> None:
    found = script.once(node)
    nodes = found.elts if isinstance(found, ast.List | ast.Tuple) else [node]
    if script.is_list(found):
        nodes = []
        c.say(f"reward_funcs = {Unread(node)!r} does not stand in the script: give --reward_funcs FILE.py:NAME ...")
    specs = []
    for each in nodes:
        if isinstance(text := script.value(each), str):
            specs.append("reward_model")
            if c.flags.get("reward_model"):
                c.say(f"reward model {text}: one is known here, --reward_model")
                specs.pop()
            else:
                c.flags["reward_model"] = text
        else:
            specs.append(place(script, trainer, each, c, "rewards.py", "reward"))
    # Two without a name would have the same one.
    for index, spec in enumerate(specs):
        if spec in specs[:index]:
            specs[index] = f"{spec}_{index + 1}"
    c.flags["reward_funcs"] = specs
    if weights := c.known.get("reward_weights"):
        c.flags["reward_weights"] = [float(weight) for weight in weights]


def has_get_reward(script: Script, node: ast.AST) -> bool | None:
    """Whether environments that a factory makes give rewards themselves; None where that is not seen."""
    found = script.once(node)
    if isinstance(found, ast.Dict):
        return any_of([has_get_reward(script, value) for value in found.values])
    if isinstance(found, ast.Lambda) and isinstance(found.body, ast.Call):
        return has_get_reward(script, found.body.func)
    if isinstance(found, ast.Call) and script.called(found) == "partial" and found.args:
        return has_get_reward(script, found.args[0])
    name = found.id if isinstance(found, ast.Name) else ""
    classes = [n for n in script.nodes if isinstance(n, ast.ClassDef) and n.name == name]
    if len(classes) != 1:
        return False if name == "object" else None
    if any(isinstance(n, DEFINITIONS) and n.name == "get_reward" for n in classes[0].body):
        return True
    return any_of([has_get_reward(script, base) for base in classes[0].bases])


def any_of(seen: list[bool | None]) -> bool | None:
    return True if True in seen else None if None in seen else False


def adapters(script: Script, node: ast.AST, c: Command) -> None:
    found = script.once(node)
    if c.flags.get("use_peft"):  # from the script's own flags
        return
    if not (isinstance(found, ast.Call) and script.called(found) == "LoraConfig"):
        c.say(f"peft_config = {Unread(node)!r} is no LoraConfig(...) of this script: if it is one, give --use_peft, "
              "--lora_r, --lora_alpha, --lora_targets")  # fmt: skip
        return
    c.flags["use_peft"] = True
    given = {name: script.value(value) for name, value in script.arguments(found, ()).items()}
    for name, (flag, default) in LORA.items():
        value = given.pop(name, default)
        if isinstance(value, Unread):
            c.say(f"LoraConfig {name} = {value!r}: give --{flag}")
        else:
            c.flags[flag] = value if name == "r" else float(value)
    targets = given.pop("target_modules", None)
    if isinstance(targets, str | list):
        c.flags["lora_targets"] = [targets] if isinstance(targets, str) else targets
    elif targets is not None:
        c.say(f"LoraConfig target_modules = {targets!r}: give --lora_targets, or all-linear is taken")
    else:
        c.say("LoraConfig without target_modules: peft takes those it has for the model, here all-linear")
    for name, value in given.items():
        if name != "task_type":
            c.say(f"LoraConfig {name} = {value!r}: not here; change add_lora in the script")


def loaded(script: Script, node: ast.AST) -> tuple[str, str | None, str | None] | None:
    """(--dataset_id, --dataset_config, split) of load_dataset(...) or load_dataset(...)["train"], where those say all
    that the call does."""
    found, split = script.once(node), None
    if isinstance(found, ast.Subscript):
        split, found = script.value(found.slice), script.once(found.value)
    if not (isinstance(found, ast.Call) and script.called(found) == "load_dataset"):
        return None
    given = {k: script.value(v) for k, v in script.arguments(found, LOAD).items() if k not in SAME_ROWS}
    split = split or given.get("split")
    path, config, files = (given.get(name) for name in ("path", "name", "data_files"))
    if given.keys() - {"path", "name", "split", "data_files"} or not isinstance(path, str):
        return None
    if any(isinstance(each, Unread) or not isinstance(each, str | None) for each in (config, split)):
        return None
    if files is None:
        return path, config, split
    one = isinstance(files, str) and path in ("json", "csv", "parquet") and split in (None, "train") and config is None
    local = rf"[^*?\[:]+\.{path}{'l?' if path == 'json' else ''}"  # no pattern, no address
    return (files, None, None) if one and re.fullmatch(local, files) else None


def dataset(script: Script, node: ast.AST, c: Command, name: str, flag: str) -> None:
    if flag in c.flags:  # from the script's own flags
        return
    found, held_out = loaded(script, node), flag == "eval_dataset_id"
    c.flags[flag], config, split = found or (f"rows.py:{name}", None, None)
    evaluated = "eval_steps" in c.flags
    if held_out and evaluated and config != c.flags.get("dataset_config"):
        c.say("--dataset_config is one for both data sets, and of the hub alone: put both into rows.py, as "
              "`def train_dataset(split, seed): return dataset` and")  # fmt: skip
        found = config = split = None
        c.flags[flag] = f"rows.py:{name}"
        if "dataset_id" in c.flags:
            c.flags |= {"dataset_id": "rows.py:train_dataset", "dataset_config": None, "dataset_split": "train"}
    if found is None:
        value = Unread(script.once(node))
        c.say(f"{name} = {value!r}: put it into rows.py as `def {name}(split, seed): return dataset`")
    if held_out and not evaluated:
        c.say("eval_dataset without an eval_strategy is not evaluated; --eval_steps N does, with --eval_dataset_id "
              f"{c.flags.pop(flag)}")  # fmt: skip
        return
    if c.flags[flag].endswith(".csv"):
        c.say(f"{c.flags[flag]}: every value is a text here, load_dataset makes numbers of some")
    c.flags |= {"eval_split" if held_out else "dataset_split": split} if split else {}
    c.flags |= {"dataset_config": config} if config else {}


# ---- all of it ------------------------------------------------------------------------------------------------------


def read_config(
    script: Script, kind: str, config: ast.Call | None, c: Command, own: dict, later: dict[str, ast.AST]
) -> None:
    """The config's values, and those that it is given `later`, into `given` and `known`, with a word on each that
    cannot be taken."""
    theirs, ours = FIELDS[kind], defaults(kind)
    here = HERE | ASYNC_HERE if kind == "AsyncGRPOConfig" else HERE
    reasons = {n: why for names, why in [*NOT_HERE, *ASYNC_NOT_HERE] for n in names.split()}
    values = {n: script.value(v) for n, v in own_fields(script, config).items()}
    values |= {n: script.value(v) for n, v in (script.arguments(config, ("output_dir",)) if config else {}).items()}
    c.known = dict(theirs)
    others = {name: value for name, value in own.items() if name not in theirs and name not in OLDER}
    c.flags |= {ours: others.pop(name) for name, ours in SCRIPTS_OWN.items() if name in others}
    if c.flags.get("use_peft"):
        c.flags = {"lora_r": 16, "lora_alpha": 32.0} | c.flags  # ModelConfig's defaults
    if others:
        c.say(f"{', '.join(others)}: not of {kind} itself, so not read")
    values |= {name: value for name, value in own.items() if name in theirs or name in OLDER}
    values |= {name: script.value(node) for name, node in later.items()}
    for name, value in values.items():
        flag = here.get(name, (OLDER.get(name),))[0]
        if name == "**":
            c.say(f"**{value!r}: what is in it does not stand in the script")
        elif name not in theirs and name not in OLDER:
            guess = nearest(name, theirs)
            c.say(f"{name} = {value!r}: {kind} of TRL {FIELDS['trl']} has no such field"
                  + (f"; {guess}?" if guess else ""))  # fmt: skip
        elif isinstance(value, Unread):
            meant = f"give --{' or --'.join(flag.split())}" if flag else reasons.get(name, "not here")
            c.say(f"{name} = {value!r} does not stand in the script: {meant}")
        elif not fits(value, FIELDS["types"].get(name, "float")):
            c.say(f"{name} = {value!r} is not read: in TRL it is {FIELDS['types'].get(name, 'a number')}")
        elif name in COUNTS and value is not None and value < 1:
            c.say(f"{name} = {value!r} is not read: it counts, so it is at least 1")
        else:
            c.given[name] = c.known[name] = value
            if name in SERVER:
                c.say(f"{name} {value}: vllm_server.py {SERVER[name]} {value}")
            elif name in reasons and value != theirs[name] and name != "model_init_kwargs":
                c.say(f"{name} = {value!r}: not here; {reasons[name]}")
            elif name in here and here[name][1] and value != theirs[name] and flag.split()[0] in ours:
                c.say(f"{name} = {value!r} -> --{' --'.join(flag.split())}: {here[name][1].replace('`', '')}")


def config_classes(script: Script, config: ast.Call | None) -> list[ast.ClassDef]:
    """The script's own classes that its config is of; of one that comes from a command line, those that there are."""
    if config is not None:
        return script.own_classes(config)
    return [own for own in script.classes.values() if any(script.name(base) in CONFIGS for base in own.bases)]


def own_fields(script: Script, config: ast.Call | None) -> dict[str, ast.AST]:
    """What the script's own subclass of a config, if the config is one, has as defaults."""
    found = {}
    for each in reversed(config_classes(script, config)):
        if not any("dataclass" in ast.unparse(decorator) for decorator in each.decorator_list):
            continue  # then these are no fields, and TRL keeps its own values
        for node in each.body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else []
            value = getattr(node, "value", None)
            if isinstance(call := value, ast.Call) and script.called(call) == "field":  # dataclasses.field(default=...)
                value = next((word.value for word in call.keywords if word.arg == "default"), value)
            found |= {t.id: value for t in targets if isinstance(t, ast.Name) and value is not None}
    return found


def trainer_arguments(script: Script, trainer: ast.Call) -> dict[str, ast.AST]:
    """{name: node} of a trainer's call; of one of the script's own, what it calls otherwise than TRL's too: a config is
    its `args`."""
    inits = (n for own in script.own_classes(trainer) for n in own.body if getattr(n, "name", "") == "__init__")
    init = next(inits, None)
    theirs = ARGUMENTS[script.kind(trainer, TRAINERS)]
    first = theirs if init is None or init.args.vararg else [a.arg for a in init.args.args[1:]]
    given = script.arguments(trainer, first)
    given = {k: node for k, node in given.items() if not isinstance(node, ast.Constant) or node.value is not None}
    config = next((node for node in given.values() if script.kind(script.once(node, changed=True), CONFIGS)), None)
    if config is not None:
        given = {name: node for name, node in given.items() if node is not config} | {"args": config}
    return given


def overridden(script: Script, config: ast.Call | None, trainer: ast.Call | None, c: Command) -> None:
    """A word on each method of TRL's trainer that the script's own subclass has instead, and on a config's."""
    for own in config_classes(script, config):
        if any(getattr(n, "name", "") == "__post_init__" for n in own.body):
            c.say(f"line {own.lineno}, {own.name}: its __post_init__ is not read: give what it sets")
    for own in script.own_classes(trainer) if trainer else ():
        names = [n.name for n in own.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        at = f"line {own.lineno}, {own.name}"
        known = {name: why for theirs, why in OVERRIDDEN.items() for name in theirs.split()}
        if "__init__" in names:
            c.say(f"{at}: has an __init__ of its own: what that does, and passes on, is not read")
        for name in names:
            if name in known:
                c.say(f"{at}: its {name} is not read: {known[name]}")
        if unknown := [name for name in names if name not in known and name != "__init__"]:
            c.say(f"{at}: {', '.join(unknown)}: not read; the loop is train() in train_grpo.py")


def fits(value, kind: str) -> bool:
    """Whether a value is one that an annotation such as `list[float] | None` allows."""
    inside = re.match(r"typing\.Union\[(.*)\]$", kind)
    return any(fits_one(value, each) for each in re.split(r"[|,] (?![^\[]*\])", inside[1] if inside else kind))


def fits_one(value, kind: str) -> bool:
    outer, _, inner = kind.strip().removesuffix("]").partition("[")
    if value is None or isinstance(value, bool):
        return outer in ({"None", "NoneType"} if value is None else {"bool", "str"})
    if isinstance(value, int | float):
        return outer in ("int", "float") and math.isfinite(value)
    if isinstance(value, list | tuple):
        return outer == "list" and all(fits(each, inner) for each in value)
    return type(value).__name__ == outer or (isinstance(value, str) and "." in outer)  # an enum's member is its text


def convert(
    script: Script, kind: str, config: ast.Call | None, trainer: ast.Call | None, processes: int, own: dict
) -> Command:
    c = Command(CONFIGS[kind], processes)
    where = f"line {(config or trainer).lineno}"
    made_by = ", ".join(each.name for each in config_classes(script, None)) if config is None else ""
    c.say(
        f"{script.path}, {where}: {kind}" + (f", of {made_by}" if made_by else "" if config or own else ", by default")
    )
    if config is not None and trainer is None:
        c.say("no trainer that is seen takes this config (one that another file makes or changes is not read): give "
              "--model_id, --reward_funcs and --dataset_id")  # fmt: skip
    overridden(script, config, trainer, c)
    given = trainer_arguments(script, trainer) if trainer else {}
    args = given.get("args")
    if config is None and args and not own:
        c.say(f"args = {Unread(script.once(args, changed=True))!r} is not read: give what differs from TRL's defaults, "
              "or, if it comes from a command line, that behind --")  # fmt: skip
    if config and args and script.once(args, changed=True) is not config:
        c.say(f"args = {Unread(args)!r} is taken to be {kind} of line {config.lineno}: give what differs")
    later, others = script.set_later(config, args, trainer)
    for each in others:
        c.say(f"line {each.lineno}, {Unread(each)!r}, is not read: give what it changes")
    read_config(script, kind, config, c, own, later)
    updates = batch(c)
    c.flags["num_iterations"] = c.known.get("num_iterations", 1)
    length(c, updates)
    optimisation(c, updates)
    loss(c)
    trained_on(script, trainer, given, c)
    others = {name: node for name, node in given.items() if name not in {*sum(ARGUMENTS.values(), []), "**"}}
    if others:
        shown = ", ".join(f"{name} = {Unread(node)!r}" for name, node in others.items())
        c.say(f"{shown}: not read, TRL's trainer has no such argument")
    if trainer and not c.flags.keys() & {"reward_funcs", "env"}:
        c.say("no rewards were found: give --reward_funcs")
    if trainer and not c.flags.keys() & {"dataset_id", "env"}:
        c.say("no data were found: give --dataset_id")
    if (weights := c.known.get("reward_weights")) and "reward_weights" not in c.flags:
        c.say(f"reward_weights = {weights!r}: give --reward_weights beside --reward_funcs")
    reference(c, updates)
    sampling(c, kind)
    run(c)
    if "max_prompt_length" in c.given and c.given["max_prompt_length"]:
        c.flags["max_prompt_length"] = c.given["max_prompt_length"]
        c.say("max_prompt_length: earlier TRLs cut prompts to it; here longer ones are left out")
    else:
        c.say("prompts of more than 1,024 tokens are left out; --max_prompt_length")
    c.say("prompts that are text alone get the model's chat template; TRL takes them as they are: "
          "--no_apply_chat_template")  # fmt: skip
    if "num_generations" in c.flags and c.flags["num_generations"] < 2:
        c.say("one completion a prompt has nothing to be compared with")
    ours = defaults(kind)
    c.flags = {name: value for name, value in c.flags.items() if value != ours[name] and value != []}
    return c


def from_command_line(words: list[str]) -> dict[str, object]:
    """{name: value} of `--name value --name2=value --switch`, as literals where they are some."""
    found: dict[str, object] = {}
    for word in words:
        if word.startswith("--"):
            name, _, text = word[2:].partition("=")
            found[name.replace("-", "_")] = [text] if text else []
        elif found:
            found[list(found)[-1]].append(word)
        else:
            raise ConfigError(f"unexpected {word!r} behind --: give the script's own flags, as --learning_rate 1e-5.")

    def literal(text: str):
        try:
            return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
        except (ValueError, SyntaxError):
            return text

    values = {name: [literal(text) for text in texts] for name, texts in found.items()}
    return {name: True if not each else each[0] if len(each) == 1 else each for name, each in values.items()}


def commands(path: Path, processes: int = 1, flags: list[str] = ()) -> list[Command]:
    """A command for each config of the script, with the trainer that is given it; `flags`: the script's own, of its
    command line. ConfigError without a config or a trainer."""
    script = Script(path)
    configs, trainers = script.calls(CONFIGS), script.calls(TRAINERS)
    found, taken = [], set()
    for kind, trainer in trainers:
        given = trainer_arguments(script, trainer)
        node = given.get("args", given.get("**"))
        config = script.once(node, changed=True) if node is not None else None
        if config is None or script.kind(config, CONFIGS):
            taken.add(config)
            found.append((script.kind(config, CONFIGS) or TRAINERS[kind], config, trainer))
    rest = [(kind, call) for kind, call in configs if call not in taken]
    left = [trainer for _, trainer in trainers if trainer not in [each[2] for each in found]]
    if not configs:  # from a command line
        found += [(TRAINERS[kind], None, trainer) for kind, trainer in trainers if trainer in left]
    for kind, config in rest:  # the name is given several values: the one trainer that is left is meant
        found.append((kind, config, left[0] if len(left) == 1 else None))
    if not found:
        raise ConfigError(f"{path}: no call of GRPOConfig, AsyncGRPOConfig or their trainers was found.")
    found.sort(key=lambda each: (each[1] or each[2]).lineno)
    made = [convert(script, *each, processes, from_command_line(flags)) for each in found]
    for command in made:
        if (refusal := refused(command)) is not None:
            command.say(f"{command.script} refuses this as it is: {refusal}")
    return made


def refused(command: Command) -> ConfigError | None:
    """What our own parser, or the check of optimizer and schedule at a run's start, says against a command."""
    from algorithms import optimizers  # imports torch

    staleness = command.flags.get("max_staleness")
    words = dataclasses.replace(command, flags={k: v for k, v in command.flags.items() if k != "max_staleness"}).words()
    try:
        check(cfg := load_config(TrainConfig, words), command.processes)
        optimizers.check_optimisation(cfg)
    except ConfigError as error:
        return error
    return ConfigError(f"--max_staleness={staleness}: give 0 or more.") if (staleness or 0) < 0 else None


# ---- data and docs --------------------------------------------------------------------------------------------------


def read_fields() -> dict:
    """Names and defaults of the installed TRL's configs."""
    from trl import GRPOConfig
    from trl.experimental.async_grpo import AsyncGRPOConfig

    def plain(f: dataclasses.Field):
        value = f.default_factory() if f.default is dataclasses.MISSING else f.default
        return value.value if hasattr(value, "value") else value

    known = {"GRPOConfig": GRPOConfig, "AsyncGRPOConfig": AsyncGRPOConfig}
    made = {kind: {f.name: plain(f) for f in dataclasses.fields(cls)} for kind, cls in known.items()}
    types = {f.name: getattr(f.type, "__name__", None) if isinstance(f.type, type) else str(f.type)
             for cls in reversed(known.values()) for f in dataclasses.fields(cls)}  # fmt: skip
    versions = {name: importlib.metadata.version(name) for name in ("trl", "transformers")}
    return json.loads(json.dumps(versions | made | {"types": types}))


def page() -> str:
    """docs/coming-from-trl.md with its tables as they should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return (
        before
        + BEGIN
        + "\n"
        + tables(defaults("GRPOConfig"), defaults("AsyncGRPOConfig"))
        + "\n"
        + END
        + rest.partition(END)[2]
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", nargs="?", type=Path, help="python file with GRPOConfig(...) and GRPOTrainer(...)")
    parser.add_argument("--processes", type=int, default=1, help="processes it is started with [1]")
    parser.add_argument("--read_fields", action="store_true", help="write trl_fields.json from the installed TRL")
    parser.add_argument("--write_tables", action="store_true", help="write the tables of docs/coming-from-trl.md")
    argv = sys.argv[1:] if argv is None else argv
    cut = argv.index("--") if "--" in argv else len(argv)
    args, own = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    if args.read_fields:
        Path(__file__).with_name("trl_fields.json").write_text(
            json.dumps(read_fields(), indent=1) + "\n", encoding="utf-8"
        )
    if args.write_tables:
        PAGE.write_text(page(), encoding="utf-8")
    if args.read_fields or args.write_tables:
        return 0
    if args.script is None:
        parser.error("give a python file that trains with TRL's GRPOTrainer")
    if args.processes < 1:
        parser.error(f"--processes {args.processes}: at least 1")
    try:
        print("\n\n".join(command.text() for command in commands(args.script, args.processes, own)))
    except ConfigError as error:
        print(f"from_trl.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
