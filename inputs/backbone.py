"""The part of a transformers model that gives the hidden states its output layer reads."""

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
