"""Parts of a transformers model by what they do: what gives the hidden states its output layer reads; its experts."""

from torch import nn
from transformers import PreTrainedModel

from config import ConfigError


def backbone(hf_model: nn.Module) -> nn.Module:
    """Takes token ids (and images), returns `last_hidden_state`.

    It is `base_model`, unless that is the model itself because its parts have other names than its class says: then it
    is the part with the input embeddings.
    """
    if (base := hf_model.base_model) is not hf_model:
        return base
    embeddings = hf_model.get_input_embeddings()
    parts = (child for child in hf_model.children() if child is not embeddings)
    found = next((part for part in parts if any(module is embeddings for module in part.modules())), None)
    if found is None or found.get_output_embeddings() is not None:  # a causal model within another: no hidden states
        raise ConfigError(
            f"{type(hf_model).__name__} has no part of its own below the output layer, whose hidden states the policy "
            "reads; train its text model, or another family."
        )
    return found


def text_model(hf_model: nn.Module) -> PreTrainedModel:
    """The part with the layers that text goes through: of a model that takes images a part of the backbone.

    transformers' get_decoder looks for a part called "decoder", which may be an output layer, or the model itself.
    """
    found = hf_model.get_decoder()
    return found if isinstance(found, PreTrainedModel) and found is not hf_model else backbone(hf_model)


def image_encoder(hf_model: nn.Module) -> nn.Module:
    """What --freeze_vision leaves as it is. transformers gives the model itself where it finds no such part."""
    found = hf_model.get_encoder(modality="image")
    if found in (hf_model, hf_model.base_model):
        raise ConfigError(f"--freeze_vision: {type(hf_model).__name__} has no image encoder of its own; leave it out.")
    return found


EXPERTS = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "chosen": ("num_experts_per_tok", "top_k"),
}


def experts_of(config) -> tuple[int, int]:
    """(experts of a layer, experts of a token), from a transformers config; (0, 0) for a dense model."""
    text = config.get_text_config()
    experts, chosen = (
        next((found for name in names if isinstance(found := getattr(text, name, None), int)), 0)
        for names in EXPERTS.values()
    )
    return (experts, chosen) if experts > 1 and chosen else (0, 0)
