"""Our command line for a script that trains with TRL's GRPOTrainer.

    python scripts/from_trl.py MY_SCRIPT.py [--processes 8]

The script is read, not run: of its GRPOConfig(...), GRPOTrainer(...) and LoraConfig(...) the values that are written
down count, and names that are given one at the top of the file. What the script leaves unset is as TRL 1.16 has it by
default, where that changes what is learned. Everything else is listed under "set by hand". docs/coming-from-trl.md says
what differs.
"""

import argparse
import ast
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import ConfigError, TrainConfig, load_config, words_of  # noqa: E402

# TRL's defaults that change what is learned, where ours differ or a rule below reads them.
DEFAULTS = dict(
    per_device_train_batch_size=8, gradient_accumulation_steps=1, generation_batch_size=None, steps_per_generation=None,
    num_generations=8, num_iterations=1, max_completion_length=256, temperature=1.0, learning_rate=1e-6,
    lr_scheduler_type="linear", num_train_epochs=3.0, max_steps=-1, max_grad_norm=1.0, weight_decay=0.0,
    loss_type="dapo", importance_sampling_level="token", epsilon=0.2, epsilon_high=None, beta=0.0,
    scale_rewards="group", use_vllm=False, vllm_importance_sampling_correction=True,
    vllm_importance_sampling_mode="sequence_mask",
    vllm_importance_sampling_clip_max=3.0, top_k=0, top_p=1.0, eval_strategy="no",
)  # fmt: skip
# TRL's name -> ours, with the value as it is.
SAME = "run_name output_dir seed num_generations num_iterations temperature max_completion_length max_prompt_length "
SAME += (
    "learning_rate weight_decay adam_beta2 max_grad_norm beta reward_weights optim top_entropy_quantile entropy_coef "
)
SAME += "entropy_target gradient_checkpointing report_to save_total_limit log_completions"
SAME = {name: name for name in SAME.split()} | {
    "num_generations_eval": "eval_generations", "warmup_ratio": "warmup_steps", "delta": "dual_clip",
    "mask_truncated_completions": "mask_truncated", "off_policy_mask_threshold": "off_policy_threshold",
    "router_aux_loss_coef": "router_aux_coef", "ref_model_mixup_alpha": "ref_sync_alpha", "torch_compile": "compile",
    "use_bias_correction_kl": "kl_ratio", "vllm_server_base_url": "server_urls", "ddp_timeout": "dist_timeout",
    "vllm_server_timeout": "server_timeout", "lr_scheduler_type": "lr_schedule",
}  # fmt: skip
# Counted in optimizer updates there, in steps here.
UPDATES = {name: name for name in ("max_steps", "save_steps", "eval_steps", "warmup_steps")}
UPDATES |= {"logging_steps": "log_steps", "ref_model_sync_steps": "ref_sync_steps"}
READ = set(DEFAULTS) | set(SAME) | set(UPDATES) | {"bf16"}
LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_targets"}


class Script:
    """What a script writes down: its calls by name, and the literal values of names at its top."""

    def __init__(self, path: Path):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, SyntaxError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as python: {error}") from None
        self.path, self.names, self.calls = path, {}, {}
        self.top = {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                self.names[name] = node.targets[0] if name in self.names else node.value  # a changed name has no value
            elif isinstance(node, ast.Call):
                self.calls.setdefault(getattr(node.func, "id", getattr(node.func, "attr", "")), node)
        plain = [node for node in tree.body if isinstance(node, ast.Assign | ast.Expr)]
        self.trains_when_imported = self.calls.get("GRPOTrainer") in [
            inner for node in plain for inner in ast.walk(node)
        ]

    def node(self, node: ast.AST) -> ast.AST:
        """What a name at the top stands for; another expression as it is."""
        return self.names.get(node.id, node) if isinstance(node, ast.Name) else node

    def value(self, node: ast.AST):
        """A literal. ValueError for what is computed."""
        return ast.literal_eval(self.node(node))

    def place(self, node: ast.AST) -> str:
        """FILE.py:NAME of a function or class at the top of the script. ValueError for another expression."""
        if isinstance(node, ast.Name) and node.id in self.top:
            return f"{self.path}:{node.id}"
        raise ValueError

    def given(self, name: str, *places: str) -> dict[str, ast.AST]:
        """The arguments of the first call of this name; {} without one. places: names of positional ones."""
        call = self.calls.get(name)
        if call is None:
            return {}
        return dict(zip(places, call.args, strict=False)) | {word.arg or "**": word.value for word in call.keywords}


def settings(script: Script, by_hand: list[str], notes: list[str], processes: int) -> dict:
    """Our flags for a GRPOConfig."""
    known = dict(DEFAULTS)
    for name, node in script.given("GRPOConfig").items():
        try:
            known[name] = script.value(node)
        except ValueError:
            by_hand.append(f"{name} = {ast.unparse(node)}: is computed")
            continue
        if name not in READ:
            by_hand.append(f"{name} = {known[name]!r}: no flag of this name, see docs/coming-from-trl.md")
    flags = {SAME[name]: known[name] for name in SAME if name in known and known[name] is not None}
    batch = known["per_device_train_batch_size"] * processes
    update = batch * known["gradient_accumulation_steps"]  # completions of an optimizer update
    sampled = known["generation_batch_size"] or batch * (
        known["steps_per_generation"] or known["gradient_accumulation_steps"]
    )
    minibatches = max(1, sampled // update)
    if sampled % known["num_generations"] or sampled % update:
        raise ConfigError(
            f"{sampled} completions are sampled at once, in updates of {update} and groups of "
            f"{known['num_generations']}: these do not divide each other. Are there other --processes?"
        )
    flags |= {"prompts_per_step": sampled // known["num_generations"], "num_minibatches": minibatches}
    updates = minibatches * known["num_iterations"]
    if updates > 1:
        notes.append(f"a step here is {updates} updates: max_steps, save_steps, ... are divided by {updates}")
    for name, flag in UPDATES.items():
        if known.get(name) and known[name] > 0:
            flags[flag] = max(1, round(known[name] / updates))
    if known["max_steps"] <= 0:
        flags["num_epochs"] = known["num_train_epochs"]
    if known["eval_strategy"] == "no":
        flags.pop("eval_steps", None)
    kind, sequence = known["loss_type"], known["importance_sampling_level"] == "sequence"
    flags["loss_agg"] = {"grpo": "seq_mean", "sapo": "seq_mean", "dr_grpo": "constant", "luspo": "seq_sum"}.get(
        kind, "token_mean"
    )
    if kind in ("cispo", "sapo", "vespo") or sequence:
        flags["policy_loss"] = kind if kind in ("cispo", "sapo", "vespo") else "gspo"
    low = known["epsilon"]
    high = low if known["epsilon_high"] is None else known["epsilon_high"]
    if kind == "cispo":  # epsilon_high is the bound of the ratio there, 1 + epsilon_high here; there is no lower one
        low, high = 1.0, max(0.0, round(high - 1, 6))
    flags |= {"epsilon": low, "epsilon_high": high}
    flags["scale_rewards"] = {True: "group", False: "none"}.get(known["scale_rewards"], known["scale_rewards"])
    flags |= {"top_k": known["top_k"] or None, "top_p": None if known["top_p"] == 1 else known["top_p"]}
    if not known["use_vllm"]:
        flags |= {"generator": "hf", "correction": "none"}
    elif not known["vllm_importance_sampling_correction"]:
        flags["correction"] = "none"
    elif kind == "vespo":  # the correction is within its ratio there
        flags |= {"old_logprobs": "sampler", "correction": "none"}
    else:
        flags["correction"], _, flags["correction_mode"] = known["vllm_importance_sampling_mode"].partition("_")
        flags["correction_max"] = known["vllm_importance_sampling_clip_max"]
    return flags


def arguments(script: Script, by_hand: list[str], notes: list[str]) -> dict:
    """Our flags for what the trainer is given beside its config."""
    flags: dict = {}
    given = script.given("GRPOTrainer", "model", "reward_funcs", "args", "train_dataset", "eval_dataset")

    def several(node: ast.AST) -> list:
        node = script.node(node)
        return [script.place(part) for part in (node.elts if isinstance(node, ast.List) else [node])]

    def hub_id(node: ast.AST) -> str:
        call = script.node(node)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "load_dataset" and call.args:
            return script.value(call.args[0])
        raise ValueError

    readers = {
        "model": ("model_id", script.value), "reward_funcs": ("reward_funcs", several), "tools": ("tools", several),
        "environment_factory": ("env", script.place), "train_dataset": ("dataset_id", hub_id),
        "eval_dataset": ("eval_dataset_id", hub_id),
    }  # fmt: skip
    for name in given:
        if name in readers:
            flag, read = readers[name]
            try:
                flags[flag] = read(given[name])
            except ValueError:
                by_hand.append(f"{name} = {ast.unparse(given[name])}: --{flag}, with what is at the top of a file")
        elif name not in ("args", "peft_config", "processing_class"):
            by_hand.append(f"{name} = {ast.unparse(given[name])}: see docs/coming-from-trl.md")
    if "peft_config" in given:
        flags |= {"use_peft": True, "lora_r": 8, "lora_alpha": 8}
        for name, node in script.given("LoraConfig").items():
            try:
                flags[LORA[name]] = script.value(node)
            except (KeyError, ValueError):
                by_hand.extend([f"LoraConfig {name} = {ast.unparse(node)}"] if name != "task_type" else [])
    if script.trains_when_imported:
        notes.append(f"{script.path} trains when it is imported: move what is named from it to a file of its own")
    return flags


def main(given: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("--processes", type=int, default=1, help="of the TRL run; default: 1")
    args = parser.parse_args(given)
    script = Script(args.script)
    if "GRPOTrainer" not in script.calls:
        raise ConfigError(f"{args.script} does not call GRPOTrainer; other trainers of TRL are not read.")
    by_hand: list[str] = []
    notes = ["a prompt that is text alone gets the chat template here; --no_apply_chat_template for TRL's way"]
    flags = settings(script, by_hand, notes, args.processes) | arguments(script, by_hand, notes)
    ours = {name: value for name, value in flags.items() if value != getattr(TrainConfig, name, None)}
    ours = {"model_id": flags.get("model_id", "MODEL")} | ours
    load_config(TrainConfig, [*words_of(ours), "--generator", "hf"])  # a wrong value is told now
    start = f"torchrun --nproc_per_node={args.processes}" if args.processes > 1 else "python"
    for note in notes:
        print(f"# {note}")
    for line in by_hand:
        print(f"# set by hand: {line}")
    if "generator" not in ours:
        print(f"python vllm_server.py --model {ours['model_id']}     # in a terminal of its own")
    print(f"{start} train_grpo.py {shlex.join(words_of(ours))}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"from_trl.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
