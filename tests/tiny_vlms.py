"""Tiny random models of the families of vision-language models, with the processors that belong to them."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from server_fixture import make_tiny
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

import train_grpo as script
from inputs import vision
from rollouts import Trajectory

# What each family writes for an image; the processor makes of it what the model sees.
MARK = {
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_5": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
}
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SPECIAL = {  # tokens with a role in the processor
    "idefics3": ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"],
    "gemma3": dict(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"),
    "gemma4": dict(
        boi_token="<|image>",
        eoi_token="<image|>",
        image_token="<|image|>",
        audio_token="<|audio|>",
        boa_token="<|audio>",
        eoa_token="<audio|>",
        video_token="<|video|>",
    ),
    "qwen": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
}
TEXT = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
TEXT |= dict(head_dim=32, max_position_embeddings=2048)
VISION = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
SIDE = 56  # pixels of an image, for families of fixed size


def tokenizer_of(family: str):
    kind = "idefics3" if family == "smolvlm" else family
    special = SPECIAL["qwen" if family.startswith("qwen") else kind]
    names = special if isinstance(special, dict) else {}
    tokenizer = AutoTokenizer.from_pretrained(make_tiny(), extra_special_tokens=names) if names else None
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(make_tiny())
    if not names and special:
        tokenizer.add_special_tokens({"additional_special_tokens": special})
    if family == "gemma3":  # vLLM looks these up
        tokenizer.add_tokens(["\n", "\n\n", "\n\n\n", "\n\n\n\n"])
    tokenizer.chat_template = None
    return tokenizer


def processor_of(family: str):
    import transformers as t

    tokenizer, template = tokenizer_of(family), TEMPLATE.replace("MARK", MARK[family])
    edge, square = {"longest_edge": 64}, {"height": SIDE, "width": SIDE}
    if family == "idefics3":
        images = t.Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
        return t.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template)
    if family == "smolvlm":
        images = t.SmolVLMImageProcessor(size=edge, max_image_size=edge, do_image_splitting=False)
        videos = t.SmolVLMVideoProcessor(size=edge, max_image_size=edge)
        return t.SmolVLMProcessor(images, tokenizer, videos, image_seq_len=4, chat_template=template)
    if family.startswith("qwen"):
        patch = 16 if family in ("qwen3_vl", "qwen3_5") else 14
        size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (6 * patch) ** 2}
        images = t.Qwen2VLImageProcessor(patch_size=patch, size=size)
        if family in ("qwen3_vl", "qwen3_5"):
            return t.Qwen3VLProcessor(images, tokenizer, t.Qwen3VLVideoProcessor(), chat_template=template)
        return t.Qwen2_5_VLProcessor(images, tokenizer, t.Qwen2VLVideoProcessor(), chat_template=template)
    if family == "gemma3":
        images = t.Gemma3ImageProcessor(size=square, image_seq_length=4)
        return t.Gemma3Processor(images, tokenizer, image_seq_length=4, chat_template=template)
    images = t.Gemma4ImageProcessor(patch_size=16, pooling_kernel_size=3, max_soft_tokens=70)
    sounds, videos = t.Gemma4AudioFeatureExtractor(), t.Gemma4VideoProcessor()
    return t.Gemma4Processor(sounds, images, tokenizer, videos, chat_template=template)


def config_of(family: str, processor) -> dict:
    tokenizer = processor.tokenizer

    def number(name):
        return tokenizer.convert_tokens_to_ids(name)

    text = TEXT | dict(
        vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id
    )
    siglip = VISION | dict(model_type="siglip_vision_model", image_size=SIDE, patch_size=14)
    if family in ("idefics3", "smolvlm"):
        vision = VISION | dict(image_size=64, patch_size=16)
        text = text | dict(model_type="llama")
        return dict(
            text_config=text,
            vision_config=vision,
            image_token_id=number("<image>"),
            scale_factor=2,
            tie_word_embeddings=False,
        )
    if family.startswith("qwen"):
        rope = dict(rope_type="default", mrope_section=[4, 6, 6], rope_theta=10000.0)
        newer = family in ("qwen3_vl", "qwen3_5")
        rope |= dict(mrope_interleaved=True) if newer else {}  # as published; vLLM reads it, transformers does not
        patch = 16 if newer else 14
        vision = dict(depth=2, hidden_size=64, num_heads=4, patch_size=patch, spatial_merge_size=2)
        if family == "qwen2_5_vl":
            vision |= dict(out_hidden_size=128, intermediate_size=128, window_size=56, fullatt_block_indexes=[1])
        else:
            vision |= dict(out_hidden_size=128, intermediate_size=128, num_position_embeddings=144)
            vision |= dict(deepstack_visual_indexes=[0]) if family == "qwen3_vl" else {}
        ids = dict(image_token_id=number("<|image_pad|>"), video_token_id=number("<|video_pad|>"))
        ids |= dict(vision_start_token_id=number("<|vision_start|>"), vision_end_token_id=number("<|vision_end|>"))
        if family == "qwen3_5":
            text |= dict(layer_types=["linear_attention", "full_attention"])
            text |= dict(linear_num_key_heads=2, linear_num_value_heads=4)
            text |= dict(linear_key_head_dim=128, linear_value_head_dim=128)  # vLLM's kernels of CPUs want that
            rope |= dict(partial_rotary_factor=1.0)
            text |= dict(tie_word_embeddings=True)
        return dict(text_config=text | dict(rope_parameters=rope), vision_config=vision, tie_word_embeddings=True) | ids
    if family == "gemma3":
        ids = dict(boi_token_index=number("<start_of_image>"), eoi_token_index=number("<end_of_image>"))
        text = text | dict(
            model_type="gemma3_text", sliding_window=64, layer_types=["sliding_attention", "full_attention"]
        )
        return dict(
            text_config=text,
            vision_config=siglip | dict(vision_use_head=False),
            image_token_index=number("<image_soft_token>"),
            mm_tokens_per_image=4,
            **ids,
        )
    # Gemma 4, as its larger models, whose images see themselves in both directions
    kinds = ("image", "video", "audio")
    ids = {f"{kind}_token_id": number(f"<|{kind}|>") for kind in kinds}
    ids |= dict(boi_token_id=number("<|image>"), eoi_token_id=number("<image|>"), boa_token_id=number("<|audio>"))
    text |= dict(model_type="gemma4_text", global_head_dim=32, hidden_size_per_layer_input=0)
    text |= dict(sliding_window=64, layer_types=["sliding_attention", "full_attention"])
    text |= dict(num_kv_shared_layers=0, use_bidirectional_attention="vision")
    vision = VISION | dict(model_type="gemma4_vision", num_key_value_heads=2, head_dim=32, patch_size=16)
    vision |= dict(pooling_kernel_size=3, position_embedding_size=64)
    return dict(text_config=text, vision_config=vision, audio_config=None, **ids)


def make(family: str, folder: Path) -> Path:
    """A random model of the family and its processor, as a from_pretrained folder."""
    processor = processor_of(family)
    config = AutoConfig.for_model(family, **config_of(family, processor))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).float()
    for parameter in model.parameters():  # apart enough from zero that an image shows in the log-probs
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.save_pretrained(folder)
    if family == "gemma3":  # published ones have a level more, taken off in loading
        file = folder / "model.safetensors"
        renamed = {k.replace("vision_tower.", "vision_tower.vision_model."): v for k, v in load_file(file).items()}
        save_file(renamed, file, metadata={"format": "pt"})
    processor.save_pretrained(folder)
    return folder


# ---- rows and a batch of them ----------------------------------------------------------------------------------------


def picture(seed: int, width: int = 64, height: int = 64) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def damaged(png: bytes) -> bytes:
    """The file with its pixels garbled: its header, its length and its end are those of a whole one."""
    start = png.index(b"IDAT") + 8
    return png[:start] + bytes(byte ^ 0x55 for byte in png[start : start + 200]) + png[start + 200 :]


def picture_rows() -> list[dict]:
    """No, one and two images."""
    one = {"prompt": "What is this?", "image": picture(0)}
    two = {"prompt": "Which of the two is larger?", "images": [picture(1, 80, 60), picture(2, 60, 90)]}
    return [one, two, {"prompt": "Say something."}]


def batch_of(rows, generator, cfg) -> script.Batch:
    random, trajectories = torch.Generator().manual_seed(0), []
    for group, row in enumerate(rows):
        prompt = vision.build_prompt(row, generator, cfg)
        for member in range(3):
            ids = torch.randint(300, 4000, (3 + 2 * member + group,), generator=random).tolist()
            n, info = len(ids), {"model_inputs": prompt.model_inputs}
            rewards = [0.0] * (n - 1) + [float(member)]
            trajectories.append(Trajectory(row, group, prompt.token_ids, ids, [1] * n, [-1.0] * n, rewards, info=info))
    batch = script.collate(trajectories, 0, torch.device("cpu"))
    batch.advantages = script.dr_grpo(batch, cfg)
    return batch
