"""Text written by others - data rows, tools, environments - never becomes control tokens.

A tokenizer turns every "<|im_end|>" it reads into the token that ends a turn, whoever wrote it: a tool's result could
end its own message and go on as the assistant. So before a chat template sees foreign text, `guard` breaks the text of
every special token in it by a blank, "< |im_end|>". The template's own special tokens come after that.
"""

import functools
import re

END = chr(0xFFFFD)  # stands where an answer ends in a made-up conversation; see prompts.observation_text
PLACEHOLDERS = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "fake_image_token")


def tokenizer_of(processor):
    """The text tokenizer of a processor for text and images; a tokenizer itself."""
    return getattr(processor, "tokenizer", processor)


def special_texts(processor) -> list[str]:
    """Texts that the tokenizer, or the processor of images, reads as something else than text; longest first."""
    tokenizer = tokenizer_of(processor)
    texts = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts |= set(tokenizer.all_special_tokens)
    texts |= {str(getattr(processor, name)) for name in PLACEHOLDERS if getattr(processor, name, None)}
    return sorted(filter(None, texts), key=len, reverse=True)


@functools.lru_cache(maxsize=16)
def pattern_of(processor) -> re.Pattern:
    return re.compile("|".join(map(re.escape, special_texts(processor))) or "(?!)")


def guard(value, processor):
    """Messages or tool schemas in which no text reads like a special token."""
    pattern = pattern_of(processor)

    def guarded(text: str) -> str:
        text = clean(text).replace(END, "\ufffd")
        for _ in range(3):  # one may stand within another
            text = pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", text)
        return pattern.sub("\ufffd", text)

    return each_text(value, guarded)


def found_in(value, processor) -> list[str]:
    """Special tokens whose text occurs in messages, in their order."""
    found: list[str] = []
    each_text(value, lambda text: found.extend(pattern_of(processor).findall(text)))
    return found


def clean(text: str) -> str:
    """The text as valid Unicode: a pair of surrogates becomes its character, a lone half U+FFFD, which every tokenizer,
    file and page can hold. Models write lone halves as JSON escapes, tools cut texts in the middle of an emoji."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def each_text(value, function):
    """The value with `function` applied to every text in it: in lists, tuples and dicts, their keys included."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {each_text(key, function): each_text(item, function) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [each_text(item, function) for item in value]
    return value


def begins_by_itself(text: str, processor) -> bool:
    """Whether a text that was rendered beforehand begins with what the tokenizer would put before it: BOS."""
    tokenizer = tokenizer_of(processor)
    first = tokenizer("")["input_ids"][:1]
    return bool(first) and text.startswith(tokenizer.decode(first))


def tokenize(text: str, processor, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a rendered text, whose special tokens are the template's."""
    return list(tokenizer_of(processor)(text, add_special_tokens=add_special_tokens)["input_ids"])
