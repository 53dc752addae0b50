"""A model's tokenizer, or its processor of text and images."""

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import model_info, try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from config import ConfigError

# transformers and torch take seconds: they are imported where they are needed.


def check_model_id(model_id: str, flag: str = "--model_id") -> None:
    """ConfigError if it can be neither a folder nor found on the hub; transformers retries for a minute in silence."""
    folder = Path(model_id)
    if folder.is_dir():
        if not (folder / "config.json").exists():
            remedy = "give one a model was saved to"
            if (folder / "adapter_config.json").exists():
                remedy = "it is an adapter alone. Fold it into its base, and give that folder (docs/runs.md, Saving)"
            raise ConfigError(f"{flag}={model_id}: the folder holds no config.json; {remedy}.")
        return
    try:
        if not isinstance(try_to_load_from_cache(model_id, "config.json"), str):
            model_info(model_id, timeout=10)
    except Exception as error:  # of the hub client, of whatever its version connects with
        raise ConfigError(
            f"{flag}={model_id}: no such folder (looked in {os.getcwd()}), and not found on the hub: {error}\n"
            "Give the folder of a model, or mend the connection."
        ) from error


def takes_images(config) -> bool:
    """Whether a model's config is one of those that take images."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


@contextlib.contextmanager
def loading(model_id: str, flag: str = "--model_id") -> Iterator[None]:
    """ConfigError with folder, file and remedy where transformers' loaders say one of them at best."""
    try:
        yield
    except (OSError, json.JSONDecodeError, SafetensorError) as error:
        if not os.path.isdir(model_id):
            raise ConfigError(f"{flag}={model_id}: no such folder, and not found on the hub ({error})") from error
        what = ", ".join(unreadable(Path(model_id))) or "a file that it needs"
        fault = f"{what} is missing or damaged ({type(error).__name__}: {error})"
        raise ConfigError(f"{flag}={model_id}: {fault}. Copy the folder again, or save the model anew.") from error


@contextlib.contextmanager
def faults_named(flag: str) -> Iterator[None]:
    """What is wrong with a model's files is said of the flag that named it; loaders know a model by --model_id."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error).replace("--model_id=", f"{flag}=")) from error.__cause__


def unreadable(folder: Path) -> Iterator[str]:
    """Files of a model that are no JSON or no safetensors; their last part may be missing."""
    for path in sorted(folder.iterdir()):
        try:
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    pass
        except (OSError, ValueError, SafetensorError):
            yield path.name


def load_config(model_id: str, flag: str = "--model_id"):
    """transformers' config of a model. ConfigError if there is no such model."""
    from transformers import AutoConfig
    from transformers.utils import logging

    check_model_id(model_id, flag)
    if not sys.stderr.isatty():  # in a log file a progress bar of what is loaded is one long line
        logging.disable_progress_bar()
    for handler in logging.get_logger().handlers:  # of all of transformers
        handler.addFilter(worth_saying)
    with loading(model_id, flag):
        return AutoConfig.from_pretrained(model_id)


# What transformers says in healthy runs. Of token ids tokenizers are asked, not configs. Attention is chosen here, and
# log-probs are compared. What padding does to a model that reads no mask is tried (hf_generator.py).
NEEDLESS = re.compile(
    "_token_id must be `None` or an integer within the vocabulary|"
    "We set the attention implementation for the sub-config|`attention_mask` was passed, but it is unused"
)


def worth_saying(record) -> bool:
    return not NEEDLESS.search(record.getMessage())


def unread_by_template(given: dict, processor) -> str | None:
    """What is wrong with settings for the chat template: names that do not occur in it."""
    unknown = [name for name in given if name not in str(processor.chat_template)]
    return f"the model's chat template has no {', '.join(unknown)}" if unknown else None


def with_template_kwargs(processor, given: dict | None):
    """The processor, whose chat template is given these from now on. ConfigError for names that it never reads."""
    processor.__dict__.pop("apply_chat_template", None)  # of an earlier run
    if not given:
        return processor
    if fault := unread_by_template(given, processor):
        raise ConfigError(f"--chat_template_kwargs: {fault}.")
    processor.apply_chat_template = functools.partial(processor.apply_chat_template, **given)
    return processor


@functools.cache
def load_processor(model_id: str, flag: str = "--model_id"):
    """The processor of text and images of a model that takes images, of others the tokenizer."""
    from transformers import AutoProcessor, AutoTokenizer

    kind = AutoProcessor if takes_images(load_config(model_id, flag)) else AutoTokenizer
    try:
        with loading(model_id, flag):
            return kind.from_pretrained(model_id)
    except ImportError as error:  # a package that this model's processor alone needs, and what to install
        raise ConfigError(f"{flag}={model_id}: {' '.join(str(error).split())}") from error
