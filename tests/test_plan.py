"""Will it fit: what memory.py says against the bytes of real updates; what plan.py says to type can be typed."""

import json
import os
import re
import shlex
from dataclasses import replace
from random import Random
from unittest import mock

import pytest
import tiny_vlms
import torch
from families import saved
from live import running, trainer
from memory_worker import predicted

import memory
import plan
import train_ppo
from batch import Batch
from config import ConfigError, TrainConfig, check, load_config
from inputs.packing import micro_batches, pack
from train_grpo import empty_policy, load_policy

pytestmark = pytest.mark.in_turn

SHAPE = dict(vocab_size=4000, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8)
SHAPE |= dict(num_key_value_heads=2, tie_word_embeddings=False, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
FLAGS = "--prompts_per_step 4 --num_generations 4 --max_prompt_length 64 --max_completion_length 64 --push_bucket_mb 1 "
FLAGS += "--tokens_per_microbatch 291 --logprob_chunk 64 --lora_r 8"  # a group has 320, which are 291 and a tenth


@pytest.mark.parametrize("strategy, ranks", [("ddp", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)])
def test_predicted_bytes_are_those_of_a_real_update(strategy, ranks, tmp_path):
    """All weights and LoRA, with and without gradient checkpointing, with a critic, offloaded: within a tenth."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    words = ["--model_id", str(tmp_path), "--strategy", strategy, *FLAGS.split()]
    out = tmp_path / "measured.json"
    with running(trainer(tmp_path / "log", str(out), *words, ranks=ranks, script="tests/memory_worker.py")) as worker:
        assert worker.end() == 0, worker.text
    wrong = []
    for more, critic, measured in json.loads(out.read_text(encoding="utf-8")):
        cfg = replace(load_config(TrainConfig, words), **more)
        for what, size in predicted(cfg, ranks, critic).items():
            error = size / measured[what] - 1
            print(f"{strategy} x {ranks} {more} {critic=} {what}: {size} {measured[what]} {error:+.1%}")
            wrong += [(more, critic, what, error)] * (abs(error) > 0.1)
    assert not wrong


def test_measured_rates_are_taken_and_named(tmp_path, capsys, monkeypatch):
    """From the file that is given, or from the usual place; what the command line says wins over it."""
    measured, words = tmp_path / "rates.json", "--model_id models/tiny --gpus 2 --gpu_memory 8".split()
    measured.write_text('{"measured on": "X1", "tflops": 123.5, "link_bandwidth": 9}', encoding="utf-8")
    monkeypatch.setattr(plan, "MEASURED", tmp_path / "none")
    assert load_config(plan.PlanConfig, words).tflops == 350
    cfg = load_config(plan.PlanConfig, [*words, "--rates", str(measured), "--link_bandwidth", "7"])
    assert (cfg.tflops, cfg.link_bandwidth, cfg.memory_bandwidth) == (123.5, 7, 2000)
    plan.main(cfg)
    assert f"Measured on X1 ({measured}): --tflops 123.5\n" in capsys.readouterr().out
    monkeypatch.setattr(plan, "MEASURED", measured)
    assert load_config(plan.PlanConfig, words).link_bandwidth == 9
    measured.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="--rates=.*gpu_check.sh"):
        load_config(plan.PlanConfig, words)


@pytest.mark.parametrize("shared", [True, False])
def test_the_largest_pass_is_counted(shared):
    """Whatever the lengths of a step, no pass has more than the one that memory.py counts."""
    most = 0
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        cfg = TrainConfig(prompts_per_step=8, num_generations=4, max_prompt_length=40, max_completion_length=200)
        cfg = replace(cfg, tokens_per_microbatch=500 + 50 * seed, shared_prefix=shared)
        inputs, rows, *_ = memory.longest_pass(cfg)
        counted = inputs["input_ids"].numel()
        lengths = torch.randint(41, 241, (32, 1), generator=random).clamp(max=40 + 20 * seed)
        there, tokens = (torch.arange(240) < lengths).float(), torch.arange(240)
        groups = torch.arange(32) // 4
        batch = Batch(groups[:, None] + tokens, there, there * (tokens >= 40), torch.zeros(32, 240), groups)
        passes = [pack(batch.select(rows), cfg)[0]["input_ids"] for rows in micro_batches(batch, cfg)]
        sizes = [ids.shape[-1] if shared else ids.numel() for ids in passes]
        assert max(sizes) <= counted <= cfg.tokens_per_microbatch * 1.1 and len(rows)
        most = max(most, max(sizes) / counted)
    assert most > 0.95


@pytest.mark.parametrize("shared", [True, False])
def test_as_few_groups_as_fill_a_pass_are_looked_at(shared):
    """Else the same pass is counted anew for each number of ranks: seconds each, of a model of 7B."""
    for seed in range(40):
        random = Random(seed)
        sizes = dict(prompts_per_step=random.choice([1, 8, 256]), num_generations=random.choice([1, 4, 16]))
        sizes |= dict(max_prompt_length=random.choice([1, 300]), max_completion_length=random.choice([1, 200, 5000]))
        cfg = TrainConfig(**sizes, tokens_per_microbatch=random.choice([64, 3000, 16384]), shared_prefix=shared)
        (inputs, *where), (fewer, *there) = memory.longest_pass(cfg), memory.longest_pass(memory.one_rank(cfg, 1))
        assert all(torch.equal(inputs[key], fewer[key]) for key in inputs if torch.is_tensor(inputs[key]))
        assert all(map(torch.equal, where, there))
    cfg = TrainConfig(prompts_per_step=64, num_generations=8, max_prompt_length=512, shared_prefix=shared)
    sampled_here = replace(cfg, generator="hf")
    assert memory.one_rank(cfg, 4) == memory.one_rank(cfg, 8) == memory.one_rank(sampled_here, 2)


MORE = ["", "--use_peft --strategy fsdp2 --num_generations 4", "--overlap --server_gpus 2", "--critic"]
MORE += ["--use_peft --load_in 4bit --dtype bfloat16"]


@pytest.mark.parametrize("more", MORE)
def test_what_is_said_to_type_can_be_typed(more, capsys, tmp_path):
    """Server and trainer take the lines, the trainer for that number of ranks."""
    from vllm_server import parse_command_line

    words = f"--model_id models/tiny --prompt 20 --completion 30 --gpus 8 --gpu_memory 8 {more}".split()
    assert plan.main(load_config(plan.PlanConfig, words)) == 0
    printed = capsys.readouterr().out
    *servers, last = printed[printed.index("export VLLM_SERVER_TOKEN") :].splitlines()[1:]
    if "4bit" in more:
        assert servers.pop(0) == "python scripts/unpacked.py models/tiny unpacked"
    for line in servers:
        args, rest = parse_command_line(shlex.split(line.removesuffix("&"))[3:])
        assert args.model == ("unpacked" if "4bit" in more else "models/tiny")
        assert rest[:2] == ["--max-model-len", str(1024 + 512)] and ("--enable-lora" in rest) == ("--use_peft" in more)
    visible, _, ranks, script, *flags = shlex.split(last)
    cfg = load_config(train_ppo.TrainConfig if "--critic" in more else TrainConfig, flags)
    check(cfg, int(ranks.split("=")[1]))
    assert len(cfg.server_urls) == len(servers) and cfg.tokens_per_microbatch and cfg.gradient_checkpointing
    assert script == {"--overlap": "train_async.py", "--critic": "train_ppo.py"}.get(more[:9].strip(), "train_grpo.py")
    assert ("\n  critic " in printed) == ("--critic" in more) == (cfg.advantage == "gae") and cfg.num_generations > 1
    assert cfg.use_peft == ("--use_peft" in more) and cfg.push_lora == ("adapters" if cfg.use_peft else "auto")


def test_adapters_that_travel_alone_are_planned(capsys):
    """Their bytes are pushed, not those of a 7B; and they have slots on the server, beside its weights."""
    found = {}
    for more in ("", "--use_peft", "--use_peft --push_lora folded"):
        words = f"--model_id Qwen/Qwen2.5-7B-Instruct --gpus 8 --server_gpus 4 --tokens_per_microbatch 1024 {more}"
        assert plan.main(load_config(plan.PlanConfig, words.split())) == 0
        printed = capsys.readouterr().out
        step = printed[printed.index("Step of") :]
        pushed = re.search(r"push +([0-9.]+) s", step)
        weights = re.search(r"weights +([0-9.]+) GiB a GPU", printed)
        found[more] = [float(match[1]) for match in (pushed, weights)]
    (whole, bare), (alone, beside), folded = found.values()
    assert folded == [whole, bare] and alone < 0.05 * whole and bare < beside < bare + 1


@pytest.mark.parametrize("more", ["--gpus 16", "--gpus 64 --server_gpus 8", "--gpus 4 --node_gpus 2 --server_gpus 2"])
def test_several_machines_get_lines_of_their_own(more, capsys):
    """No machine is asked for a GPU that it lacks; all the trainer's get one line; Slurm gets as many nodes."""
    from vllm_server import parse_command_line

    words = f"--model_id models/tiny --prompt 20 --completion 30 --gpu_memory 8 {more}".split()
    cfg = load_config(plan.PlanConfig, words)
    assert plan.main(cfg) == 0
    printed = capsys.readouterr().out
    lines, slurm = printed[printed.index("export VLLM_SERVER_TOKEN") :].split("\n\nOr under Slurm")
    *servers, last = [line for line in lines.splitlines()[1:] if not line.startswith("#")]
    urls = []
    for line in servers:
        visible, *words = shlex.split(line.removesuffix("&"))
        assert all(int(gpu) < cfg.node_gpus for gpu in visible.split("=")[1].split(","))
        with mock.patch.dict(os.environ, VLLM_SERVER_TOKEN="a"):
            args, _ = parse_command_line(words[2:])
        node = lines[: lines.index(line)].rpartition("# node-")[2].split()[0]
        urls.append(f"http://node-{node}:{args.port}")
        assert args.host == "0.0.0.0"
    launcher, nodes, each, _, place, _, *flags = shlex.split(last)
    ranks = int(nodes.split("=")[1]) * int(each.split("=")[1])
    trained = load_config(TrainConfig, flags)
    check(trained, ranks)
    assert (
        trained.server_urls == urls and place == f"--rdzv_endpoint=node-{len({u.rsplit(':')[1] for u in urls})}:29500"
    )
    assert ranks + cfg.node_gpus * (len(lines.split("# node-")) - 2) == cfg.gpus
    words = shlex.split(slurm.splitlines()[-1])
    assert f"--nodes={cfg.gpus // cfg.node_gpus}" in words and f"--gpus-per-node={cfg.node_gpus}" in words
    check(load_config(TrainConfig, words[words.index("train_grpo.py") + 1 :]), ranks)


def test_rates_between_machines_make_shards_within_each_pay():
    """Gathered within one, they take a fraction of the time; the copies' gradients are added up once an update."""
    words = "--gpus 24 --strategy fsdp2 --node_bandwidth 1".split()
    cfg = replace(load_config(plan.PlanConfig, words), tokens_per_microbatch=4096)
    config = plan.model_config("Qwen/Qwen2.5-7B")
    assert [c.shard_size for c in plan.strategies(cfg, 16)] == [8, None]
    across, within = (plan.seconds(replace(cfg, shard_size=n), config, 7.6e9, 16)["update"] for n in (None, 8))
    assert within < across / 2
    assert [c.shard_size for c in plan.strategies(cfg, 8)] == [None]


@pytest.mark.parametrize("node_bandwidth, gather", [(40, 15 / 16 / 150), (3, 8 / 16 / (8 * 3))])
def test_all_network_cards_of_a_machine_carry_a_gather(node_bandwidth, gather):
    """Of 16 ranks on two machines half of the weights come from the other one, over eight cards; where these are fast,
    the links within a machine are what counts."""
    words = f"--gpus 24 --strategy fsdp2 --tflops 1e9 --node_bandwidth {node_bandwidth}".split()
    cfg = replace(load_config(plan.PlanConfig, words), prompts_per_step=16)
    config, tokens = plan.model_config("Qwen/Qwen2.5-7B"), 16 * (cfg.prompt + cfg.num_generations * cfg.completion)
    passes = -(-tokens // 16 // 16384)
    found = plan.seconds(cfg, config, 7_600_000_000, 16)["update"]  # 4 bytes gathered in two passes, 4 reduced
    assert found == pytest.approx(passes * 7.6 * 8 * gather)


def test_ranks_that_share_a_copy_can_be_given(capsys):
    """Without torchrun: the number of ranks is that of the plan, and splits that leave another one are left out."""
    words = "--model_id models/tiny --prompt 20 --completion 30 --gpu_memory 8 --strategy fsdp2 --shard_size 2".split()
    assert plan.main(load_config(plan.PlanConfig, [*words, "--gpus", "5"])) == 0
    printed = capsys.readouterr().out
    assert "--shard_size 2" in printed.splitlines()[-1] and re.findall(r"^\d +(\d) +fsdp2", printed, re.M) == ["4", "2"]
    for more in ("--gpus 4 --server_gpus 1", "--gpus 1", "--gpus 2"):
        with pytest.raises(ConfigError, match="--shard_size=2"):
            plan.main(load_config(plan.PlanConfig, [*words, *more.split()]))
    with pytest.raises(ConfigError, match="--shard_size=2 does not divide the 1 rank"):
        load_config(TrainConfig, ["--strategy", "fsdp2", "--shard_size", "2"])


def test_a_push_leaves_less_to_the_server_of_a_small_gpu():
    """A bucket with the embeddings, and those made anew, lie beside vLLM's share: 2 x 1.02 GiB of a 7B."""
    cfg = load_config(plan.PlanConfig, "--gpus 2 --prompt 500 --completion 1000".split())
    config, embeddings = plan.model_config("Qwen/Qwen2.5-7B"), 152064 * 3584
    layer = [3584 * 3584, 2 * 512 * 3584, 3584 * 3584, *[18944 * 3584] * 3]
    sizes = [embeddings, *layer * 28, embeddings]
    assert 4 * embeddings <= memory.receiving(sizes, cfg, 1) < 4 * embeddings + 2**28
    shares = {}
    for size in (24, 80):
        shares[size] = plan.serve_split(replace(cfg, gpu_memory=size), config, sizes, 1, 1, 64)["share"]
    assert shares[80] == plan.VLLM_SHARE and 0.8 < shares[24] < 0.9
    buckets = memory.bucket_bytes(sizes, cfg)
    assert buckets[0] == 2 * embeddings and memory.sending(buckets, cfg) <= 2 * max(buckets)  # two buffers
    assert memory.sending(buckets, replace(cfg, push_over="gloo")) == 0


def test_with_domains_the_file_is_to_be_given(capsys, tmp_path):
    """It has the list, which no flag can say; what is planned is beside it."""
    lists = "domains: [{name: a, max_completion_length: 600}, {name: b, env: frozenlake}]\nmax_prompt_length: 99\n"
    (tmp_path / "MIX.yaml").write_text(lists, encoding="utf-8")
    words = f"--config {tmp_path}/MIX.yaml --model_id models/tiny --gpus 2 --gpu_memory 80".split()
    assert plan.main(load_config(plan.PlanConfig, words)) == 0
    _, _, flags = capsys.readouterr().out.splitlines()[-1].partition("train_grpo.py ")
    cfg = load_config(TrainConfig, flags.replace("MIX.yaml", f"{tmp_path}/MIX.yaml").split())
    assert [own.domain for own in cfg.by_domain()] == ["a", "b"] and cfg.tokens_per_microbatch
    assert "--domains" not in flags and "_length" not in flags and cfg.max_completion_length == 600


def test_what_does_not_fit_is_said(capsys):
    """A hub id without a hub: the shape is known. 16 bytes a parameter fit neither on the GPU nor in CPU memory."""
    words = "--model_id Qwen/Qwen2.5-1.5B --gpus 2 --gpu_memory 20 --cpu_memory 20 --tokens_per_microbatch 2048".split()
    assert plan.main(load_config(plan.PlanConfig, words)) == 1
    printed = capsys.readouterr().out
    assert "1.54 B parameters" in printed and "does NOT fit" in printed and "To type" not in printed


@pytest.mark.parametrize("words", ["--gpus 0", "--server_gpus 8", "--tflops 0", "--critic --overlap"])
def test_mistakes_are_named(words):
    with pytest.raises(ConfigError, match="one each|above 0|no critic"):
        plan.main(load_config(plan.PlanConfig, words.split()))


@pytest.fixture
def wide(tmp_path):
    """Settings of the first 2 layers of Qwen2.5-7B, 1.56 B parameters, by their config alone."""
    config = plan.model_config("Qwen/Qwen2.5-7B")
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    config.save_pretrained(tmp_path)
    return TrainConfig(model_id=str(tmp_path), prompts_per_step=56, num_generations=2)


def test_what_was_left_open_is_chosen_by_the_memory_there_is(wide):
    """With less memory, fewer tokens; what was given stays."""
    sharded = replace(wide, strategy="fsdp2")
    roomy, warning = memory.settled(empty_policy, sharded, 7, 80 * memory.GIB)
    assert roomy.gradient_checkpointing and roomy.tokens_per_microbatch == 16384 and not warning
    given = replace(sharded, gradient_checkpointing=False, tokens_per_microbatch=8192)
    assert memory.settled(empty_policy, given, 7, 80 * memory.GIB) == (given, "")
    just = memory.peak(memory.rank_bytes(empty_policy, given, 7)) / (1 - memory.SPARE) + 1
    assert memory.settled(empty_policy, replace(given, tokens_per_microbatch=None), 7, just) == (given, "")


def test_without_a_gpu_all_is_as_it_was(wide):
    chosen, warning = memory.settled(empty_policy, wide, 2, None)
    assert (chosen.gradient_checkpointing, chosen.tokens_per_microbatch, warning) == (False, 16384, "")


def test_a_model_that_cannot_run_without_values_trains_all_the_same(wide):
    def by_value(cfg):
        policy = empty_policy(cfg)
        policy.register_forward_pre_hook(lambda module, inputs: inputs[1].tolist())
        return policy

    chosen, said = memory.settled(by_value, wide, 7, 80 * memory.GIB)
    assert chosen.tokens_per_microbatch == 16384 and chosen.gradient_checkpointing
    assert "cannot be told beforehand" in said


@pytest.mark.parametrize("flags", [{}, {"use_peft": True}, {"freeze_vision": True}, {"offload_activations": True}])
def test_what_is_counted_is_what_is_loaded(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("idefics3")
    tiny_vlms.make("idefics3", folder)
    cfg = TrainConfig(model_id=str(folder), generator="hf", **flags)
    loaded = load_policy(cfg, torch.device("cpu"))[1]
    with torch.device("meta"):
        empty = empty_policy(cfg)
    kinds = [{n: (p.shape, p.dtype, p.requires_grad) for n, p in each.named_parameters()} for each in (loaded, empty)]
    assert kinds[0] == kinds[1]
    assert loaded.hf_model.is_gradient_checkpointing == empty.hf_model.is_gradient_checkpointing


def test_a_strategy_that_cannot_fit_is_said_with_one_that_can(wide):
    """Replicated it takes 20 bytes a parameter, DDP's buckets among them: 29 GiB."""
    _, warning = memory.settled(empty_policy, wide, 7, 25 * memory.GIB)
    assert "--strategy ddp" in warning and "--strategy fsdp2 needs" in warning
    _, warning = memory.settled(empty_policy, wide, 7, 1 * memory.GIB)
    assert "more GPUs" in warning
    shards = replace(wide, strategy="fsdp2", gradient_checkpointing=True, tokens_per_microbatch=4096)
    just = memory.peak(memory.rank_bytes(empty_policy, shards, 7)) / (1 - memory.SPARE) + 1
    assert memory.settled(empty_policy, shards, 7, just) == (shards, "")
    assert "--offload needs" in memory.settled(empty_policy, shards, 7, just, critic=True)[1]


def test_a_teacher_in_the_process_counts_as_a_reference_does():
    """Of the same size it takes what a reference takes, sharded or not; beside one, as much again."""
    for strategy, ranks in (("ddp", 1), ("fsdp2", 4)):
        cfg = TrainConfig(model_id="models/tiny", strategy=strategy, tokens_per_microbatch=1024, max_prompt_length=64)
        cfg = replace(cfg, max_completion_length=64, gradient_checkpointing=False, prompts_per_step=8)
        alone, both, taught = (
            memory.rank_bytes(empty_policy, replace(cfg, **more), ranks)["reference"]
            for more in (dict(beta=0.1), dict(beta=0.1, teacher_id="models/tiny"), dict(teacher_id="models/tiny"))
        )
        assert alone == taught > 0 and both == 2 * alone


def test_a_mixture_is_planned_without_shards_too(tmp_path, capsys):
    """Under ddp its experts are multiplied in float32, which torch computes and does not describe."""
    saved("qwen3_moe", tmp_path)
    words = f"--model_id {tmp_path} --gpus 2 --strategy ddp --max_prompt_length 64 --max_completion_length 64"
    assert plan.main(load_config(plan.PlanConfig, words.split())) == 0
    assert "Trainer: 1 GPUs, ddp" in capsys.readouterr().out


def test_on_one_gpu_by_turns_and_alone_phases_are_not_added_up(capsys):
    """The trainer waits in CPU memory while the server samples; --generator hf samples before the update begins."""
    words = "--model_id models/tiny --use_peft --gpus 1 --gpu_memory 80 --tokens_per_microbatch 1024".split()
    ways = {way["name"]: way for way in plan.weighed(load_config(plan.PlanConfig, words)).ways}
    turns, alone = ways["server and trainer by turns"], ways["--generator hf, no server"]
    assert turns["both"] == max(turns["beside"], memory.peak(turns["need"]))
    assert alone["both"] == max(memory.kept(alone["need"]) + alone["beside"], memory.peak(alone["need"]))
    assert plan.main(load_config(plan.PlanConfig, words)) == 0
    lines = capsys.readouterr().out.splitlines()
    (server,) = (number for number, line in enumerate(lines) if "--enable-sleep-mode" in line)
    cfg = load_config(TrainConfig, shlex.split(lines[server + 1])[2:])
    assert cfg.colocate and cfg.use_peft
    for more in ("--load_in 4bit --dtype bfloat16", "--strategy fsdp2"):  # the script refuses --colocate with these
        found = plan.weighed(load_config(plan.PlanConfig, [*words, *more.split()]))
        assert "server and trainer by turns" not in [way["name"] for way in found.ways]


def test_frozen_models_are_counted_where_they_are_and_as_large_as_they_are(tmp_path):
    """Under --offload a reference lies in CPU memory, too; a teacher has layers of its own number."""
    for name, layers in (("small", 2), ("large", 40)):
        (tmp_path / name).mkdir()
        shape = SHAPE | {"num_hidden_layers": layers}
        (tmp_path / name / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    words = f"--model_id {tmp_path}/small --gpus 2 --gpu_memory 8 --tokens_per_microbatch 512".split()
    needs = []
    for more in ("--beta 0", "--beta 0.1", f"--beta 0 --teacher_id {tmp_path}/large"):
        cfg = load_config(plan.PlanConfig, [*words, *more.split()])
        needs.append(plan.weighed(replace(cfg, strategy="ddp")).best["need"])
    assert needs[2]["reference"] > 5 * needs[1]["reference"] > 0 == needs[0]["reference"]
    offloaded = [
        memory.rank_bytes(empty_policy, replace(cfg, teacher_id=None, strategy="fsdp2", offload=True, beta=beta), 2)
        for beta in (0.0, 0.1)
    ]
    assert memory.peak(offloaded[0]) == memory.peak(offloaded[1])
    assert offloaded[0]["in CPU memory"] < offloaded[1]["in CPU memory"]


def test_short_completions_of_a_long_prompt_take_its_keys_once_each_on_gpus():
    words = "--model_id models/tiny --tokens_per_microbatch 4096 --max_prompt_length 2048 --num_generations 64"
    for length, least, most in ((16, 3, 10), (2048, 1, 1.1)):
        cfg = load_config(TrainConfig, [*words.split(), "--max_completion_length", str(length)])
        cfg = memory.one_rank(replace(cfg, gradient_checkpointing=True), 1)
        peaks, _ = memory.pass_bytes(empty_policy, cfg)
        assert least <= peaks["layers on GPUs"].total() / peaks["layers"].total() < most


def test_shards_in_cpu_memory_are_blocks_of_powers_of_two():
    """So torch's allocator of pinned memory rounds each."""
    cfg = load_config(
        TrainConfig, "--model_id models/tiny --strategy fsdp2 --offload --tokens_per_microbatch 512".split()
    )
    need = memory.kept_bytes(empty_policy, [((96, 100), True, 0, False, 0, False)], cfg, 2, False)
    assert need["in CPU memory"] == 4 * (2 * 4800 + 2 * 8192)  # AdamW's, which is not pinned; weights and gradients


def test_copies_add_up_their_gradients_once_an_update():
    """Four ranks over a slow link; nothing else takes as long."""
    words = "--gpus 5 --strategy ddp --link_bandwidth 0.1 --prompts_per_step 16".split()
    cfg, config = load_config(plan.PlanConfig, words), plan.model_config("Qwen/Qwen2.5-7B")
    once, often = (
        plan.seconds(replace(cfg, num_minibatches=number), config, 7_600_000_000, 4)["update"] for number in (1, 4)
    )
    assert often == pytest.approx(4 * once)
