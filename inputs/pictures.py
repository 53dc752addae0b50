"""A picture, in any form in which a row, a tool, an environment or a request gives it, as upright RGB of 8 bits.

Trainer and server read with the same function, so both see the same pixels. What cannot be read is a PartError,
which says why. What a server is sent is made here, too.
"""

import base64
import io
import math
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from PIL import Image, ImageOps

from config import shorten
from inputs.parts import PartError

# `datasets` takes seconds, and is imported where rows are of one.

PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow knows 40 more, EPS by way of a program
MAX_PIXELS = 20_000_000  # an image; read from its header, before it is decoded. The server's limit, too
ORIENTATION = 0x0112  # EXIF's tag: how a photograph is turned


def file_bytes(source, local_files: bool) -> bytes:
    """The file that `source` names or holds."""
    if isinstance(source, dict):
        source = source["bytes"] if source.get("bytes") is not None else source.get("path")
    if isinstance(source, str):
        where = urlsplit(source[:8]).scheme.lower()
        if where in ("http", "https"):
            remedy = "download it and give the file's path, or its content as a data: URL or base64"
            raise PartError(f"{shorten(source, 60)}: nothing is fetched; {remedy}")
        if local_files and (where == "file" or os.path.isfile(source)):
            source = Path(unquote(urlsplit(source).path) if where == "file" else source)
        else:
            try:  # with a data: URL around it or without
                return base64.b64decode("".join(source.rpartition("base64,")[2].split()), validate=True)
            except ValueError:
                foreign = "; text of tools and environments never names a file, a pathlib.Path may"
                foreign *= not local_files
                raise PartError(f"{shorten(source, 60)} is neither a file nor base64{foreign}") from None
    if isinstance(source, Path):
        return source.read_bytes()
    if not isinstance(source, (bytes, bytearray, memoryview)):
        raise PartError(f"a {type(source).__name__}; allowed: PIL image, path, bytes, base64")
    return bytes(source)


def open_image(source, local_files: bool = True) -> tuple[Image.Image, bytes | None]:
    """(image with its header read, bytes of its file). source: PIL image, path, file: URL, bytes, base64 text or data:
    URL, or what a data set holds undecoded: {"bytes": ..., "path": ...}. PartError, or what Pillow raises.

    local_files: whether text may name a file; not where it comes from a tool or an environment, which may pass on what
    somebody else wrote.
    """
    unread = getattr(source, "fp", None) if isinstance(source, Image.Image) else None
    if isinstance(unread, io.BytesIO):  # opened only (`opened_value`): decoded here, it would keep its pixels for good
        source = unread.getvalue()
    if isinstance(source, Image.Image):
        image, data = source, None
    else:
        data = file_bytes(source, local_files)
        image = Image.open(io.BytesIO(data), formats=PICTURE_FORMATS)
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS:
        raise PartError(f"{width} x {height} pixels; at most {MAX_PIXELS:,} are taken, scale it down")
    return image, data


def load_image(source, cfg=None, local_files: bool = True) -> tuple[Image.Image, bytes]:
    """(RGB image, upright, what is transparent over white, within --max_pixels; bytes of an image file of exactly these
    pixels). cfg: the TrainConfig; None: in its own size. PartError if it cannot be read."""
    try:
        image, data = open_image(source, local_files)
        image.load()
        as_it_is = data and image.mode == "RGB" and image.getexif().get(ORIENTATION, 1) == 1
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
            as_it_is = False
        image = image.convert("RGB")
        most = (cfg and cfg.max_pixels) or math.inf
        if (scale := (most / (image.width * image.height)) ** 0.5) < 1:
            size = (min(max(1, int(side * scale)), most) for side in image.size)  # a line cannot get thinner
            image, as_it_is = image.resize(tuple(size), Image.Resampling.BICUBIC), False
        if as_it_is:
            return image, data
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return image, buffer.getvalue()
    except PartError:
        raise
    except Exception as error:  # of Pillow, by format and damage: OSError, SyntaxError, struct.error, zlib.error, ...
        raise PartError(f"{str(error) or type(error).__name__:.300}") from error


# ---- data sets ------------------------------------------------------------------------------------------------------


def undecoded(rows, columns: list[str]):
    """A data set whose image columns give files instead of decoded images."""
    import datasets

    def plain(feature):
        if isinstance(feature, datasets.Image):
            return datasets.Image(decode=False)
        inner = getattr(feature, "feature", None)
        return datasets.List(plain(inner)) if inner is not None else feature

    for column in columns:
        rows = rows.cast_column(column, plain(rows.features[column]))
    return rows


def opened_value(value):
    """An image column's value as PIL images that are opened, and decoded when they are first used. What cannot be
    opened stays a file, and costs its row when that is drawn."""
    if isinstance(value, list):
        return [opened_value(one) for one in value]
    if isinstance(value, dict) and value["bytes"] is None and not os.path.isfile(value["path"] or ""):
        import datasets

        return datasets.Image().decode_example(value)  # within an archive, or on the hub
    try:
        return None if value is None else open_image(value)[0]
    except Exception:  # of Pillow: load_image says it
        return value


def encode_image(image) -> str:
    """A data: URL of an image file given as bytes, or of a PIL image, as PNG: the server decodes the same pixels."""
    if not isinstance(image, bytes):
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        image = buffer.getvalue()
    return "data:image/png;base64," + base64.b64encode(image).decode()  # vLLM looks at the bytes, not at the type
