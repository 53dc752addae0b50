"""A learned reward model as a reward function: `--reward_funcs reward_model --reward_model PATH_OR_ID_OR_URL`.

A sequence classifier with one output (AutoModelForSequenceClassification) scores prompt and completion under its own
chat template, without --system_prompt. A string prompt becomes a user's message, unless --no_apply_chat_template gives
it to the policy as plain text. With a folder or hub id the model runs in this process, on the trainer's device; an http
address is that of `vllm serve MODEL --runner pooling` (its route /classify, raw scores). Each reward model has its own
scale: --reward_mean running --reward_std running brings it near 1.
"""

import os
import threading
import time
from functools import cache

from inputs.prompts import adds_bos, normal, prompt_messages, tokenize
from modeling.loading import check_missing
from network import http, secrets

# torch and transformers are imported only to load a model: a served one needs no torch.

LOCK = threading.Lock()  # each group is scored in its own thread, but the model takes one batch at a time


def as_text(completions, tokenizer, cfg) -> bool:
    """Whether prompt + completion is scored as plain text, not as a chat: if the policy was given plain text, or the
    classifier has no chat template."""
    plain = cfg.no_apply_chat_template or not getattr(tokenizer, "chat_template", None)
    return plain and isinstance(completions[0], str)


def token_ids(completions, prompts, tokenizer, cfg) -> list[list[int]]:
    """Token ids for the classifier: the chat under its template, which adds BOS, or prompt + completion."""
    if as_text(completions, tokenizer, cfg):
        texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        return [tokenize(text, tokenizer, adds_bos(text, tokenizer)) for text in texts]
    answers = [[{"role": "assistant", "content": c}] if isinstance(c, str) else c for c in completions]
    prompt_chats = [prompt_messages({"prompt": prompt}) for prompt in prompts]
    chats = (normal([*p, *a], tokenizer) for p, a in zip(prompt_chats, answers, strict=True))
    return [tokenize(tokenizer.apply_chat_template(chat, tokenize=False), tokenizer) for chat in chats]


@cache
def load(model_id: str):
    """(tokenizer, classifier on this rank's device), once per process."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_id)
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    options = dict(dtype=dtype, output_loading_info=True)
    model, loading_info = AutoModelForSequenceClassification.from_pretrained(model_id, **options)
    check_missing(model.to(device).eval(), loading_info, model_id)
    if model.config.num_labels != 1:
        raise ValueError(f"--reward_model={model_id} has {model.config.num_labels} outputs; a reward model has one.")
    model.config.pad_token_id = None  # nothing is padded
    return tokenizer, model


@cache
def served_model(url: str):
    """(name, tokenizer) of the model at the address."""
    from transformers import AutoTokenizer

    def read(answer: dict) -> tuple[str, str]:
        model = answer["data"][0]
        return model["id"], model.get("root") or model["id"]

    name, folder = http.ask("GET", http.route(url, "/v1/models"), 10, token=token(), read=read)
    return name, AutoTokenizer.from_pretrained(folder)


def is_served(model: str) -> bool:
    """Whether --reward_model is the address of a server."""
    return model.startswith(("http://", "https://"))


def token() -> str:
    return secrets.read("REWARD_MODEL_TOKEN")


def reward_model(completions, prompts, cfg) -> list[float]:
    """One score per completion, on the model's own scale."""
    if is_served(cfg.reward_model):
        deadline = time.monotonic() + 0.8 * cfg.reward_timeout  # before the reward's own limit: reports the fault
        name, tokenizer = served_model(cfg.reward_model)
        rows = token_ids(completions, prompts, tokenizer, cfg)
        body = {"model": name, "input": rows, "use_activation": False}
        url = http.route(cfg.reward_model, "/classify")

        def read(answer: dict) -> list[float]:
            return [row["probs"][0] for row in answer["data"]]

        return http.ask("POST", url, max(deadline - time.monotonic(), 0), body, token(), read=read)
    import torch

    tokenizer, model = load(cfg.reward_model)
    rows = token_ids(completions, prompts, tokenizer, cfg)
    with LOCK, torch.inference_mode():  # row by row: with padding the model may score a padding token
        return [float(model(torch.tensor([row], device=model.device)).logits[0, 0]) for row in rows]


reward_model.per_trajectory = True
