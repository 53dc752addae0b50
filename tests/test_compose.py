"""examples/compose_vlm.py: a tower on a language model, the weights of both kept."""

import sys
from pathlib import Path

import tiny_vlms
import torch
import transformers
from server_fixture import make_tiny

import train_grpo as script
from config import TrainConfig

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from compose_vlm import compose  # noqa: E402

SIDE = {"height": 56, "width": 56}
VISION = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=56, patch_size=14)
TEXT = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, vocab_size=1000)
TEXT |= dict(bos_token_id=0, eos_token_id=1, pad_token_id=1)


def make_tower(folder: Path) -> torch.nn.Module:
    """A random SigLIP as published ones are, with its text half. Returns the part that sees."""
    vision = VISION | {"intermediate_size": 128}
    model = transformers.SiglipModel(transformers.SiglipConfig(vision_config=vision, text_config=TEXT))
    model.save_pretrained(folder)
    transformers.SiglipImageProcessor(size=SIDE).save_pretrained(folder)
    return model.vision_model


def test_a_composed_model_keeps_the_weights_of_its_parts(tmp_path):
    tower = make_tower(tmp_path / "tower")
    folder = tmp_path / "model"
    for part in compose(str(tmp_path / "tower"), make_tiny()):
        part.save_pretrained(folder)

    loaded = script.load_hf_model(TrainConfig(model_id=str(folder)), torch.float32)
    kept = {**loaded.model.vision_tower.state_dict()}
    kept = {name.removeprefix("vision_model."): value for name, value in kept.items()}
    wanted = {name.removeprefix("vision_model."): value for name, value in tower.state_dict().items()}
    assert kept.keys() == wanted.keys() and all(torch.equal(kept[name], wanted[name]) for name in wanted)
    language = transformers.AutoModelForCausalLM.from_pretrained(make_tiny(), dtype=torch.float32)
    old = language.get_input_embeddings().weight
    assert torch.equal(loaded.get_input_embeddings().weight[: len(old)], old)
    for name, value in language.model.layers.state_dict().items():
        assert torch.equal(loaded.model.language_model.layers.state_dict()[name], value)


def test_a_picture_shows_in_what_it_says(tmp_path):
    make_tower(tmp_path / "tower")
    model, processor = compose(str(tmp_path / "tower"), make_tiny())
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}],
        add_generation_prompt=True,
    )
    logits = [
        model(**processor(text=[text], images=[[tiny_vlms.picture(seed)]], return_tensors="pt")).logits
        for seed in (0, 1)
    ]
    assert logits[0].shape == logits[1].shape and (logits[0] - logits[1]).abs().max() > 1e-4
