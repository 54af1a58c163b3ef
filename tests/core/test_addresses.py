import pytest

from quorate.core.addresses import join_address, split_address


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [("127.0.0.1", 80, "127.0.0.1:80"), ("::1", 4711, "[::1]:4711"), ("node-3.cluster", 1, "node-3.cluster:1")],
)
def test_an_address_is_written_and_read_back(host: str, port: int, address: str) -> None:
    assert join_address(host, port) == address
    assert split_address(address) == (host, port)


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:http", "::1:80", "[]:80", "host:-1"])
def test_what_is_not_an_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="write host:port"):
        split_address(address)
