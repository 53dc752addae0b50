"""A model's config, and its tokenizer or its processor of text and images."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator

from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError

from config import ConfigError

# transformers and torch take seconds to import: the functions that need them do it.


def takes_images(config) -> bool:
    """Whether a model with this config takes images."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


@contextlib.contextmanager
def loading(model_id: str) -> Iterator[None]:
    """Within this context, errors of transformers' loaders become ConfigError with the model's name and a remedy."""
    try:
        yield
    except ConfigError:
        raise
    except (ImportError, OSError, ValueError, SafetensorError) as error:
        remedy = "" if type(error) in (ImportError, ValueError) else "Copy the folder again, or save the model anew."
        if not os.path.isdir(model_id):
            remedy = f"There is no folder {os.path.abspath(model_id)}: give a model's, or mend the connection."
        elif os.path.isfile(f"{model_id}/adapter_config.json"):
            remedy = "It is an adapter alone: fold it into its base, and give that folder (docs/runs.md, Saving)."
        first_line = str(error).strip().splitlines()[0]  # transformers' lists of all its models follow
        if isinstance(error.__cause__, HFValidationError):  # no name that the hub could have
            first_line, remedy = f"there is no folder {os.path.abspath(model_id)}.", ""
        raise ConfigError(f"The model {model_id} cannot be loaded: {first_line}\n{remedy}".strip()) from error


def load_config(model_id: str):
    """transformers' config of a model. ConfigError if there is no such model."""
    from transformers import AutoConfig
    from transformers.utils import logging

    if not sys.stderr.isatty():  # in a log file a progress bar is one long line
        logging.disable_progress_bar()
    with loading(model_id):
        return AutoConfig.from_pretrained(model_id, trust_remote_code=False)  # by default it would ask at the terminal


def with_template_kwargs(processor, template_kwargs: dict | None):
    """The processor, which from now on passes these to its chat template. ConfigError for names that the template does
    not contain."""
    processor.__dict__.pop("apply_chat_template", None)  # an earlier run's
    if unknown := [name for name in template_kwargs or () if name not in str(processor.chat_template)]:
        raise ConfigError(f"--chat_template_kwargs: the model's chat template has no {', '.join(unknown)}.")
    if template_kwargs:
        processor.apply_chat_template = functools.partial(processor.apply_chat_template, **template_kwargs)
    return processor


@functools.cache
def load_processor(model_id: str):
    """The processor of text and images of a model that takes images; of other models the tokenizer."""
    from transformers import AutoProcessor, AutoTokenizer

    kind = AutoProcessor if takes_images(load_config(model_id)) else AutoTokenizer
    with loading(model_id):  # an ImportError names the package that this processor needs
        return kind.from_pretrained(model_id)
