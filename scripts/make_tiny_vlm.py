"""Makes a tiny vision-language model that sees a little, as an ordinary `from_pretrained` folder, without a model hub.

    OMP_NUM_THREADS=1 python scripts/make_tiny_vlm.py models/tiny-vlm      # about 8 minutes on one CPU core

An Idefics3 of about 4 million weights (64 x 64 images in 8 x 8 patches, 16 tokens an image) on the tokenizer of
scripts/make_models.py's tiny model. Its weights start at random and are warm-started by next-token training on fresh
scenes of examples/counting.py and examples/grounding.py, from random streams that neither task's splits use. Their
answers are a careless annotator's: half of the counts are one off, corners of boxes are noisy. The model learns to see
from them and to be careless with them, answers in the tasks' formats and is often wrong - as models are that learned
from people. Reinforcement learning, which is told what is right, has that to take away.

A complete folder is left as it is; folders are written aside and renamed when complete.
"""

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.optim._muon as _muon
from make_models import CHAT_EOS, PACKAGE, PAD, TINY_VOCABULARY, first_tokens, load_tokenizer, put

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "examples"), str(ROOT)]
import counting  # noqa: E402
import grounding  # noqa: E402
from scenes import SIZE, stream  # noqa: E402

# transformers takes seconds more: where the model is there already, nobody waits for them.

SEED, STEPS, BATCH = 0, 820, 16  # of weights and scenes; of the warm start; scenes of each task a step
MUON_LEARNING_RATE, ADAMW_LEARNING_RATE = 3e-3, 2e-3
MISCOUNTED = 0.5  # share of the warm start's counts that are off by one
BOX_NOISE = 3.0  # standard deviation of its boxes' corners, in cells of grounding's grid
PATCH, SCALE = 8, 2  # SCALE x SCALE patches become one token
IMAGE_TOKENS = (SIZE // PATCH // SCALE) ** 2
MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
# Heads of 32, the least that vLLM's CPU attention takes.
VISION = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT = {"hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 6}
TEXT |= {"num_key_value_heads": 6, "head_dim": 32, "max_position_embeddings": 2048}
# ChatML whose messages are text or parts; the processor replaces each <image> by the image's tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# ---- the model ------------------------------------------------------------------------------------------------------


def build_processor(gguf):
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    tokenizer = first_tokens(load_tokenizer(gguf), TINY_VOCABULARY)
    # Before the model is made: an embedding's padding row is not trained.
    tokenizer.eos_token, tokenizer.pad_token = CHAT_EOS, PAD
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = CHAT_TEMPLATE
    edge = {"longest_edge": SIZE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    return Idefics3Processor(images, tokenizer, image_seq_len=IMAGE_TOKENS, chat_template=CHAT_TEMPLATE)


def build_model(tokenizer):
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    # Of the order of 1 / sqrt(width), as the matrices keep their input's size; the default, 0.02, is for wide models.
    start = {"initializer_range": 0.06}
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Idefics3Config(
        text_config={"model_type": "llama"} | TEXT | start | ids,
        vision_config=VISION | start | {"image_size": SIZE, "patch_size": PATCH},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=SCALE,
        tie_word_embeddings=False,
    )
    torch.manual_seed(SEED)
    model = Idefics3ForConditionalGeneration(config).float()
    places = model.model.vision_model.embeddings.position_embedding.weight
    places.data.copy_(0.3 * waves(SIZE // PATCH, places.shape[1]))
    return model


def waves(side, width):
    """Sines and cosines of a patch's row and column, [side * side, width]: neighbours begin as neighbours."""
    frequencies = 30.0 ** -(torch.arange(width // 4) / (width // 4))
    angles = torch.arange(side)[:, None] * frequencies
    one = torch.cat([angles.sin(), angles.cos()], dim=1)  # [side, width / 2]
    rows, columns = one[:, None].expand(side, side, -1), one[None].expand(side, side, -1)
    return torch.cat([rows, columns], dim=-1).reshape(side * side, width)


# ---- warm start -----------------------------------------------------------------------------------------------------


def encode(processor, rows, known):
    """(input_ids [B, T], labels [B, T], pixel_values [B, 1, 3, SIZE, SIZE]) of prompts followed by answers.

    Labels are -100 except on the answer and the <|im_end|> after it. Padding is on the right, where a causal model
    needs no mask for it. `known` collects the ids of each question's prompt, which are the same for any image.
    """
    tokenizer, sequences, labels = processor.tokenizer, [], []
    for row in rows:
        if row["prompt"] not in known:
            asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["prompt"]}]}]
            text = processor.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            known[row["prompt"]] = list(processor(text=[text], images=[[row["image"]]])["input_ids"][0])
        prompt = known[row["prompt"]]
        answer = tokenizer(row["answer"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        sequences.append(torch.tensor(prompt + answer))
        labels.append(torch.tensor([-100] * len(prompt) + answer))
    input_ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=tokenizer.pad_token_id)
    labels = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    images = processor.image_processor([[row["image"]] for row in rows], return_tensors="pt")
    return input_ids, labels, images["pixel_values"]


def answer_loss(model, input_ids, labels, pixel_values):
    """Mean cross-entropy of the answers' tokens. Only at their positions does the output layer run."""
    hidden = model.model(input_ids=input_ids, pixel_values=pixel_values, use_cache=False).last_hidden_state
    chosen = labels[:, 1:] != -100  # [B, T-1]: position t predicts token t + 1
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[:, :-1][chosen]), labels[:, 1:][chosen])


def warm_start(model, processor):
    """Grounding begins with one shape a scene and grows to the task's three over the first half of the steps: where a
    single shape is, is learned quickly. Without that and the waves, boxes were hardly better than blind ones."""
    rng, known = stream("warm start", SEED), {}
    optimizers = build_optimizers(model)
    decay = [torch.optim.lr_scheduler.LambdaLR(o, learning_rate_factor) for o in optimizers]
    begin, losses = time.perf_counter(), {}
    for step in range(1, STEPS + 1):
        most = max(1, math.floor(3 * min(2 * step / STEPS, 1)))
        tasks = {"counting": counting.row, "grounding": partial(grounding.row, fewest=1, most=most)}
        for name, task in tasks.items():
            rows = [careless(rng, task(rng)) for _ in range(BATCH)]
            loss = answer_loss(model, *encode(processor, rows, known))
            loss.backward()
            losses[name] = loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*optimizers, *decay):
            each.step()
        model.zero_grad()
        if step % 25 == 0 or step == STEPS:
            said = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
            print(f"step {step}/{STEPS}: loss {said}, {time.perf_counter() - begin:.0f} s", flush=True)


def careless(rng, row):
    """The row as a careless annotator would have it: counts are often one off, corners of boxes some cells off."""
    if "box" not in row:
        wrong = rng.random() < MISCOUNTED
        return row | {"answer": str(abs(int(row["answer"]) + rng.choice([-1, 1]))) if wrong else row["answer"]}
    corners = [int(number) + round(rng.gauss(0, BOX_NOISE)) for number in row["answer"].split()]
    x1, y1, x2, y2 = (min(max(corner, 0), grounding.GRID) for corner in corners)
    return row | {"answer": f"{min(x1, x2)} {min(y1, y2)} {max(x1, x2)} {max(y1, y2)}"}


def build_optimizers(model):
    """Muon for the matrices of the layers, AdamW for everything else."""
    named = dict(model.named_parameters())
    inner = {
        name for name, weight in named.items() if weight.ndim == 2 and (".layers." in name or "projection" in name)
    }
    matrices, others = [named[name] for name in named if name in inner], [named[n] for n in named if n not in inner]
    _muon._zeropower_via_newtonschulz = orthogonalized
    muon = torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return muon, torch.optim.AdamW(others, lr=ADAMW_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)


def orthogonalized(update, coefficients, steps, eps):
    """Muon's Newton-Schulz iteration (Jordan et al. 2024) in float32, in place of torch's in bfloat16: on CPUs without
    AVX512 a product of two bfloat16 matrices takes up to 60 times as long."""
    a, b, c = coefficients
    x = update / update.norm().clamp(min=eps)
    x = x.T if x.shape[0] > x.shape[1] else x  # the smaller Gram matrix
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if update.shape[0] > update.shape[1] else x


def learning_rate_factor(step):
    return min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * min(step / STEPS, 1)))


# ---- main -----------------------------------------------------------------------------------------------------------


def build(gguf):
    """(model, processor)"""
    processor = build_processor(gguf)
    model = build_model(processor.tokenizer)
    print(f"make_tiny_vlm: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} million weights", flush=True)
    warm_start(model, processor)
    return model, processor


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    request = {"model": "tiny-vlm", "package": PACKAGE, "vocabulary": TINY_VOCABULARY, "seed": SEED, "steps": STEPS}
    put(parser.parse_args().folder, request, build)


if __name__ == "__main__":
    main()
