"""Records of shards to look at: some of them as short texts, their pictures side by side in one file."""

import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from quorate.core.addresses import shown
from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.data.bad_sample import Unreachable
from quorate.observe.quantities import size
from quorate.shards.blocks import ShardBlocks
from quorate.shards.errors import ShardError
from quorate.shards.fetching import StoreAway
from quorate.shards.formats.format import Records
from quorate.shards.index import ShardIndex, load_index
from quorate.storage.atomic import write_atomically

LONGEST = 60
_FEW_VALUES = 4
WHOLE = "record"
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


@dataclass(frozen=True)
class Previewed:
    """A record, its number, the shard that it lies in and its number there; `bad` says why there is no record."""

    sample: int
    file: str
    row: int
    record: Any = None
    bad: str = ""


def preview_data(place: str, count: int, first: int = 0) -> tuple[ShardIndex, tuple[Previewed, ...]]:
    """So many records from that one on, each checked against the index; what cannot be read is among them as bad."""
    index = load_index(place)
    if first >= len(index):
        raise RequestError(f"there is no record {first}: {shown(place)} has {len(index)}, and the first is 0.")
    blocks = ShardBlocks(index)
    found: list[Previewed] = []
    end = min(first + count, len(index))
    try:
        while (sample := first + len(found)) < end:
            number = int(numpy.searchsorted(index.first, sample, side="right")) - 1
            found += _previewed(index, blocks, number, range(sample, min(end, int(index.first[number + 1]))))
    finally:
        blocks.close()
    return index, tuple(found)


def _previewed(index: ShardIndex, blocks: ShardBlocks, number: int, samples: range) -> Iterator[Previewed]:
    block, begin = index.block(number), int(index.first[number])
    records: Records | None = None
    why = ""
    try:
        records = blocks.read(number)
    except StoreAway:
        raise  # which says nothing about any record
    except (ShardError, Unreachable) as error:
        # No record of the block can be read: it is told from where on there may be others.
        why = f"{error.message.rstrip('.')}. The block that it is in ends with sample {begin + block.records - 1}."
    for sample in samples:
        row = sample - begin
        place = (sample, block.file, block.row + row)
        if records is None:
            yield Previewed(*place, bad=why)
            continue
        try:
            yield Previewed(*place, records[row])
        except ShardError as error:
            yield Previewed(*place, bad=error.message)


def short_fields(record: Any) -> dict[str, str]:
    """The fields of a record, each as a short text; a record that has no fields is one itself."""
    values = record if isinstance(record, dict) else {WHOLE: record}
    return {str(name): _short(value) for name, value in values.items()}


def _short(value: Any) -> str:
    """What a value is, on one line."""
    if isinstance(value, bytes):
        kind = picture_kind(value)
        with contextlib.suppress(UnicodeDecodeError):
            if not kind and len(text := value.decode()) <= LONGEST and text.isprintable():
                return text
        return f"{kind or 'bytes'}, {size(len(value))}"
    if isinstance(value, numpy.ndarray):
        few = " ".join(f"{each:.4g}" if value.dtype.kind in "iufb" else str(each) for each in value.flat[:_FEW_VALUES])
        more = " …" if value.size > _FEW_VALUES else ""
        return f"{value.dtype} {list(value.shape)}: {few}{more}"
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    line = " ".join(text.split()) if "\n" in text else text
    plain = "".join(each if each.isprintable() else "\ufffd" for each in line)
    return plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 1]}…"


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
        raise RequestError(f"{file} is not a name for a contact sheet, which is a PNG file: it must end with .png")


def write_contact_sheet(file: Path, pictures: Sequence[Any]) -> None:
    """Write pictures of any sizes into one PNG, row by row; one that is there is replaced."""
    refuse_no_picture_file(file)
    try:
        from PIL import Image
    except ImportError:
        raise RequestError(f"a contact sheet needs the package pillow: {install_of('pictures')}.") from None
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
