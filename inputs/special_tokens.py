"""Text written by others - data rows, tools, environments - never becomes control tokens.

A tokenizer turns every "<|im_end|>" it reads into the token that ends a turn, whoever wrote it: a tool's result could
end its own message and go on as the assistant. So foreign text is treated before a chat template sees it:

    guard(messages, processor)      every special token's text in them becomes a marker, a private character of its own
    apply_chat_template(...)        writes the template's own special tokens around it
    tokenize(text, processor)       a copy of the tokenizer knows each marker as one token; in its place come the ids
                                    that "<|im_end|>" has as ordinary text: < | im _ end | >

The ids decode to exactly the text that was written, and text without special tokens is tokenized as always.
"""

import copy
import re
import weakref
from dataclasses import dataclass

# transformers and torch are imported where there are tokenizers and images: environments are tried without them.

# Supplementary private use area A: no text has a reason to contain these, and `guard` takes them out where one does.
MARKERS = 0xF0000
END = chr(MARKERS + 0xFFFD)  # stands where an answer ends in a made-up conversation; see prompts.observation_text
PRIVATE = re.compile(f"[{chr(MARKERS)}-{END}]")
PLACEHOLDERS = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "fake_image_token")


@dataclass
class Markers:
    """What is known of one tokenizer: built at its first use."""

    pattern: re.Pattern  # finds the text of any special token
    marker: dict[str, str]  # special token's text -> the character that stands for it
    processor: object  # a copy that reads each marker as one token
    plain: dict[int, list[int]]  # id of a marker in the copy -> ids of the special token's text as ordinary text


_KNOWN: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def tokenizer_of(processor):
    """The text tokenizer of a processor for text and images; a tokenizer itself."""
    return getattr(processor, "tokenizer", processor)


def markers_of(processor) -> Markers:
    found = _KNOWN.get(processor)
    if found is None:
        found = _KNOWN[processor] = make_markers(processor)
    return found


def special_texts(processor) -> list[str]:
    """Texts that the tokenizer, or the processor of images, reads as something else than text; longest first."""
    tokenizer = tokenizer_of(processor)
    texts = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts |= set(tokenizer.all_special_tokens)
    texts |= {str(getattr(processor, name)) for name in PLACEHOLDERS if getattr(processor, name, None)}
    return sorted(filter(None, texts), key=len, reverse=True)


def make_markers(processor) -> Markers:
    from transformers import AddedToken

    texts = special_texts(processor)
    marker = {text: chr(MARKERS + number) for number, text in enumerate(texts)}
    twin = copy.deepcopy(processor)
    tokenizer = tokenizer_of(twin)
    special = {tokenizer.convert_tokens_to_ids(text) for text in texts}
    pieces = {text: as_text(text, tokenizer, special) for text in texts}  # before the copy knows the markers
    tokenizer.add_tokens([AddedToken(m, special=True, normalized=False) for m in marker.values()])
    plain = {tokenizer.convert_tokens_to_ids(marker[text]): ids for text, ids in pieces.items()}
    pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
    return Markers(pattern, marker, twin, plain)


def as_text(text: str, tokenizer, special: set[int]) -> list[int]:
    """Ids of a special token's text that are no special token: as any other text, or else letter by letter."""
    options = dict(add_special_tokens=False, split_special_tokens=True)
    ids = list(tokenizer(text, **options)["input_ids"])
    if special.isdisjoint(ids):
        return ids
    return [i for letter in text for i in tokenizer(letter, **options)["input_ids"] if i not in special]


def clean(text: str) -> str:
    """The text as valid Unicode: a pair of surrogates becomes its character, a lone half U+FFFD, which every tokenizer,
    file and page can hold. Models write lone halves as JSON escapes, tools cut texts in the middle of an emoji."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
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


def guard(value, processor):
    """Messages or tool schemas with a marker in place of every special token's text."""
    known = markers_of(processor)

    def guarded(text: str) -> str:
        text = PRIVATE.sub("\ufffd", clean(text))
        return known.pattern.sub(lambda found: known.marker[found.group()], text)

    return each_text(value, guarded)


def found_in(value, processor) -> list[str]:
    """Special tokens whose text occurs in messages, in their order."""
    known, found = markers_of(processor), []
    each_text(value, lambda text: found.extend(known.pattern.findall(text)))
    return found


def tokenize(text: str, processor, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a text in which foreign parts are guarded; special tokens in it are the template's."""
    if not PRIVATE.search(text):
        return list(tokenizer_of(processor)(text, add_special_tokens=add_special_tokens)["input_ids"])
    known = markers_of(processor)
    ids = tokenizer_of(known.processor)(text, add_special_tokens=add_special_tokens)["input_ids"]
    return [plain for i in ids for plain in known.plain.get(i, (i,))]


def process(text: str, images: list, processor, add_special_tokens: bool) -> dict:
    """What the processor makes of a guarded text and its images: tensors, those with an entry per token [1, T]."""
    import torch

    options = dict(return_tensors="pt", add_special_tokens=add_special_tokens)
    if not PRIVATE.search(text):
        return dict(processor(text=[text], images=[images], **options))
    known = markers_of(processor)
    encoded = dict(known.processor(text=[text], images=[images], **options))
    before = encoded["input_ids"][0].tolist()
    times = torch.tensor([len(known.plain.get(i, (i,))) for i in before])
    aligned = [name for name, value in encoded.items() if getattr(value, "shape", None) == (1, len(before))]
    for name in aligned:
        encoded[name] = encoded[name].repeat_interleave(times, dim=1)
    encoded["input_ids"] = torch.tensor([[plain for i in before for plain in known.plain.get(i, (i,))]])
    return encoded
