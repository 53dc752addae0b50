"""A picture, in any form in which a row, a tool, an environment or a request gives it, as upright RGB of 8 bits.

Trainer and server read with the same function, so both see the same pixels. What cannot be shown as it is meant - a
damaged file, an animation, numbers of which nobody said what is black - is a PictureError, which says why.
"""

import base64
import binascii
import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from cli import shorten

# `datasets` takes seconds, and is imported where rows are of one.

ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}  # what a complete file ends in
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")  # Pillow knows 40 more, EPS by way of a program
MAX_PIXELS = 20_000_000  # an image; read from its header, before it is decoded. The server's limit, too
MAX_BYTES = 10 * MAX_PIXELS  # of a file
ORIENTATION = 0x0112  # EXIF's tag: how a photograph is turned


class PictureError(ValueError):
    """What is wrong with a picture."""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """PictureError for whatever Pillow raises: beside OSError also SyntaxError, struct.error, zlib.error and others,
    by format and kind of damage."""
    try:
        yield
    except PictureError:
        raise
    except UnidentifiedImageError:  # its own message is the address of a buffer
        raise PictureError(f"cannot identify image file; read are {', '.join(PICTURE_FORMATS)}") from None
    except Exception as error:
        raise PictureError(f"{str(error) or type(error).__name__:.300}") from error


def file_bytes(source, local_files: bool) -> bytes:
    """The file that `source` names or holds."""
    if isinstance(source, dict) and ("bytes" in source or "path" in source):
        source = source["bytes"] if source.get("bytes") is not None else source.get("path")
    if isinstance(source, str):
        where = urlsplit(source[:8]).scheme.lower()
        if where in ("http", "https"):
            remedy = "download it and give the file's path, or its content as a data: URL or base64"
            raise PictureError(f"{shorten(source, 60)}: nothing is fetched; {remedy}")
        if local_files and where == "file":
            source = Path(unquote(urlsplit(source).path))
        elif local_files and where != "data" and os.path.isfile(source):
            source = Path(source)
        else:
            return decoded(source, local_files)
    if isinstance(source, Path):
        if not source.is_file():  # a pipe would be waited for
            raise PictureError(f"{source} is no file")
        if source.stat().st_size > MAX_BYTES:
            raise PictureError(f"{source} has {source.stat().st_size:,} bytes; at most {MAX_BYTES:,} are taken")
        return source.read_bytes()
    if not isinstance(source, (bytes, bytearray, memoryview)):
        raise PictureError(f"a {type(source).__name__}; allowed: PIL image, path, bytes, base64")
    return bytes(source)


def decoded(text: str, local_files: bool) -> bytes:
    """base64, with or without a data: URL around it, with or without line breaks."""
    try:
        if len(text) > 2 * MAX_BYTES:
            raise PictureError(f"{len(text):,} characters of base64; at most {2 * MAX_BYTES:,} are taken")
        found = base64.b64decode("".join(text.rpartition("base64,")[2].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        if isinstance(error, PictureError):
            raise
        found = b""
    if not found:
        remedy = "" if local_files else "; text of tools and environments never names a file, a pathlib.Path may"
        raise PictureError(f"{shorten(text, 60)} is neither a file nor base64{remedy}")
    return found


def open_image(source, local_files: bool = True) -> tuple[Image.Image, bytes | None]:
    """(image with its header read, bytes of its file). source: PIL image, path, file: URL, bytes, base64 text or data:
    URL, or what a data set holds undecoded: {"bytes": ..., "path": ...}. PictureError for anything else.

    local_files: whether text may name a file; not where it comes from a tool or an environment, which may pass on what
    somebody else wrote.
    """
    with reading():
        unread = getattr(source, "fp", None) if isinstance(source, Image.Image) else None
        if isinstance(unread, io.BytesIO):  # opened only (`opened`): decoded here, it would keep its pixels for good
            source = unread.getvalue()
        if isinstance(source, Image.Image):
            image, data = source, None
        else:
            data = file_bytes(source, local_files)
            image = Image.open(io.BytesIO(data), formats=PICTURE_FORMATS)
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise PictureError(f"{width} x {height} pixels; at most {MAX_PIXELS:,} are taken, scale it down")
        if width * height == 0:
            raise PictureError(f"{width} x {height} pixels; it shows nothing")
        # A JPEG with others behind it (MPO) is a photograph with its depths, lights or preview.
        if getattr(image, "is_animated", False) and image.format != "MPO":
            raise PictureError(
                "an animation, or a file of several pages, and one picture can be shown; give its frames as images of "
                "their own: [frame.copy() for frame in PIL.ImageSequence.Iterator(image)]"
            )
        if data is not None and ENDS.get(image.format, b"") not in data[-1024:]:
            image.load()  # cut short, or with something behind it: decoding tells
    return image, data


def turned(image: Image.Image) -> int:
    """How a photograph has to be turned, as EXIF counts it; 1: it is upright. EXIF that cannot be read says nothing.

    Load a PNG before: Pillow would do it here, in search of EXIF behind the pixels, and what it says of damaged ones it
    says once.
    """
    try:
        return image.getexif().get(ORIENTATION, 1)
    except Exception:  # as in `reading`
        return 1


def upright_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) that an opened image will have; of a PNG, which would be decoded for it, as it lies. Pillow turns
    TIFFs itself, and says so from the beginning."""
    sideways = image.format not in ("PNG", "TIFF") and turned(image) in range(5, 9)
    return image.size[::-1] if sideways else image.size


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright, 8 bits a channel, what is transparent over white."""
    image = ImageOps.exif_transpose(image) if turned(image) in range(2, 9) else image
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        return grey(image).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("LA") if image.mode == "La" else image
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def grey(image: Image.Image) -> Image.Image:
    """8 bits of grey from 16, or from whole numbers or floats of 32, of which Pillow makes white or black. These do
    not say what is white: 1 (of floats), 255 or 65,535, whichever is the first that holds all values."""
    values = np.asarray(image).astype(np.float64)
    low, high = values.min(), values.max()
    tops = (65535,) if image.mode.startswith("I;") else (1, 255, 65535) if image.mode == "F" else (255, 65535)
    white = next((top for top in tops if 0 <= low and high <= top), None)
    if white is None:  # or nan
        raise PictureError(f"its pixels are numbers from {low:g} to {high:g}; scale them to 0 - 255, and save 8 bits")
    eight = np.round(values * (255 / white)).astype(np.uint8)
    clear = image.info.get("transparency")  # of a PNG: the value that is transparent
    if isinstance(clear, int):
        eight[values == clear] = 255
    return Image.fromarray(eight)


def read_image(source, cfg=None, local_files: bool = True) -> tuple[Image.Image, bytes | None]:
    """(RGB image within --min_pixels and --max_pixels, bytes of its file if that holds exactly these pixels).

    cfg: the TrainConfig; None: in its own size. PictureError if it cannot be read.
    """
    image, data = open_image(source, local_files)
    with reading():
        image.load()
        plain = image.mode == "RGB" and not image.has_transparency_data and turned(image) not in range(2, 9)
        image = to_rgb(image)
    size = scaled(image.size, cfg)
    if size != image.size:
        image, plain = image.resize(size, Image.Resampling.BICUBIC), False
    return image, data if plain else None


def scaled(size: tuple[int, int], cfg) -> tuple[int, int]:
    """(width, height) within --min_pixels and --max_pixels."""
    pixels = size[0] * size[1]
    wanted = max(pixels, (cfg and cfg.min_pixels) or 0)
    wanted = min(wanted, (cfg and cfg.max_pixels) or wanted)
    scale = (wanted / pixels) ** 0.5
    rounding = int if scale < 1 else lambda x: -int(-x // 1)
    return tuple(min(max(1, rounding(side * scale)), wanted) for side in size)  # a line cannot get thinner


def load_image(source, cfg=None, local_files: bool = True) -> tuple[Image.Image, bytes]:
    """(RGB image as `read_image` gives it, bytes of an image file of exactly these pixels)."""
    image, data = read_image(source, cfg, local_files)
    if data is None:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        data = buffer.getvalue()
    return image, data


def data_url(source, local_files: bool = True) -> str:
    """The picture, as `load_image` gives it, as a data: URL."""
    data = load_image(source, local_files=local_files)[1]
    return f"data:{open_image(data)[0].get_format_mimetype()};base64,{base64.b64encode(data).decode()}"


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


def opened(rows) -> Iterator[dict]:
    """The rows of a data set with `image` and `images` as PIL images that are opened, and decoded when they are first
    used: all decoded at once fill the memory, and one that is damaged would end the run without its row's number.
    What cannot be opened stays a file, and check_images names it. Rows of a list as they are."""
    names = [c for c in ("image", "images") if c in getattr(rows, "column_names", ())]
    files = undecoded(rows, names) if names else rows
    names = [c for c in names if files.features[c] != rows.features[c]]
    for row in files:
        yield row | {name: opened_value(row[name]) for name in names} if names else row


def opened_value(value):
    if isinstance(value, list):
        return [opened_value(one) for one in value]
    try:
        with reading():
            if isinstance(value, dict) and value["bytes"] is None and not os.path.isfile(value["path"] or ""):
                import datasets

                return datasets.Image().decode_example(value)  # within an archive, or on the hub
            if value is None:
                return None
            image, data = open_image(value)
            if image.format == "PNG":
                if b"eXIf" not in data:
                    return image
                image.load()
            return ImageOps.exif_transpose(image) if turned(image) in range(2, 9) else image  # as `datasets` does
    except PictureError:
        return value
