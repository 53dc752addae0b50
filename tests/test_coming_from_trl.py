"""What people bring from TRL: every field of its config has its place, its scripts become command lines, and its
optimizers and schedules do here what they do there."""

import asyncio
import dataclasses
import importlib.util
import json
import shlex
import sys

import pyarrow.parquet
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from live import EVEN, ROOT, SMALL, running, trainer
from test_turns import Scripted, config, tokenizer_of
from transformers.optimization import get_scheduler
from transformers.trainer_utils import SchedulerType

import rewards
import train_grpo as script
from algorithms import optimizers
from config import ConfigError, TrainConfig, check, load_config
from envs.adapters import environment_maker
from rollouts import play
from runlog import resume

sys.path.append(str(ROOT / "scripts"))
import from_trl  # noqa: E402
from trl_table import ASYNC_HERE, ASYNC_NOT_HERE, FIELDS, HERE, NOT_HERE, SERVER  # noqa: E402

# ---- the table ------------------------------------------------------------------------------------------------------


def names(pairs) -> list[str]:
    return [name for each, _ in pairs for name in each.split()]


@pytest.mark.parametrize("kind", ["GRPOConfig", "AsyncGRPOConfig"])
def test_every_field_of_trl_stands_in_the_table_once(kind):
    table = [*HERE, *SERVER, *names(NOT_HERE)]
    if kind == "AsyncGRPOConfig":
        table = [*(n for n in table if n in FIELDS[kind]), *ASYNC_HERE, *names(ASYNC_NOT_HERE)]
    assert sorted(table) == sorted(FIELDS[kind])
    assert all(isinstance(FIELDS["types"][name], str) for name in FIELDS[kind])


def test_what_the_table_names_is_here():
    ours = from_trl.defaults("AsyncGRPOConfig")
    flags = {flag for flags, _ in [*HERE.values(), *ASYNC_HERE.values()] for flag in flags.split()}
    assert flags <= set(ours), flags - set(ours)
    import train_async

    assert ours == {f.name: getattr(train_async.TrainConfig(), f.name) for f in dataclasses.fields(TrainConfig)} | {
        "max_staleness": train_async.TrainConfig().max_staleness
    } | {name: ours[name] for name in ("rollout", "dataset_id", "reward_funcs")}  # settled by what else is given


def test_the_page_has_the_table_with_the_defaults_of_both():
    assert from_trl.PAGE.read_text(encoding="utf-8") == from_trl.page(), "python scripts/from_trl.py --write_tables"
    line = next(line for line in from_trl.page().splitlines() if line.startswith("| `adam_beta2` |"))
    assert f"| `{FIELDS['GRPOConfig']['adam_beta2']}` |" in line and f"`{TrainConfig.adam_beta2}`" in line


def test_the_fields_are_those_of_the_installed_trl_and_peft():
    from peft import LoraConfig

    assert {name: getattr(LoraConfig, name) for name in from_trl.LORA} == {n: d for n, (_, d) in from_trl.LORA.items()}
    if importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed; PYTHONPATH may name a folder that has it")
    assert from_trl.read_fields() == FIELDS


# ---- scripts --------------------------------------------------------------------------------------------------------

SCRIPT = """
from trl import {imports}

def reward(completions, **kwargs):
    return [float(len(c)) for c in completions]

def main():
    {body}

if __name__ == "__main__":
    main()
"""


def commands(tmp_path, body: str, processes=1, imports="GRPOConfig, GRPOTrainer", flags=()) -> list:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT.format(imports=imports, body=body.replace("\n", "\n    ")), encoding="utf-8")
    return from_trl.commands(path, processes, list(flags))


def parsed(command) -> TrainConfig:
    """Our config of what was printed, as a shell and our parser read it."""
    lines = [line for line in command.text().splitlines() if not line.startswith("#")]
    words = shlex.split("\n".join(lines).replace("\\\n", " "))
    flags = words[words.index(command.script) + 1 :]
    if "--max_staleness" in flags:
        at = flags.index("--max_staleness")
        flags = flags[:at] + flags[at + 2 :]
    cfg = load_config(TrainConfig, flags)
    check(cfg, command.processes)
    optimizers.check_optimisation(cfg)
    assert not any("refuses this" in line for line in command.said), command.said
    return cfg


def one(tmp_path, arguments: str = "", more: str = "", processes=1):
    body = f"config = GRPOConfig({arguments})\n"
    body += f"GRPOTrainer(model='m/7b', args=config, reward_funcs=reward, {more}).train()"
    (command,) = commands(tmp_path, body, processes)
    return command, parsed(command)


def test_a_script_without_settings_trains_as_trl_would(tmp_path):
    """Where nothing is given, TRL's defaults that change what is learned are given here."""
    command, cfg = one(tmp_path)
    assert (cfg.model_id, cfg.reward_funcs) == ("m/7b", [f"{tmp_path}/mine.py:reward"])
    assert (cfg.loss_agg, cfg.adam_beta2, cfg.lr_schedule, cfg.num_epochs) == ("token_mean", 0.999, "linear", 3)
    assert (cfg.prompts_per_step, cfg.num_generations, cfg.generator, cfg.correction) == (1, 8, "hf", "none")
    assert command.text().count("python train_grpo.py") == 1


@pytest.mark.parametrize(
    "given, processes, wanted",  # prompts_per_step, num_minibatches, max_steps of 120 updates, save_steps of 12
    [
        ("per_device_train_batch_size=8", 1, (1, 1, 120, 12)),
        ("per_device_train_batch_size=8, gradient_accumulation_steps=4", 2, (8, 1, 120, 12)),
        ("per_device_train_batch_size=8, gradient_accumulation_steps=4, num_generations=4", 2, (16, 1, 120, 12)),
        # 8 x 16 = 128 completions at once, for 16 / 4 = 4 updates
        ("gradient_accumulation_steps=4, steps_per_generation=16", 1, (16, 4, 30, 3)),
        ("gradient_accumulation_steps=4, generation_batch_size=128", 1, (16, 4, 30, 3)),
        ("gradient_accumulation_steps=4, steps_per_generation=16, num_iterations=3", 1, (16, 4, 10, 1)),
        ("num_iterations=2, gradient_accumulation_steps=2", 4, (8, 1, 60, 6)),
        # an update of two generations by the same weights
        ("gradient_accumulation_steps=4, steps_per_generation=2", 1, (4, 1, 120, 12)),
        # half a group each time: here groups are whole
        ("per_device_train_batch_size=4, steps_per_generation=2", 1, (1, 1, 120, 12)),
        # two prompts for four processes: here each has a whole one
        ("per_device_train_batch_size=4", 4, (4, 1, 120, 12)),
    ],
)
def test_a_step_has_as_many_prompts_and_updates_as_there(tmp_path, given, processes, wanted):
    command, cfg = one(tmp_path, f"max_steps=120, save_steps=12, {given}", processes=processes)
    assert (cfg.prompts_per_step, cfg.num_minibatches, cfg.max_steps, cfg.save_steps) == wanted, command.text()
    assert any("completions / num_generations" in line for line in command.said)


@pytest.mark.parametrize(
    "given, wanted",
    [
        ("loss_type='grpo'", dict(loss_agg="seq_mean", policy_loss="ppo")),
        ("loss_type='dr_grpo', scale_rewards=False", dict(loss_agg="constant", scale_rewards="none")),
        ("loss_type='cispo', epsilon_high=5.0", dict(policy_loss="cispo", epsilon=1.0, epsilon_high=4.0)),
        ("loss_type='sapo', sapo_temperature_neg=2.0", dict(policy_loss="sapo", sapo_tau_neg=2.0)),
        ("loss_type='grpo', importance_sampling_level='sequence', epsilon=3e-4", dict(policy_loss="gspo")),
        ("loss_type='luspo', importance_sampling_level='sequence'", dict(policy_loss="gspo", loss_agg="seq_sum")),
        ("loss_type='luspo', delta=4.0", dict(policy_loss="ppo", loss_agg="seq_sum", dual_clip=4.0)),
        ("loss_type='cispo', epsilon_high=1.28", dict(policy_loss="cispo", epsilon_high=0.28)),
        ("epsilon=0.1", dict(epsilon=0.1, epsilon_high=0.1)),
        ("epsilon=10.0", dict(epsilon=1.0, epsilon_high=10.0)),
        ("epsilon=0.1, epsilon_high=0.28, delta=4.0", dict(epsilon_high=0.28, dual_clip=4.0)),
        ("beta=0.04, sync_ref_model=True", dict(beta=0.04, ref_sync_steps=512)),
        ("use_adaptive_entropy=True, entropy_target=2.0", dict(entropy_target=2.0, entropy_coef_step=0.005)),
        ("lr_scheduler_type='constant', warmup_steps=5", dict(lr_schedule="constant", warmup_steps=None)),
        ("warmup_steps=5, max_steps=10, num_iterations=2", dict(warmup_steps=3, lr_schedule="linear")),
        ("warmup_ratio=0.1", dict(warmup_ratio=0.1)),
        ("warmup_steps=0.1", dict(warmup_ratio=0.1, warmup_steps=None)),
        (
            "chat_template_kwargs={'enable_thinking': False}",
            dict(chat_template_kwargs={"enable_thinking": False}),
        ),
        (
            "lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr_rate': 0.1}",
            dict(lr_schedule="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}),
        ),
        ("loss_type='vespo', use_vllm=True", dict(old_logprobs="sampler", correction="none", correction_max=2.0)),
        ("loss_type='vespo', use_vllm=True, vllm_importance_sampling_correction=False", dict(correction="none")),
        ("optim='sgd'", dict(optim="sgd")),
        ("optim='adamw_torch', adam_epsilon=1e-6", dict(optim="AdamW", adam_epsilon=1e-6)),
        ("optim='adafactor'", dict(optim="AdamW")),
        ("use_vllm=True, vllm_mode='server'", dict(generator="vllm", correction="sequence", correction_mode="mask")),
        ("use_vllm=True, vllm_mode='server', vllm_server_port=9", dict(server_urls=["http://127.0.0.1:9"])),
        ("use_vllm=True", dict(colocate=True, correction_max=3.0)),
        ("use_vllm=True, vllm_importance_sampling_correction=False", dict(correction="none")),
        ("use_vllm=True, vllm_importance_sampling_mode='token_truncate'", dict(correction="token")),
        ("bf16=False, seed=7, torch_compile=True", dict(compute_dtype="float32", seed=7, compile=True)),
        ("gradient_checkpointing=False, log_unique_prompts=True", dict(gradient_checkpointing=False)),
        ("eval_strategy='steps', eval_steps=20, num_generations_eval=2", dict(eval_steps=20, eval_generations=2)),
        ("report_to=['wandb', 'none'], run_name='a/b', output_dir='out'", dict(report_to=["wandb"], run_name="a_b")),
        ("'out/first'", dict(output_dir="out", run_name="first")),
        ("top_p=0.9, top_k=20, min_p=0.1, temperature=0.7", dict(top_p=0.9, top_k=20, min_p=0.1, temperature=0.7)),
        ("model_init_kwargs={'dtype': 'bfloat16', 'revision': 'x'}", dict(dtype="bfloat16")),
        ("max_tool_calling_iterations=3", dict(max_turns=4)),
        ("adam_beta2=0.9999999, learning_rate=1.23456789e-6", dict(adam_beta2=0.9999999, learning_rate=1.23456789e-6)),
        ("learning_rate=2 * 1e-6, max_completion_length=2**8", dict(learning_rate=2e-6, max_completion_length=256)),
        ("push_to_hub=True, hub_model_id='me/mine'", dict(hub_repo_id="me/mine", hub_private=False)),
        ("**{'beta': 0.5}", dict(beta=0.5)),
        ("**dict(beta=0.5)", dict(beta=0.5)),
    ],
)
def test_a_setting_of_trl_becomes_ours(tmp_path, given, wanted):
    _, cfg = one(tmp_path, given)
    assert {name: getattr(cfg, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    "given, says",
    [
        ("learning_rate=args.lr", "learning_rate = args.lr does not stand in the script: give --learning_rate"),
        ("cache_implementation='static'", "cache_implementation = 'static': not here"),
        ("reward_weigths=[1]", "has no such field; reward_weights?"),
        ("optim='adafactor'", "torch's Adafactor scales"),
        ("weight_decay=0.1", "TRL leaves out biases and norms"),
        ("beta=0.1", "use_bias_correction_kl"),
        ("vllm_tensor_parallel_size=2", "vllm_server.py --tensor-parallel-size 2"),
        ("trust_remote_code=True", "code that comes with a model is not run"),
        ("lr_scheduler_type='greedy'", "follows a metric"),
        ("num_generations='8'", "num_generations = '8' is not read: in TRL it is int | None"),
        ("num_generations=0", "num_generations = 0 is not read: it counts"),
        ("steps_per_generation=2", "so 2 updates a step"),
        ("**settings()", "**settings(): what is in it does not stand in the script"),
        ("loss_type='cispo', importance_sampling_level='sequence'", "cispo has a ratio of each token here"),
        ("loss_type='sapo', importance_sampling_level='sequence'", "sapo has a ratio of each token here"),
        ("loss_type='cispo'", "the bound is at least 1 here; 0.2 scales the whole loss there"),
        ("loss_type='luspo', entropy_coef=0.01", "the entropy bonus is a mean over tokens there"),
        ("loss_type='vespo', use_vllm=True", "as there, but vllm_importance_sampling_clip_max"),
        ("loss_type='grpo', mask_truncated_completions=True", "divides by all completions there"),
        ("importance_sampling_level='sequence', top_entropy_quantile=0.5", "counts for the whole completion there"),
        (
            "importance_sampling_level='sequence', use_vllm=True, vllm_importance_sampling_mode='token_truncate'",
            "counts for the whole completion there",
        ),
        ("entropy_coef=0.01, top_entropy_quantile=0.5", "the tokens that top_entropy_quantile keeps"),
        ("loss_type='grpo', entropy_coef=0.01", "the entropy bonus is a mean over tokens there"),
        ("max_steps=N", "max_steps = N does not stand in the script"),
        ("", "--no_apply_chat_template"),
        ("", "more than 1,024 tokens"),
    ],
)
def test_what_differs_is_said(tmp_path, given, says):
    command, _ = one(tmp_path, given)
    assert any(says in line for line in command.said), command.text()


@pytest.mark.parametrize(
    "more, wanted, says",
    [
        ("peft_config=LoraConfig(r=16, lora_dropout=.1)", dict(use_peft=True, lora_r=16, lora_alpha=8), "lora_dropout"),
        ("peft_config=LoraConfig(target_modules='all-linear')", dict(lora_targets=["all-linear"], lora_r=8), None),
        ("peft_config=LoraConfig(target_modules=f(4))", dict(use_peft=True), "f(4): give --lora_targets"),
        ("peft_config=made()", dict(use_peft=False), "is no LoraConfig(...) of this script"),
        ("peft_config=LoraConfig(target_modules=r'.*[qv]_proj')", dict(lora_targets=[".*[qv]_proj"]), None),
        ("train_dataset=load_dataset('a/b', 'c', split='train[:9]')",
         dict(dataset_id="a/b", dataset_config="c", dataset_split="train[:9]"), None),
        ("train_dataset=load_dataset('json', data_files='x.jsonl')['train']", dict(dataset_id="x.jsonl"), None),
        ("train_dataset=load_dataset('csv', data_files='x.csv')", dict(dataset_id="x.csv"), "every value is a text"),
        ("train_dataset=load_dataset('a/b', None, split='test', num_proc=8)",
         dict(dataset_id="a/b", dataset_config=None, dataset_split="test"), None),
        ("train_dataset=load_dataset('a/b').map(f)", dict(dataset_id="rows.py:train_dataset"), "put it into rows.py"),
        ("environment_factory=E", dict(env="environments.py:E", reward_funcs=["F:reward"]), "whether E has get_reward"),
        ("tools=[reward, math.sqrt]", dict(tools=["F:reward", "tools.py:sqrt"]), "a name at the top of tools.py"),
        ("tools=some()", dict(tools=[]), "give --tools"),
        ("callbacks=[Mine()]", {}, "the loop is train()"),
        ("eval_dataset=load_dataset('a/b', split='test')", dict(eval_dataset_id=None), "without an eval_strategy"),
    ],
)  # fmt: skip
def test_what_the_trainer_is_given_becomes_ours(tmp_path, more, wanted, says):
    command, cfg = one(tmp_path, more=more)
    found = {name: getattr(cfg, name) for name in wanted}
    assert json.loads(json.dumps(found).replace(f"{tmp_path}/mine.py", "F")) == wanted
    assert says is None or any(says in line for line in command.said), command.text()


@pytest.mark.parametrize(
    "call",
    [
        "load_dataset('json', data_files={'train': 'rows.jsonl'})",
        "load_dataset('json', data_files=['a.jsonl', 'b.jsonl'])",
        "load_dataset('json', data_files='part-*.jsonl')",
        "load_dataset('json', data_files='https://host/a.jsonl')",
        "load_dataset('json', data_files='x.jsonl', split='train[:9]')",
        "load_dataset('text', data_files='x.txt')",
        "load_dataset('csv', data_dir='data')",
        "load_dataset('csv', None, 'data')",
        "load_dataset('org/name', data_files='hard.parquet')",
        "load_dataset('org/name', revision='v2')",
        "load_dataset('org/name', name=made())",
        "load_dataset('org/name', **more)",
        "load_dataset('org/name')[made()]",
        "load_dataset('org/name', split='train')[:9]",
    ],
)
def test_data_that_no_flag_names_come_from_a_function(tmp_path, call):
    command, cfg = one(tmp_path, more=f"train_dataset={call}")
    assert (cfg.dataset_id, cfg.dataset_config, cfg.dataset_split) == ("rows.py:train_dataset", None, "train")
    assert any("put it into rows.py" in line for line in command.said), command.text()


@pytest.mark.parametrize(
    "evaluated, wanted, says",
    [
        ("'a/b', 'c'", ("a/b", "c", "a/b"), None),
        ("'a/b', 'd'", ("rows.py:train_dataset", None, "rows.py:eval_dataset"), "--dataset_config is one for both"),
        ("'json', data_files='x.jsonl'", ("rows.py:train_dataset", None, "rows.py:eval_dataset"), "is one for both"),
    ],
)
def test_data_sets_of_two_configurations_come_from_functions(tmp_path, evaluated, wanted, says):
    more = f"train_dataset=load_dataset('a/b', 'c', split='x'), eval_dataset=load_dataset({evaluated}, split='train')"
    command, cfg = one(tmp_path, "eval_strategy='steps', eval_steps=5", more)
    assert (cfg.dataset_id, cfg.dataset_config, cfg.eval_dataset_id) == wanted
    assert says is None or any(says in line for line in command.said), command.text()


@pytest.mark.parametrize(
    "factory, counts",
    [
        ("Paid", True),
        ("Child", True),
        ("lambda: Paid(3)", True),
        ("partial(Paid, size=3)", True),
        ("{'a': Unpaid, 'b': Paid}", True),
        ("Unpaid", False),
        ("{'a': Unpaid}", False),
        ("Foreign", None),
        ("make", None),
    ],
)
def test_a_reward_of_the_environment_counts_last_and_with_a_weight_of_1(tmp_path, factory, counts):
    classes = "class Paid:\n    def get_reward(self): ...\n\nclass Child(Paid): ...\n\nclass Unpaid:\n    x = 1\n"
    classes += "class Foreign(elsewhere.Env): ...\n\ndef make():\n    return Paid()\n"
    call = f"GRPOTrainer('m', reward, GRPOConfig(reward_weights=[2.0]), environment_factory={factory})"
    (command,) = commands(tmp_path, classes + call)
    cfg = parsed(command)
    assert (
        cfg.reward_funcs[1:] == ["environment"] * bool(counts) and cfg.reward_weights == [2.0, 1.0][: 1 + bool(counts)]
    )
    assert any("get_reward" in line for line in command.said) == (counts is not False), command.text()


SUBCLASS = """class Mine(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, inputs)

    def my_own(self): ...

class Mine2(Mine): ...

"""


@pytest.mark.parametrize(
    "made, says",
    [
        ("Mine('m', reward, config, peft_config=LoraConfig(r=4), callbacks=[x])", "line 8, Mine: its _compute_loss"),
        ("Mine2('m', reward, config, peft_config=LoraConfig(r=4), callbacks=[x])", "line 8, Mine: its _compute_loss"),
    ],
)
def test_a_subclass_of_a_trainer_is_read_as_one_and_what_it_overrides_is_named(tmp_path, made, says):
    body = f"{SUBCLASS}config = GRPOConfig(beta=0.5, reward_weights=[0.5], sync_ref_model=True)\n{made}"
    (command,) = commands(tmp_path, body)
    cfg = parsed(command)
    assert (cfg.model_id, cfg.reward_weights, cfg.lora_r, cfg.ref_sync_steps) == ("m", [0.5], 4, None), command.text()
    text = command.text()
    assert says in text and "own_term" in text and "callbacks" in text and "my_own: not read" in text


def test_arguments_that_a_subclass_passes_on_itself_are_named(tmp_path):
    body = (
        "class Mine(trl.GRPOTrainer):\n    def __init__(self, config):\n        super().__init__('m', reward, config)\n"
    )
    (command,) = commands(tmp_path, f"{body}\nMine(GRPOConfig(beta=0.5))")
    assert parsed(command).beta == 0.5
    assert any("Mine: has an __init__ of its own" in line for line in command.said), command.text()


def test_arguments_that_trl_does_not_have_are_named(tmp_path):
    body = "class Mine(GRPOTrainer):\n    def __init__(self, model, rewards, config, dataset, weight):\n        ...\n"
    (command,) = commands(tmp_path, f"{body}\nMine('m', [reward], GRPOConfig(beta=0.5), rows, weight=0.7)")
    said = "\n".join(command.said)
    assert parsed(command).beta == 0.5 and "rewards = [reward], dataset = rows, weight = 0.7" in said, said
    assert "give --reward_funcs" in said and "give --dataset_id" in said


@pytest.mark.parametrize("trainer", ["GRPOTrainer", "AsyncGRPOTrainer"])
def test_every_argument_of_a_trainer_has_its_place(tmp_path, trainer):
    places = from_trl.ARGUMENTS[trainer]
    given = ["None"] * places.index("callbacks") + ["[Stop()]"]
    given[places.index("args")] = trainer.replace("Trainer", "Config") + "()"
    (command,) = commands(tmp_path, f"{trainer}({', '.join(given)})", imports="*")
    assert any("callbacks = [Stop()]" in line for line in command.said), command.text()
    assert not any("eval_dataset = None" in line for line in command.said), command.text()


def test_fields_of_a_config_behind_a_parser_are_read(tmp_path):
    body = (
        "@dataclass\nclass C(GRPOConfig):\n    beta: float = 0.5\n    epsilon = 0.1\n    def __post_init__(self): ...\n"
    )
    (command,) = commands(
        tmp_path, f"{body}\nc, = TrlParser((C,)).parse_args_and_config()\nGRPOTrainer('m', reward, c)"
    )
    cfg = parsed(command)
    assert (cfg.beta, cfg.epsilon) == (0.5, 0.2)  # a field without annotation is none of a dataclass
    assert any("C: its __post_init__ is not read" in line for line in command.said), command.text()


def test_fields_of_a_subclass_of_a_config_are_read(tmp_path):
    body = "@dataclass\nclass C(GRPOConfig):\n    beta: float = 0.5\n    epsilon: float = 0.1\n    own: int = 3\n\n"
    (command,) = commands(tmp_path, f"{body}GRPOTrainer('m', reward, C(epsilon=0.3))")
    assert (parsed(command).beta, parsed(command).epsilon) == (0.5, 0.3)
    assert any("own = 3" in line for line in command.said), command.text()


def test_what_comes_without_a_trainer_is_named(tmp_path):
    (command,) = commands(tmp_path, "make_trainer(GRPOConfig(reward_weights=[1.0, 0.5]))")
    assert any("reward_weights = [1.0, 0.5]" in line and "--reward_weights" in line for line in command.said)


def test_an_environment_alone_rewards(tmp_path):
    (command,) = commands(tmp_path, "GRPOTrainer('m', environment_factory=E)")
    assert parsed(command).reward_funcs == ["environment"]


@pytest.mark.parametrize(
    "imports, body",
    [
        ("GRPOConfig as C, GRPOTrainer as T", "T(args=C(beta=0.5), model='m', reward_funcs=[reward])"),
        ("GRPOTrainer", "import trl\nGRPOTrainer(args=trl.GRPOConfig(beta=0.5), model='m', reward_funcs=[reward])"),
        ("GRPOTrainer", "import trl as t\nt.GRPOTrainer[int]('m', reward, t.trainer.GRPOConfig[int](beta=0.5))"),
        ("GRPOConfig, GRPOTrainer", "B = 0.5\nc: GRPOConfig = GRPOConfig(beta=B)\nGRPOTrainer('m', reward, c)"),
        ("GRPOConfig, GRPOTrainer", "c = GRPOConfig(beta=0.5)\nc = c\nGRPOTrainer('m', reward, c)"),
        ("GRPOTrainer", "parser = TrlParser(GRPOConfig)\nc, = parser.parse()\nGRPOTrainer('m', reward, c)"),
    ],
)
def test_a_config_is_found_however_it_is_spelled(tmp_path, imports, body):
    own = ["--beta", "0.5"] if "Parser" in body else []
    (command,) = commands(tmp_path, body, imports=imports, flags=own)
    assert parsed(command).beta == 0.5 and parsed(command).model_id == "m"


@pytest.mark.parametrize(
    "before, arguments, wanted, says",
    [
        ("kwargs = dict(beta=0.0)\nkwargs.update(beta=.04)", "**kwargs", {}, "**kwargs: what is in it does not"),
        ("kwargs = dict(beta=0.0)\nkwargs['beta'] = .04", "**kwargs", {}, "**kwargs: what is in it does not"),
        ("targets = [2]\nfill(targets)\ntargets[0] = 3", "reward_weights=targets", {}, "reward_weights = targets does"),
        ("beta = 0.5\nbeta += 1", "beta=beta", {}, "beta = beta does not"),
        ("rates = [beta for beta in (1, 2)]\nbeta = 0.5", "beta=beta", dict(beta=0.5), None),
        ("def g():\n    beta = 0.1\nbeta = 0.5", "beta=beta", dict(beta=0.5), None),
        ("name = 'a/b'\nprint(name.split('/'))", "run_name=name", dict(run_name="a_b"), None),
    ],
)
def test_a_value_that_is_changed_afterwards_is_not_read(tmp_path, before, arguments, wanted, says):
    (command,) = commands(tmp_path, f"{before}\nGRPOTrainer('m', reward, GRPOConfig({arguments}))")
    cfg = parsed(command)
    assert {name: getattr(cfg, name) for name in wanted} == wanted
    assert cfg.beta == wanted.get("beta", 0) and (says is None or any(says in line for line in command.said))


def test_a_parameter_is_not_what_another_name_like_it_is(tmp_path):
    body = "def go(rate):\n    GRPOTrainer(model, reward, GRPOConfig(learning_rate=rate))\nrate = 1e-5\ngo(3e-5)"
    (command,) = commands(tmp_path, body)
    assert parsed(command).learning_rate == 1e-6
    assert any("learning_rate = rate does not stand in the script" in line for line in command.said)


def test_rewards_that_are_added_to_a_list_are_not_read(tmp_path):
    (command,) = commands(tmp_path, "r = [reward]\nr.append(g)\nGRPOTrainer('m', r, GRPOConfig())")
    assert "--reward_funcs" not in command.words()
    assert any("reward_funcs = r does not stand in the script: give --reward_funcs" in line for line in command.said)


@pytest.mark.parametrize(
    "change, wanted, says",
    [
        ("args.learning_rate = 5e-5\nargs.num_iterations = 4", (5e-5, 4), None),
        ("same = args\nsame.num_iterations = 4", (1e-6, 4), None),
        ("args.learning_rate = rate()", (1e-6, 1), "learning_rate = rate() does not stand in the script"),
        ("if x:\n    args.learning_rate = 5e-5", (1e-6, 1), "line 10, args.learning_rate = 5e-05, is not read"),
        ("args.learning_rate *= 2", (1e-6, 1), "args.learning_rate *= 2, is not read"),
        ("setattr(args, 'beta', .1)", (1e-6, 1), "setattr(args, 'beta', 0.1), is not read"),
        ("args.set_lr_scheduler('cosine')", (1e-6, 1), "args.set_lr_scheduler('cosine'), is not read"),
        ("args = dataclasses.replace(args, beta=.1)", (1e-6, 1), "args = args is taken to be GRPOConfig of line 8"),
        ("args = TrlParser(GRPOConfig).parse()[0]\nargs.num_iterations = 4", (1e-6, 4), "is taken to be GRPOConfig"),
    ],
)
def test_what_is_set_on_a_config_counts_or_is_named(tmp_path, change, wanted, says):
    body = f"args = GRPOConfig(learning_rate=1e-6)\n{change}\nGRPOTrainer('m', reward, args)"
    (command,) = commands(tmp_path, body)
    cfg = parsed(command)
    assert (cfg.learning_rate, cfg.num_iterations) == wanted
    assert says is None or any(says in line for line in command.said), command.text()


def test_what_is_set_on_a_config_of_a_command_line_counts(tmp_path):
    body = "_, args = parser.parse_args_and_config()\nargs.beta = 0.5\nGRPOTrainer('m', reward, args)\nargs.seed = 3"
    (command,) = commands(tmp_path, body, flags=["--beta", "0.1", "--num_iterations", "2"])
    assert (parsed(command).beta, parsed(command).num_iterations, parsed(command).seed) == (0.5, 2, 42)
    assert any("args.seed = 3, is not read" in line for line in command.said)


def test_arguments_of_a_trainer_that_are_not_seen_are_named(tmp_path):
    (command,) = commands(tmp_path, "kw = dict(model='m')\nkw['tools'] = [f]\nGRPOTrainer(args=GRPOConfig(), **kw)")
    assert any(line.startswith("** = kw: ") for line in command.said)


def test_several_configs_give_several_commands(tmp_path):
    body = "a, b = GRPOConfig(beta=0.1), AsyncGRPOConfig(max_staleness=2)\n"
    body += "first = GRPOConfig(beta=0.2)\nsecond = AsyncGRPOConfig(weight_sync_steps=2, token_budget=4096)\n"
    body += "GRPOTrainer('x', reward, first)\nAsyncGRPOTrainer('y', reward, second)"
    found = commands(tmp_path, body, imports="*")
    assert [c.script for c in found] == ["train_grpo.py", "train_async.py", "train_grpo.py", "train_async.py"]
    configs = [parsed(c) for c in found]
    assert [c.beta for c in configs] == [0.1, 0, 0.2, 0] and configs[2].model_id == "x"
    assert configs[3].model_id == "y" and configs[3].push_steps == 2 and configs[3].tokens_per_microbatch == 4096
    assert found[1].flags["max_staleness"] == 2 and found[3].flags["max_staleness"] == 4
    assert configs[3].max_completion_length == 2048 and configs[3].generator == "vllm"


def test_a_script_is_read_and_not_run(tmp_path):
    """Importing it later would train: then functions have to move, which is said."""
    (tmp_path / "top.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom trl import GRPOConfig, GRPOTrainer\n"
        "def f(completions, **_): ...\nGRPOTrainer('m', f, GRPOConfig()).train()\n",
        encoding="utf-8",
    )
    (command,) = from_trl.commands(tmp_path / "top.py")
    assert parsed(command).reward_funcs == ["rewards.py:f"] and not (tmp_path / "ran").exists()
    assert any("trains when it is imported" in line for line in command.said)


@pytest.mark.parametrize(
    "content, says",
    [
        (b"def f(:\n", "line 1: no python that can be read (invalid syntax"),
        (b"print(1)\n", "no call of GRPOConfig, AsyncGRPOConfig or their trainers was found"),
        (b"", "no call of GRPOConfig"),
        (b"\xff\xfe\x00", "no python that can be read"),
        (b"x = 1\0", "no python that can be read"),
        (b"x = " + b"(" * 5000 + b"1", "no python that can be read"),
        (None, "cannot be read (No such file or directory)"),
        ("folder", "cannot be read (Is a directory)"),
    ],
)
def test_what_is_no_script_of_trl_is_named(tmp_path, capsys, content, says):
    path = tmp_path / "bad.py"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    assert from_trl.main([str(path)]) == 2
    told = capsys.readouterr().err
    assert str(path) in told and says in told and "Traceback" not in told


ODD = st.sampled_from(
    "0 -1 1 3 2.5 1e9 1e-9 1e400 None True False 'none' 'x' '' [] [1] {} {'a':1} {1:2} (1,) -True f(1) x 2**9 1/0 "
    "10**99 1j b'x' {'a':[1]} lambda:1 ... 'sequence' 'constant' 'dapo' float('nan')".split()
)


@pytest.mark.in_turn
@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.sampled_from(sorted(FIELDS["GRPOConfig"])), ODD, max_size=8), st.integers(1, 9))
@example({"reward_weights": "-1"}, 1)
@example({"report_to": "True"}, 1)
def test_whatever_a_script_says_there_is_a_command_or_a_word(tmp_path_factory, given, processes):
    arguments = ", ".join(f"{name}={value}" for name, value in given.items())
    body = f"GRPOTrainer('m', reward, GRPOConfig({arguments}))"
    (command,) = commands(tmp_path_factory.getbasetemp(), body, processes)
    if not any("refuses this" in line for line in command.said):
        parsed(command)


# ---- learning rate --------------------------------------------------------------------------------------------------

ARGUMENTS = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-7},
    "warmup_stable_decay": {"num_decay_steps": 8},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"power": 2.0},
    "cosine": {"num_cycles": 1.5},
}


@pytest.mark.parametrize("name", [each.value for each in SchedulerType])
def test_a_schedule_of_transformers_gives_its_rates_whatever_comes_first(name):
    """As its scheduler gives step by step; here from the number alone, as a resumed run asks for them."""
    cfg = TrainConfig(
        lr_schedule=name, lr_scheduler_kwargs=ARGUMENTS.get(name), warmup_steps=3, learning_rate=1e-5,
        max_steps=10, num_minibatches=2, prompts_per_step=4,
    )  # fmt: skip
    if name in ("reduce_lr_on_plateau", "greedy"):
        with pytest.raises(ConfigError, match="follows a metric.*take another schedule"):
            optimizers.check_optimisation(cfg)
        return
    optimizers.check_optimisation(cfg)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-5)
    schedule = get_scheduler(name, optimizer, 6, 20, scheduler_specific_kwargs=ARGUMENTS.get(name))
    wanted = []
    for _ in range(20):
        wanted.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    ours = {"constant": [1e-5 * min((u + 1) / 6, 1) for u in range(20)]}
    ours["linear"] = [1e-5 * (u + 1) / 6 if u < 6 else wanted[u] for u in range(20)]
    found = {update: script.lr_at(update, cfg) for update in reversed(range(20))}
    assert [found[u] for u in range(20)] == pytest.approx(ours.get(name, wanted), rel=1e-9, abs=1e-20)


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--warmup_steps 3 --warmup_ratio 0.1", "--warmup_steps=3 and --warmup_ratio=0.1"),
        ("--warmup_steps -1", "--warmup_steps=-1: must be 0 or more"),
        ("--lr_schedule cosinus", "unknown name 'cosinus'.*Did you mean 'cosine'"),
        ("--lr_schedule cosine_with_min_lr", "--lr_schedule=cosine_with_min_lr.*min_lr"),
        ("--lr_schedule linear --lr_scheduler_kwargs {\"power\":2}", "power"),
        ("--lr_scheduler_kwargs {\"min_lr_rate\":0.1}", "--lr_schedule constant takes none. Name the schedule"),
        ("--lr_schedule polynomial --lr_scheduler_kwargs {\"lr_end\":1}", "lr_end"),
        ("--lr_schedule polynomial --lr_scheduler_kwargs power", "--lr_scheduler_kwargs=power: expected.*JSON"),
        ("--lr_schedule polynomial --lr_scheduler_kwargs [1]", "expected.*JSON"),
        ("--lr_schedule warmup_stable_decay --lr_scheduler_kwargs {\"num_decay_steps\":\"x\"}", "warmup_stable_decay"),
        ("--lr_schedule polynomial --lr_scheduler_kwargs {\"lr_end\":-1}", "must be 0 or more"),
        ("--adam_epsilon -1", "--adam_epsilon=-1.0: must be 0 or more"),
        ("--optim AdamX", "--optim: unknown name 'AdamX'.*Did you mean"),
        ("--optim adafactor", "transformers' adafactor is not torch's"),
        ("--optim LBFGS", "--optim=LBFGS: its step asks for the loss"),
        ("--optim SGD --adam_beta2 0.95", "--adam_beta2=0.95: SGD of --optim takes none"),
        ("--optim Rprop --weight_decay 0.1", "--weight_decay=0.1: Rprop of --optim takes none"),
    ],
)  # fmt: skip
def test_mistakes_in_schedule_and_optimizer_are_named_before_anything_is_touched(flags, says):
    with pytest.raises(ConfigError, match=says):
        optimizers.check_optimisation(load_config(TrainConfig, flags.split()))


def test_a_warm_up_in_steps_counts_steps():
    cfg = TrainConfig(learning_rate=1.0, warmup_steps=2, max_steps=5, num_iterations=2)
    assert [script.lr_at(u, cfg) for u in range(10)] == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]
    assert script.lr_at(0, dataclasses.replace(cfg, warmup_steps=0)) == 1


@pytest.mark.parametrize(
    "flags, depends",
    [({}, False), (dict(warmup_steps=3), False), (dict(lr_schedule="linear"), True), (dict(warmup_ratio=0.5), True),
     (dict(lr_schedule="inverse_sqrt"), False), (dict(lr_schedule="polynomial"), True)],
)  # fmt: skip
def test_more_steps_are_a_difference_where_the_learning_rate_asks_for_them(flags, depends):
    cfg = TrainConfig(max_steps=20, **flags)
    assert resume.rates_differ(10, 2, cfg, script.lr_at) == depends


# ---- optimizers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, kind", [("adamw_torch_fused", "AdamW"), ("sgd", "SGD"), ("NAdam", "NAdam")])
def test_an_optimizer_by_name_is_the_one_torch_makes(name, kind):
    cfg = TrainConfig(optim=name, learning_rate=0.1, weight_decay=0.2)
    updated = []
    for make in (
        lambda p: script.make_optimizer(p, cfg),
        lambda p: getattr(torch.optim, kind)(
            p.parameters(), lr=0.1, weight_decay=0.2, **({"betas": (0.9, 0.99)} if "Adam" in kind else {})
        ),
    ):
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 4)
        optimizer = make(module)
        for _ in range(3):
            module(torch.ones(4)).square().sum().backward()
            optimizer.step()
        updated.append(module.weight)
    assert type(script.make_optimizer(module, cfg)).__name__ == kind and torch.allclose(*updated, atol=1e-6)


@pytest.mark.in_turn
@pytest.mark.parametrize("strategy, ranks", [("ddp", 2), ("fsdp", 2), ("fsdp2", 2)])
def test_an_optimizer_goes_on_as_it_was_or_is_refused_at_start(tmp_path, strategy, ranks):
    """All that torch has, and bitsandbytes where it is installed: saved, loaded, two updates more, bit for bit."""
    with running(
        trainer(tmp_path / "log", str(tmp_path / "out"), "--strategy", strategy, ranks=ranks,
                script="tests/saved_optimizer_worker.py")
    ) as w:  # fmt: skip
        assert w.end() == 0, w.text
    found = json.loads((tmp_path / "out").read_text(encoding="utf-8"))
    assert not [name for name, said in found.items() if "differ" in said], found
    refused = {"LBFGS", "Muon", "SparseAdam"}
    refused |= {"fsdp": {"Adafactor"}, "fsdp2": {"Adafactor", "Rprop"}}.get(strategy, set())
    theirs = {
        n for n, kind in vars(torch.optim).items() if isinstance(kind, type) and kind is not torch.optim.Optimizer
    }
    assert {name for name, said in found.items() if said != "the same"} & theirs == refused, found
    assert found["saved before the first update"] == found["other settings"] == "the same", found
    assert all(f"--optim={name}" in found[name] for name in refused)


# ---- completions ----------------------------------------------------------------------------------------------------


def test_unique_prompts_alone_are_written(tmp_path):
    (tmp_path / "even.py").write_text(EVEN, encoding="utf-8")
    flags = [*SMALL.split(), "--reward_funcs", f"{tmp_path}/even.py:even", "--max_steps", "2", "--num_generations", "2"]
    flags += ["--log_unique_prompts", "--optim", "sgd", "--lr_schedule", "polynomial", "--warmup_steps", "1"]
    with running(trainer(tmp_path / "log", *flags, "--output_dir", str(tmp_path), "--run_name", "r")) as run:
        assert run.end() == 0, run.text
    for step in (1, 2):
        prompts = pyarrow.parquet.read_table(tmp_path / f"r/completions/step_{step:06d}.parquet")["prompt"].to_pylist()
        assert len(prompts) == len(set(map(str, prompts))) == 4
    lines = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["lr"] for line in lines if "lr" in line] == [0.0, 1e-3]


# ---- rewards and tools, as they are ---------------------------------------------------------------------------------

TOOLS = '''
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: first
        b: second
    """
    return a * b


async def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: first
        b: second
    """
    return a + b


class Steps:
    def reset(self, **kwargs):
        self.count = 0

    def step(self, by: int) -> int:
        """Goes on.

        Args:
            by: how far
        """
        self.count += by
        return self.count

    def get_reward(self):
        return float(self.count)
'''


def test_the_three_kinds_of_tools_run_as_they_are(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TOOLS, encoding="utf-8")
    cfg = config(
        env=f"{path}:Steps", tools=[f"{path}:multiply", f"{path}:add"], reward_funcs=["environment"], max_turns=6
    )
    calls = [("multiply", {"a": 6, "b": 7}), ("add", {"a": 1, "b": 2}), ("step", {"by": 5})]
    turns = [f"<tool_call>{json.dumps({'name': n, 'arguments': a})}</tool_call>" for n, a in calls] + ["Done."]
    generator = Scripted(tokenizer_of("qwen2_5"), turns)
    row = {"prompt": [{"role": "user", "content": "Go."}]}
    trajectory = asyncio.run(play(row, 0, environment_maker(cfg)(), generator, cfg))
    text = generator.tokenizer.decode(trajectory.token_ids)
    assert all(f"\n{result}\n" in text for result in (42, 3, 5)), text
    functions = rewards.get_reward_functions(cfg)
    asyncio.run(rewards.score([trajectory], functions, cfg))
    assert sum(trajectory.token_rewards) == 5
