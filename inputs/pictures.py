"""Read a picture, in any form that a row, a tool, an environment or a request has it, as upright RGB of 8 bits.

Trainer and server read with the same function, so both see the same pixels. PartError says why a picture cannot be
read. The image files for a server are also made here.
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

# `datasets` takes seconds to import: only rows of a data set need it.

PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow reads 40 more; for EPS it runs a program
MAX_PIXELS = 20_000_000  # per image, checked in its header before it is decoded; the server's limit as well
ORIENTATION = 0x0112  # EXIF's tag for the rotation of a photograph


def file_bytes(source, local_files: bool) -> bytes:
    """The content of the file that `source` names or holds."""
    if isinstance(source, dict):
        source = source["bytes"] if source.get("bytes") is not None else source.get("path")
    if isinstance(source, str):
        scheme = urlsplit(source[:8]).scheme.lower()
        if scheme in ("http", "https"):
            remedy = "download it and give the file's path, or its content as a data: URL or base64"
            raise PartError(f"{shorten(source, 60)}: nothing is fetched; {remedy}")
        if local_files and (scheme == "file" or os.path.isfile(source)):
            source = Path(unquote(urlsplit(source).path) if scheme == "file" else source)
        else:
            try:  # a data: URL or bare base64
                return base64.b64decode("".join(source.rpartition("base64,")[2].split()), validate=True)
            except ValueError:
                hint = "" if local_files else "; text of tools and environments never names a file, a pathlib.Path may"
                raise PartError(f"{shorten(source, 60)} is neither a file nor base64{hint}") from None
    if isinstance(source, Path):
        return source.read_bytes()
    if not isinstance(source, (bytes, bytearray, memoryview)):
        raise PartError(f"a {type(source).__name__}; allowed: PIL image, path, bytes, base64")
    return bytes(source)


def open_image(source, local_files: bool = True) -> tuple[Image.Image, bytes | None]:
    """(image with its header read, bytes of its file). source: PIL image, path, file: URL, bytes, base64 text or data:
    URL, or the undecoded image of a data set, {"bytes": ..., "path": ...}. PartError, or any error of Pillow.

    local_files: whether text may name a file. It may not in text of tools and environments, which may pass on what
    somebody else wrote.
    """
    fp = getattr(source, "fp", None) if isinstance(source, Image.Image) else None
    if isinstance(fp, io.BytesIO):  # opened by `opened_value`: decoding it here would keep its pixels for good
        source = fp.getvalue()
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
    """(RGB image, upright, transparency over white, within --max_pixels; bytes of an image file with exactly these
    pixels). cfg: the TrainConfig; None keeps the size. PartError if it cannot be read."""
    try:
        image, data = open_image(source, local_files)
        image.load()
        unchanged = data and image.mode == "RGB" and image.getexif().get(ORIENTATION, 1) == 1
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
            unchanged = False
        image = image.convert("RGB")
        limit = (cfg and cfg.max_pixels) or math.inf
        if (scale := (limit / (image.width * image.height)) ** 0.5) < 1:
            size = (min(max(1, int(side * scale)), limit) for side in image.size)  # no side below 1
            image, unchanged = image.resize(tuple(size), Image.Resampling.BICUBIC), False
        if unchanged:
            return image, data
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return image, buffer.getvalue()
    except PartError:
        raise
    except Exception as error:  # from Pillow, by format and damage: OSError, SyntaxError, struct.error, ...
        raise PartError(f"{str(error) or type(error).__name__:.300}") from error


# ---- data sets ------------------------------------------------------------------------------------------------------


def undecoded_images(rows, columns: list[str]):
    """The data set with image columns that return files instead of decoded images."""
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
    """An image column's value as PIL images, opened now and decoded when they are first used. A file that cannot be
    opened stays as it is, and costs its row when that is drawn."""
    if isinstance(value, list):
        return [opened_value(item) for item in value]
    if isinstance(value, dict) and value["bytes"] is None and not os.path.isfile(value["path"] or ""):
        import datasets

        return datasets.Image().decode_example(value)  # within an archive, or on the hub
    try:
        return None if value is None else open_image(value)[0]
    except Exception:  # from Pillow: load_image will report it
        return value


def encode_image(image: bytes) -> str:
    """A data: URL of an image file, so that the server decodes the same pixels."""
    return "data:image/png;base64," + base64.b64encode(image).decode()  # vLLM looks at the bytes, not at the type
