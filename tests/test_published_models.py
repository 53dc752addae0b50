"""Models as they are published: quantised, without some weights, with weights that are no parameters. What is trained
and saved is whole and plain."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import transformers as hf
from families import saved
from safetensors.torch import load_file, save_file
from server_fixture import make_tiny

import train_minimal
from algorithms import teachers
from config import ConfigError, TrainConfig
from saving import checkpoints
from scoring import reward_model
from train_grpo import Policy, load_frozen, load_hf_model, load_policy, load_reference, saved_weights
from train_ppo import Critic

BLOCK = 32
MXFP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]  # of 4 bits: sign, exponent, mantissa
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": GROUP}}
COMPRESSED |= {"quantization_status": "compressed", "ignore": ["lm_head"]}


def rewritten(folder, change=dict, **config):
    """The folder with its weights as `change` makes them, and these entries in config.json."""
    weights = change(load_file(folder / "model.safetensors"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | config), encoding="utf-8")
    return folder


def in_fp8(weights):
    """Blocks of BLOCK x BLOCK with a scale each, as DeepSeek V3 and Qwen3's FP8 models are published."""
    out = {}
    for name, weight in weights.items():
        out[name] = weight
        if "_proj.weight" in name:
            blocks = weight.float().unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)  # [rows, columns, BLOCK, BLOCK]
            scale = blocks.abs().amax((2, 3)) / 448
            whole = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            out[name] = (weight.float() / whole).to(torch.float8_e4m3fn)
            out[name.replace("weight", "weight_scale_inv")] = scale
    return out


def in_mxfp4(weights):
    """Experts in pairs of 4 bits, with a power of two for each 32, as gpt-oss is published."""
    out = {}
    for name, weight in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            out[name] = weight
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32)
        out[name + "_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        out[name + "_scales"] = torch.full(shape, 120, dtype=torch.uint8)  # 2 ** -7
    return out


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders by kind of quantisation. Those that are refused have another config alone."""
    root = tmp_path_factory.mktemp("published")
    dense = saved("qwen3", root / "plain", hidden_size=64, intermediate_size=96)
    found = {"plain": dense}
    copy = lambda name, of=dense: shutil.copytree(of, root / name)  # noqa: E731
    fp8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    found["fp8"] = rewritten(copy("fp8"), in_fp8, quantization_config=fp8)
    found["fp8_experts"] = rewritten(saved("qwen3_moe", root / "moe"), in_fp8, quantization_config=fp8)
    gpt_oss = saved("gpt_oss", root / "mxfp4", hidden_size=64, intermediate_size=64)
    found["mxfp4"] = rewritten(gpt_oss, in_mxfp4, quantization_config={"quant_method": "mxfp4"})
    for name, given in {"gptq": GPTQ, "compressed": COMPRESSED, "bnb": BNB}.items():
        found[name] = rewritten(copy(name), quantization_config=given)
    for name, nested in {"bnb_once": False, "bnb_twice": True}.items():
        four = hf.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested)
        packed = hf.AutoModelForCausalLM.from_pretrained(dense, quantization_config=four, dtype=torch.bfloat16)
        packed.save_pretrained(found.setdefault(name, copy(name)))
    return found


def config(folder, **more):
    return TrainConfig(model_id=str(folder), generator="hf", compute_dtype="float32", reward_funcs=["length"], **more)


def written(run_dir, step, model, cfg):
    """The folder of a checkpoint of the model."""
    policy = Policy(model, cfg, autocast=False)
    buckets, _ = saved_weights(policy, replace(cfg, push_bucket_mb=1), torch.float32)
    modules = {"policy": (policy, torch.optim.SGD(policy.parameters(), lr=0.1))}
    tokenizer = hf.AutoTokenizer.from_pretrained(make_tiny())
    return checkpoints.save_checkpoint(run_dir, step, modules, model, buckets, tokenizer, {}, {}, keep=1)


@pytest.mark.parametrize("kind", ["fp8", "fp8_experts", "mxfp4"])
def test_quantised_weights_are_trained_and_saved_as_plain_ones(sources, kind, tmp_path):
    cfg = config(sources[kind])
    model = load_hf_model(cfg, torch.float32)
    stored, held = load_file(sources[kind] / "model.safetensors"), dict(model.named_parameters())
    if kind == "fp8":
        name = "model.layers.1.mlp.up_proj.weight"
        scale = stored[name + "_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        assert torch.allclose(held[name], stored[name].float() * scale, atol=2e-3)
    elif kind == "mxfp4":
        name = "model.layers.1.mlp.experts.down_proj"
        pairs = stored[name + "_blocks"][0, 0, 0].long()
        values = torch.tensor(MXFP4)[torch.stack([pairs % 16, pairs // 16], 1).flatten()] * 2.0**-7
        assert torch.equal(held[name][0, :32, 0], values)
    with torch.no_grad():
        for weight in held.values():
            weight += 1e-5 * torch.randn_like(weight)  # an update that 8 bits would round away
    folder = written(tmp_path, 1, model, cfg)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    again, found = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(found.values())
    assert all(torch.equal(weight, held[name]) for name, weight in again.named_parameters())


@pytest.mark.parametrize("kind", ["gptq", "compressed", "bnb"])
def test_what_cannot_be_made_plain_is_refused_by_its_name(sources, kind):
    method = {"bnb": "bitsandbytes", "compressed": "compressed-tensors"}.get(kind, kind)
    with pytest.raises(ConfigError, match=rf"quantised \({method}\)") as caught:
        load_hf_model(config(sources[kind]), torch.float32)
    assert ("--use_peft --load_in 4bit" in str(caught.value)) == (kind == "bnb")


@pytest.mark.parametrize("kind", ["bnb_once", "bnb_twice"])
def test_adapters_learn_on_weights_that_were_published_in_4_bits(sources, kind):
    cfg = config(sources[kind], use_peft=True, load_in="4bit")
    policy = load_policy(cfg, torch.device("cpu"))
    ids = torch.arange(5, 12)[None]
    policy({"input_ids": ids}, torch.zeros(6, dtype=torch.long), torch.arange(6), ids[0, 1:])[
        "logprobs"
    ].sum().backward()
    learned = [p.grad.abs().sum() > 0 for name, p in policy.named_parameters() if "lora_B" in name]
    assert len(learned) == 14 and all(learned)


def test_a_checkpoint_is_the_whole_model(tmp_path):
    """Of a mixture whose router has a bias that is no parameter, and whose checkpoints hold experts one by one."""
    cfg = config(saved("deepseek_v3", tmp_path / "model"))
    model = load_hf_model(cfg, torch.float32)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).copy_(torch.arange(4.0))
    folder = written(tmp_path, 1, model, cfg)
    assert load_file(folder / "model.safetensors")[name].tolist() == [0, 1, 2, 3]
    again, found = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(found.values())
    assert all(torch.equal(weight, again.get_parameter(name)) for name, weight in model.named_parameters())


def without(*names):
    return lambda weights: {name: tensor for name, tensor in weights.items() if name not in names}


def test_weights_that_a_folder_lacks_are_named(sources, tmp_path):
    """Of whatever computes with them; tied weights, and a critic's output layer, are none of them."""
    lost, cpu = "model.layers.0.mlp.up_proj.weight", torch.device("cpu")
    less, headless = (
        rewritten(shutil.copytree(sources["plain"], tmp_path / name), without(name))
        for name in (lost, "lm_head.weight")
    )
    for load in (
        lambda: load_policy(config(less), cpu),
        lambda: load_reference(config(less, beta=0.1), cpu),
        lambda: teachers.load(config(sources["plain"], teacher_id=str(less)), cpu, load_frozen),
    ):
        with pytest.raises(ConfigError, match=f"{less} lacks 1 weights of Qwen3ForCausalLM, such as {lost}"):
            load()
    for kind, expected in ((Policy, pytest.raises(ConfigError, match="lm_head.weight")), (Critic, nullcontext())):
        with expected:
            load_policy(config(headless), cpu, kind)
    minimal = dict(
        generator="hf", dataset_id="benchmarks/toy.py:rows", reward_funcs=["length"], output_dir=str(tmp_path)
    )
    with pytest.raises(ConfigError, match="lacks 1 weights"):
        train_minimal.train(train_minimal.Settings(model_id=str(less), **minimal))
    with pytest.raises(ConfigError, match="is quantised"):
        train_minimal.train(train_minimal.Settings(model_id=str(sources["bnb_once"]), run_name="quantised", **minimal))
    load_hf_model(config(make_tiny()), torch.float32)  # tied
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"  # no parameter
    with pytest.raises(ConfigError, match=f"lacks 1 weights of DeepseekV3ForCausalLM, such as {bias}"):
        load_hf_model(config(rewritten(saved("deepseek_v3", tmp_path / "routed"), without(bias))), torch.float32)
    with pytest.raises(ConfigError, match="lacks 1 weights of .*, such as score.weight"):
        reward_model.load(str(sources["plain"]))
