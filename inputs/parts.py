"""The parts of a chat message, with one meaning for prompts, tools, environments, judges and rewards:

    "text", or {"type": "text", "text": "text"}
    {"type": "image"}                                      the next image of the row's column `image` or `images`
    {"type": "image", "image": SOURCE}                     an image of its own; url, path and base64 are other names
    {"type": "image_url", "image_url": {"url": SOURCE}}    the same in OpenAI's form; or SOURCE in place of the dict

SOURCE is anything that pictures.open_image takes. Anything else - a video, a sound, an unknown key - is an error that
names it, so that nothing of a message is lost silently.
"""

from config import shorten

SOURCES = ("image", "url", "path", "base64")  # keys under which an image part may have its image
SETTINGS = ("detail",)  # keys without content, which only OpenAI's servers read
FORMS = "text, image and image_url"
NO_IMAGE = "[an image]"  # stands for an image in plain text


class PartError(ValueError):
    """A part of a message, or a picture, that nothing here can read."""


def text_part(text: str) -> dict:
    return {"type": "text", "text": text}


def parts_of(content) -> list[dict]:
    """A message's content as parts of two kinds: {"type": "text", "text": ...}, with any further keys, and
    {"type": "image"}, with its source, if it has one, as `image`. PartError names the first part that is neither."""
    if content is None:  # an assistant's message that only calls tools
        return []
    if isinstance(content, str):
        return [text_part(content)]
    if not isinstance(content, (list, tuple)):
        raise PartError(f"`content` is a {type(content).__name__}, {shorten(content)}; allowed: text, a list of parts")
    parts = []
    for number, part in enumerate(content):
        try:
            parts.append(read_part(part))
        except PartError as error:
            raise PartError(f"part {number} of `content` {error}; allowed are parts of type {FORMS}") from None
    return parts


def read_part(part) -> dict:
    if isinstance(part, str):
        return text_part(part)
    if not isinstance(part, dict):
        raise PartError(f"is a {type(part).__name__}, {shorten(part, 80)}")
    # `datasets` adds missing keys with None.
    values = {key: value for key, value in part.items() if value is not None and key not in ("type", *SETTINGS)}
    kind = part.get("type")
    if kind == "text" and isinstance(values.get("text"), str) and not values.keys() & {*SOURCES, "image_url"}:
        return {"type": "text"} | values
    if kind == "image_url" and "image_url" in values:
        inner = values["image_url"]
        values = {"image": inner.get("url") if isinstance(inner, dict) else inner}
    sources = [value for key, value in values.items() if key in SOURCES and not (isinstance(value, str) and not value)]
    if kind == "image" and values.keys() <= {*SOURCES} and len(sources) <= 1 or kind == "image_url" and sources:
        return {"type": "image", "image": sources[0]} if sources else {"type": "image"}
    raise PartError(f"is {shorten(part, 80)}")


def text_of_parts(content) -> str:
    """Content as plain text, with NO_IMAGE for each image."""
    return content if isinstance(content, str) else "\n".join(part.get("text", NO_IMAGE) for part in parts_of(content))


def in_usual_form(message: dict) -> dict:
    """The message with a list of parts in the form of `parts_of`; other content unchanged."""
    content = message.get("content")
    return message | {"content": parts_of(content)} if isinstance(content, (list, tuple)) else message


def transcript(messages: list[dict]) -> str:
    """`role: text` lines."""
    return "\n".join(f"{message['role']}: {text_of_parts(message.get('content'))}" for message in messages)


def without_sources(prompt):
    """The prompt for logs, its image parts without their images: each would be a megabyte of letters."""

    def stripped(message):
        if not isinstance(message, dict) or not isinstance(message.get("content"), list):
            return message
        parts = parts_of(message["content"])
        return message | {"content": [{"type": "image"} if part["type"] == "image" else part for part in parts]}

    return [stripped(message) for message in prompt] if isinstance(prompt, list) else prompt
