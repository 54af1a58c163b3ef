import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from quorate.checkpoint.tensor_file import DTYPES, TensorFile, tensors_in
from quorate.core.errors import CheckpointError

TENSORS = {
    "bytes": torch.arange(3, dtype=torch.uint8),
    "weight": torch.arange(6.0).reshape(2, 3),
    "nothing": torch.empty(0, 4),
    "scalar": torch.tensor(7.0, dtype=torch.float64),
}


def content_of(tensors: dict[str, torch.Tensor]) -> memoryview:
    return memoryview(bytearray(b"".join(TensorFile(tensors).chunks())))


def crafted(entries: Any, data: int = 16, length: int | None = None) -> memoryview:
    """A file with a list of one's own, and that many bytes of content."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return memoryview(bytearray((len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)))


def entry(dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


class TestThereAndBack:
    def test_equal_in_the_same_order_as_any_reader_has_them(self) -> None:
        content = content_of(TENSORS)
        assert len(content) == TensorFile(TENSORS).size
        found, theirs = tensors_in(content), load(bytes(content))
        assert list(found) == list(TensorFile(TENSORS).tensors)
        assert set(found) == set(theirs) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found[name], tensor)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_every_type(self, dtype: torch.dtype) -> None:
        tensor = torch.arange(0, 2, dtype=torch.uint8).repeat(8).view(torch.bool)
        tensor = tensor if dtype is torch.bool else torch.arange(16, dtype=torch.uint8).view(dtype)
        (found,) = tensors_in(content_of({"x": tensor})).values()
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))

    def test_what_others_wrote_with_metadata(self) -> None:
        found = tensors_in(memoryview(bytearray(save({"x": torch.ones(2)}, metadata={"format": "pt"}))))
        assert torch.equal(found["x"], torch.ones(2))

    def test_no_tensors_at_all(self) -> None:
        assert tensors_in(content_of({})) == {}

    def test_are_views_that_keep_the_memory_alive_and_can_be_written(self) -> None:
        content = content_of(TENSORS)
        weight = tensors_in(content)["weight"]
        weight[1, 2] = 99
        assert tensors_in(content)["weight"][1, 2] == 99
        del content
        assert weight[1].tolist() == [3, 4, 99]
        # So saved by itself it takes its own bytes only.
        assert weight.untyped_storage().nbytes() == 24


DAMAGED = "damaged, or does not fit"
HOSTILE: dict[str, tuple[memoryview, str]] = {
    "empty": (memoryview(bytearray()), "0 bytes do not hold a list"),
    "seven bytes": (memoryview(bytearray(7)), "7 bytes do not hold a list"),
    "a list longer than the file": (crafted({}, length=1000), "do not hold a list of 1,000"),
    "a list of 2**64 - 1 bytes": (crafted({}, length=2**64 - 1), "do not hold a list"),
    "a list of no bytes": (crafted({}, length=0), DAMAGED),
    "not JSON": (crafted(b"{"), DAMAGED),
    "not UTF-8": (crafted(b"\xff\xfe{}"), DAMAGED),
    "nested without end": (crafted(b"[" * 100_000), DAMAGED),
    "a number of a million digits": (crafted(b'{"x": ' + b"9" * 1_000_000 + b"}"), DAMAGED),
    "a name that comes twice": (crafted(b'{"x": 1, "x": 2}'), DAMAGED),
    "not an object": (crafted([1]), DAMAGED),
    "an entry that is no object": (crafted({"x": 7}), DAMAGED),
    "an entry of nothing": (crafted({"x": {}}), DAMAGED),
    "unknown type": (crafted({"x": entry("F13")}), DAMAGED),
    "type that is no text": (crafted({"x": entry(["F32"])}), DAMAGED),
    "shape that is no list": (crafted({"x": entry(shape=4)}), DAMAGED),
    "negative shape": (crafted({"x": entry(shape=[-4])}), DAMAGED),
    "negative shapes": (crafted({"x": entry(shape=[-2, -2])}), DAMAGED),
    "fractional shape": (crafted({"x": entry(shape=[4.0])}), DAMAGED),
    "shape of truth": (crafted({"x": entry(shape=[True, 4])}), DAMAGED),
    "shape beyond 64 bits": (crafted({"x": entry(shape=[2**64])}), DAMAGED),
    "too many dimensions": (crafted({"x": entry(shape=[1] * 1000 + [4])}), DAMAGED),
    "three offsets": (crafted({"x": entry(offsets=[0, 8, 16])}), DAMAGED),
    "negative offset": (crafted({"x": entry(offsets=[-16, 0])}), DAMAGED),
    "offsets in reverse": (crafted({"x": entry(offsets=[16, 0])}), DAMAGED),
    "fractional offsets": (crafted({"x": entry(offsets=[0.0, 16.0])}), DAMAGED),
    "offsets that do not fit the shape": (crafted({"x": entry(shape=[5])}), DAMAGED),
    "end beyond the file": (crafted({"x": entry(shape=[8], offsets=[0, 32])}), DAMAGED),
    "huge end": (crafted({"x": entry("U8", [2**62], [0, 2**62])}), DAMAGED),
    "empty, of an impossible shape": (crafted({"x": entry(shape=[0, 2**62, 2**62], offsets=[0, 0])}, 0), "cannot be"),
    "overlap": (crafted({"x": entry(), "y": entry(shape=[2], offsets=[8, 16])}), DAMAGED),
    "the same twice": (crafted({"x": entry(), "y": entry()}), DAMAGED),
    "gap before": (crafted({"x": entry(shape=[2], offsets=[8, 16])}), DAMAGED),
    "gap between": (crafted({"x": entry("U8", [4], [0, 4]), "y": entry("U8", [8], [8, 16])}), DAMAGED),
    "bytes left over": (crafted({"x": entry(shape=[2], offsets=[0, 8])}), DAMAGED),
    "not aligned": (crafted({"x": entry("U8", [4], [0, 4]), "y": entry("F64", [1], [4, 12])}, 12), DAMAGED),
}


class TestHostile:
    @pytest.mark.parametrize("case", HOSTILE)
    def test_is_refused(self, case: str) -> None:
        content, words = HOSTILE[case]
        with pytest.raises(CheckpointError, match=words) as told:
            tensors_in(content)
        assert len(str(told.value)) < 500

    @given(data=st.data())
    @settings(max_examples=300, deadline=None)
    def test_any_changed_list_is_refused_or_stays_within_the_file(self, data: st.DataObject) -> None:
        content = bytearray(content_of(TENSORS))
        length = len(TensorFile(TENSORS).header)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, length - 1))
            content[at] = data.draw(st.sampled_from(list(b'0123456789{}[],:"FIU \0\xff')))
        try:
            found = tensors_in(memoryview(content))
        except CheckpointError:
            return
        assert sum(tensor.nbytes for tensor in found.values()) <= len(content)
        for tensor in found.values():
            tensor.clone()

    @given(
        entries=st.dictionaries(
            st.text(max_size=3),
            st.one_of(
                st.builds(
                    entry,
                    st.sampled_from([*DTYPES.values(), "F4", ""]),
                    st.lists(st.one_of(st.integers(-1, 5), st.integers()), max_size=4),
                    st.lists(st.one_of(st.integers(-1, 20), st.integers()), min_size=1, max_size=3),
                ),
                st.none(),
                st.text(max_size=3),
            ),
            max_size=3,
        )
    )
    @settings(max_examples=300, deadline=None)
    def test_any_made_up_list_is_refused_or_fits(self, entries: dict[str, Any]) -> None:
        try:
            found = tensors_in(crafted(entries))
        except CheckpointError:
            return
        assert sum(tensor.nbytes for tensor in found.values()) == 16
