"""A model's tokenizer, or its processor of text and images."""

import contextlib
import copy
import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import jinja2
import jinja2.meta
from huggingface_hub import constants, try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from config import ConfigError
from safety.calls import say_once

# transformers and torch take seconds: they are imported where they are needed.


def check_model_id(model_id: str, flag: str = "--model_id") -> None:
    """ConfigError if it can be neither a folder nor found on the hub; transformers retries for a minute in silence."""
    if os.path.isdir(model_id):
        if not os.path.exists(os.path.join(model_id, "config.json")):
            remedy = "give one a model was saved to"
            if os.path.exists(os.path.join(model_id, "adapter_config.json")):
                remedy = "it is an adapter alone. Fold it into its base, and give that folder (docs/runs.md, Saving)"
            raise ConfigError(f"{flag}={model_id}: the folder holds no config.json; {remedy}.")
        return
    missing = f"{flag}={model_id}: no such folder (looked in {os.getcwd()})"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model_id):
        raise ConfigError(f"{missing}, and not the form of a hub id, NAME or OWNER/NAME.")
    if isinstance(try_to_load_from_cache(model_id, "config.json"), str):
        return
    import requests

    try:
        if constants.HF_HUB_OFFLINE:
            raise requests.ConnectionError("HF_HUB_OFFLINE is set")
        requests.head(f"{constants.ENDPOINT}/{model_id}/resolve/main/config.json", timeout=10)
    except requests.RequestException as error:
        raise ConfigError(
            f"{missing}, not in the hub's cache, and {constants.ENDPOINT} cannot be asked ({type(error).__name__}). "
            "Give the folder of a model, or mend the connection."
        ) from error


def takes_images(config) -> bool:
    """Whether a model's config is one of those that take images."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def model_class(config) -> type:
    """The class that AutoModelForImageTextToText or AutoModelForCausalLM makes of a model's config.

    ConfigError if there is none.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    from transformers.models.auto.auto_factory import _get_model_class

    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if takes_images(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise ConfigError(
            f"--model_id={config.name_or_path}: transformers has no causal language model for {config.model_type}; "
            "give a model that generates text."
        )
    return _get_model_class(config, mapping)


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


def without_dropout(config):
    """A copy of a config with every rate of dropout 0, in its parts, too: ratios between two passes must be those of
    the weights. Modules read the rates when they are built; many then call a function, not a module that could be
    found."""

    def clear(part) -> None:
        for name, value in vars(part).items():
            if "drop" in name and type(value) in (int, float):
                setattr(part, name, type(value)(0))  # some configs check types
            elif name in part.sub_configs and value is not None:
                clear(value)

    clear(config := copy.deepcopy(config))
    return config


def taken_out(config) -> dict | None:
    """What a config says of weights that were published quantised, which it says no longer: a model that is trained has
    plain ones, and so do its checkpoints."""
    found = [vars(part).pop("quantization_config", None) for part in (config, config.get_text_config())]
    return next(filter(None, found), None)


def load_plain(auto, model_id: str, given: dict, load_in: str | None, config, **how) -> tuple:
    """`auto.from_pretrained` of a model that is published quantised, with plain weights where transformers makes them;
    bitsandbytes' 4 bits with --load_in 4bit stay. given: what `taken_out` took out of its config. ConfigError where it
    is neither."""
    import torch
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    method, in_4_bits = given.get("quant_method", "bitsandbytes"), given.get("load_in_4bit")
    with torch.device("meta"):
        plain = {name for name, _ in auto.from_config(config).named_parameters()}
    config.quantization_config = given
    if in_4_bits and load_in:
        return auto.from_pretrained(model_id, config=config, **how | {"quantization_config": None})
    adapters = ", or train adapters on this one: --use_peft --load_in 4bit" * bool(in_4_bits)
    refused = (
        f"--model_id={model_id} is quantised ({method}), from which no weights are made here that could be trained"
    )
    refused = ConfigError(f"{refused}. Give the model that it was made from{adapters}.")
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if load_in or kind is None or "dequantize" not in inspect.signature(kind).parameters:
        raise refused
    try:
        model, found = auto.from_pretrained(
            model_id, config=config, **how | {"quantization_config": kind(dequantize=True)}
        )
    except (ImportError, ValueError) as error:  # of the package that would do it
        raise refused from error
    if {name for name, _ in model.named_parameters()} != plain:  # scales are left, as compressed-tensors does
        raise refused
    model._weight_conversions = None  # else checkpoints would have the pieces in which it was published
    say_once(f"{model_id} is published quantised ({method}): it is trained, and saved, as plain weights.")
    return model, found


def load_whole(auto, model_id: str, config=None, given=None, load_in=None, body=False, **how):
    """auto.from_pretrained(model_id, config=config, **how), of plain weights.

    given: what `taken_out` took out of the config. ConfigError naming weights that the folder lacks: they would be
    random, and others on each rank. body: the output layer, which a critic does not read, may be missing.
    """
    config, how = config or load_config(model_id), how | {"output_loading_info": True}
    given = given or taken_out(config)
    with loading(model_id):
        if given:
            model, found = load_plain(auto, model_id, given, load_in, config, **how)
        else:
            model, found = auto.from_pretrained(model_id, config=config, **how)
    check_missing(model, found, model_id, body)
    return model


def check_missing(model, found: dict, model_id: str, body=False, flag: str = "--model_id") -> None:
    """ConfigError naming weights that the files lack, by what `from_pretrained` has found."""
    head = model.get_output_embeddings() if body else None
    unread = set() if head is None else set(head.parameters())
    missing = [n for n, p in model.named_parameters() if n in found["missing_keys"] and p not in unread]
    if missing:
        raise ConfigError(
            f"{flag}={model_id} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}: they "
            "would be random. Give a whole model of this kind, or copy the folder again."
        )


# What a chat template is given in any case, and a tag of transformers' own.
OURS = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
OURS |= {"bos_token", "eos_token", "pad_token", "unk_token", "image_token", "namespace"}
GENERATION = r"\{%-?\s*(end)?generation\s*-?%\}"


@functools.cache
def read_by_template(template: str) -> set[str]:
    """Names that a chat template is given beside those that every one is."""
    jinja = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return jinja2.meta.find_undeclared_variables(jinja.parse(re.sub(GENERATION, "", template))) - OURS


def with_template_kwargs(processor, given: dict | None):
    """The processor, whose chat template is given these from now on. ConfigError for names that it never reads."""
    processor.__dict__.pop("apply_chat_template", None)  # of an earlier run
    if not given:
        return processor
    template = processor.chat_template or ""
    known = set().union(*map(read_by_template, template.values() if isinstance(template, dict) else [template]))
    if unknown := sorted(given.keys() - known):
        read = f"it reads {', '.join(sorted(known))}" if known else "it reads nothing of the kind"
        raise ConfigError(f"--chat_template_kwargs: the model's chat template has no {', '.join(unknown)}; {read}.")
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
