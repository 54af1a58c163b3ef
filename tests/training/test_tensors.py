import torch
from hypothesis import given
from hypothesis import strategies as st

from quorate.training.tensors import content, digests, named_bytes, same_bits


def test_bits_not_values_are_compared() -> None:
    zero, nan = torch.tensor([0.0]), torch.tensor([torch.nan])
    assert torch.equal(zero, -zero) and not same_bits(zero, -zero)
    assert not torch.equal(nan, nan) and same_bits(nan, nan.clone())
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert same_bits(torch.zeros(0), torch.zeros(0))
    assert same_bits(torch.tensor(3), torch.tensor(3))


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]))
def test_every_type_has_its_bytes(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).to(dtype).reshape(2, 3)
    assert content(tensor).nbytes == 6 * dtype.itemsize
    assert named_bytes("x", tensor).shape == (2, 3)
    assert digests([("x", tensor)]) == digests([("x", tensor.clone())])


def test_strides_do_not_count_and_shapes_do() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    across = tensor.t().contiguous().t()
    assert not across.is_contiguous()
    assert digests([("x", across)]) == digests([("x", tensor)])
    assert digests([("x", tensor.reshape(3, 2))]) != digests([("x", tensor)])


def test_a_parameter_is_read_without_its_graph() -> None:
    assert bytes(content(torch.nn.Parameter(torch.ones(1)))) == b"\0\0\x80?"
