"""A vision-language model from parts: any CLIP, SigLIP or DINOv2 tower, a connector, any causal language model.

    python examples/compose_vlm.py --tower google/siglip-so400m-patch14-384 --language Qwen/Qwen3-0.6B models/my-vlm
    torchrun ... train_grpo.py --model_id models/my-vlm ...

The result has the LLaVA architecture (2304.08485): an ordinary `from_pretrained` folder with its processor. vLLM
serves CLIP and SigLIP towers; one with a DINOv2 tower trains and evaluates with --generator hf. The connector, a
two-layer perceptron, starts at random: align it on captions (supervised) before reinforcement learning can do much.
"""

import argparse

import torch
import transformers as hf

IMAGE = "<image>"
# Text models' templates want strings: message parts are joined to one first, an image as its placeholder.
JOIN_PARTS = (
    "{% set joined = namespace(messages=[]) %}{% for message in messages %}{% set text = namespace(all='') %}"
    "{% if message['content'] is string %}{% set text.all = message['content'] %}{% else %}"
    "{% for part in message['content'] %}{% set text.all = text.all + "
    f"('{IMAGE}' if part['type'] == 'image' else part['text'])"
    " %}{% endfor %}{% endif %}{% set joined.messages = joined.messages + [dict(message, content=text.all)] %}"
    "{% endfor %}{% set messages = joined.messages %}"
)


def load_tower(name: str):
    """(vision tower without its text half, its image processor)"""
    config = hf.AutoConfig.from_pretrained(name)
    tower = hf.AutoModel.from_pretrained(name, config=getattr(config, "vision_config", config))
    images = hf.AutoImageProcessor.from_pretrained(name)
    side = tower.config.image_size
    images.size = images.crop_size = {"height": side, "width": side}  # one square for all; the processor counts by it
    return tower, images


def compose(tower_name: str, language_name: str, seed: int = 0):
    """(model, processor), the model in float32."""
    tower, images = load_tower(tower_name)
    language = hf.AutoModelForCausalLM.from_pretrained(language_name, dtype="float32")
    tokenizer = hf.AutoTokenizer.from_pretrained(language_name)
    if not tokenizer.chat_template:
        raise SystemExit(f"--language {language_name} has no chat template; take an instruct model")
    tokenizer.add_tokens([IMAGE], special_tokens=True)
    if len(tokenizer) > language.get_input_embeddings().num_embeddings:
        language.resize_token_embeddings(len(tokenizer))
    extra = 0 if "siglip" in tower.config.model_type else 1  # CLIP and DINOv2 put a class token before the patches
    extra += getattr(tower.config, "num_register_tokens", 0)
    strategy = "default" if extra else "full"  # "default" drops the class token
    patches = (tower.config.image_size // tower.config.patch_size) ** 2
    config = hf.LlavaConfig(
        vision_config=tower.config,
        text_config=language.config,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=patches + max(extra - 1, 0),
        vision_feature_select_strategy=strategy,
        tie_word_embeddings=language.config.tie_word_embeddings,
    )
    torch.manual_seed(seed)
    model = hf.LlavaForConditionalGeneration(config)
    model.model.vision_tower, model.model.language_model, model.lm_head = tower, language.model, language.lm_head
    model.generation_config = language.generation_config
    options = {"patch_size": tower.config.patch_size, "num_additional_image_tokens": extra}
    template = JOIN_PARTS + tokenizer.chat_template
    return model, hf.LlavaProcessor(
        images, tokenizer, chat_template=template, vision_feature_select_strategy=strategy, **options
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", help="to be written")
    parser.add_argument("--tower", required=True, help="hub id or folder of a CLIP, SigLIP or DINOv2 model")
    parser.add_argument("--language", required=True, help="hub id or folder of a causal language model")
    args = parser.parse_args()
    for part in compose(args.tower, args.language):
        part.save_pretrained(args.folder)
