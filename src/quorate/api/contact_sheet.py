"""Pictures of records side by side, as one picture file."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from quorate.core.errors import RequestError
from quorate.storage.atomic import write_atomically

SIDE = 96
GAP = 4
_BACKGROUND = (32, 32, 32)
_SMALLEST = 8
_MAGIC = {
    b"\x89PNG\r\n\x1a\n": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"RIFF": "webp",
}


def picture_kind(value: Any) -> str:
    """What kind of picture a value is, by its first bytes or by its shape; empty if it is none."""
    if isinstance(value, bytes):
        kind = next((kind for magic, kind in _MAGIC.items() if value.startswith(magic)), "")
        is_other = (kind == "webp" and value[8:12] != b"WEBP") or (kind == "bmp" and value[6:10] != bytes(4))
        return "" if is_other else kind
    return "array" if isinstance(value, numpy.ndarray) and _height_width(value.shape, value.dtype) else ""


def pictures_among(records: Sequence[Any]) -> list[Any]:
    """The first picture of each record that has one."""
    values = [list(each.values()) if isinstance(each, dict) else [each] for each in records]
    found = [next((value for value in each if picture_kind(value)), None) for each in values]
    return [each for each in found if each is not None]


def refuse_no_picture_file(file: Path) -> None:
    """Refuse a file for a contact sheet that is not named like one: it would be written over."""
    if file.suffix.lower() != ".png":
        raise RequestError(f"{file} is no name for a contact sheet, which is a PNG file: let it end with .png")


def write_sheet(file: Path, pictures: Sequence[Any]) -> None:
    """Write pictures of any sizes into one PNG, row by row; one that is there is replaced."""
    refuse_no_picture_file(file)
    try:
        from PIL import Image
    except ImportError:
        raise RequestError("a contact sheet needs the package pillow: pip install 'quorate[pictures]'.") from None
    across = math.ceil(math.sqrt(len(pictures)))
    down = math.ceil(len(pictures) / across)
    sheet = Image.new("RGB", (across * (SIDE + GAP) + GAP, down * (SIDE + GAP) + GAP), _BACKGROUND)
    for number, value in enumerate(pictures):
        row, column = divmod(number, across)
        picture = _picture(value)
        scale = SIDE / max(picture.size)
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        # Small ones are shown by their pixels, and not blurred.
        small = picture.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BILINEAR)
        left = GAP + column * (SIDE + GAP) + (SIDE - size[0]) // 2
        sheet.paste(small, (left, GAP + row * (SIDE + GAP) + (SIDE - size[1]) // 2))
    content = io.BytesIO()
    sheet.save(content, "PNG")
    try:
        write_atomically(file, content.getvalue())
    except OSError as error:
        raise RequestError(f"{file} cannot be written: {error.strerror}.") from None


def _picture(value: Any) -> Any:
    from PIL import Image

    if isinstance(value, bytes):
        try:
            opened = Image.open(io.BytesIO(value))
            opened.draft("RGB", (SIDE, SIDE))  # a large JPEG is not decoded at its full size
            return opened.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            # It is shown that there is one, and that it is broken.
            return Image.new("RGB", (SIDE, SIDE), (160, 0, 0))
    shape = _height_width(value.shape, value.dtype)
    assert shape is not None
    pixels = value.reshape(shape) if value.ndim == 1 else value
    if pixels.ndim == 3 and pixels.shape[0] in (1, 3) and pixels.shape[2] not in (1, 3):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    return Image.fromarray(_as_bytes(pixels)).convert("RGB")


def _height_width(shape: tuple[int, ...], dtype: Any) -> tuple[int, int] | None:
    """Of an array that looks like a picture: two dimensions, or three with one or three colours; or a flat square."""
    if dtype.kind not in "uif" or not all(shape):
        return None
    if len(shape) == 1:
        side = math.isqrt(shape[0])
        return (side, side) if dtype == numpy.uint8 and side * side == shape[0] and side >= _SMALLEST else None
    if len(shape) == 3:
        if shape[2] in (1, 3):
            shape = shape[:2]
        elif shape[0] in (1, 3):
            shape = shape[1:]
    return (shape[0], shape[1]) if len(shape) == 2 and min(shape) >= _SMALLEST else None


def _as_bytes(pixels: numpy.ndarray) -> numpy.ndarray:
    """Grey values or colours from 0 to 255; other ranges are stretched."""
    if pixels.dtype == numpy.uint8:
        return numpy.ascontiguousarray(pixels)
    values = numpy.nan_to_num(pixels.astype(numpy.float64))
    low, high = min(0.0, values.min()), max(1.0, values.max())
    return numpy.ascontiguousarray((values - low) / (high - low) * 255).astype(numpy.uint8)
