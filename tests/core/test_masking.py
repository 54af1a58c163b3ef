import json
import string
from urllib.parse import quote

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from quorate.core.masking import LEFT_OUT, MASK, LineMasker, Secrets, is_secret, secrets_in, shown_value, url_secrets

LETTERS = string.ascii_letters + string.digits
secrets = st.text(st.sampled_from(LETTERS + "äß€/+=_-. \"\\'"), min_size=6, max_size=40).map(str.strip)
secrets = secrets.filter(lambda text: len(text) >= 6 and "*" not in text)
texts = st.text(max_size=200)


@given(texts, secrets, texts)
def test_whatever_surrounds_a_secret_it_is_masked(before: str, secret: str, after: str) -> None:
    assume(secret not in MASK)
    masked = Secrets([secret]).mask(f"{before}{secret}{after}")
    assert secret not in masked
    assert MASK in masked


@given(texts, secrets, texts)
def test_a_secret_in_json_or_in_a_url_is_masked_too(before: str, secret: str, after: str) -> None:
    known = Secrets([secret])
    for written in (json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], quote(secret, safe="")):
        assert written not in known.mask(f"{before}{written}{after}")


@given(st.text(st.sampled_from(LETTERS + " .,:;/-_#%()[]{}=\n\täöü→"), max_size=400))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assume("://" not in text and "key=" not in text.lower())
    known = Secrets(["a-secret-that-is-not-in-it"])
    assume(known.known[0] not in text)
    assert known.mask(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "step 120/400   loss 0.4312   1,443 samples/s",
        "GET https://example.org:8080/data/train.parquet?page=2&size=10",
        "see https://example.org/a@b and http://[::1]:9000/x@y",
        "num_tokens=50000, eos_token='<|endoftext|>', tokenizer=gpt2, key_dim=64",
        "the bearer of bad news; basic training; authorization is required",
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "s3://bucket/prefix/step-00000010",
    ],
)
def test_what_training_prints_stays_as_it_is(text: str) -> None:
    assert Secrets().mask(text) == text


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("https://user:pa55word@host/path", "pa55word"),
        ("postgresql://mlflow:with/slash@db:5432/x", "with/slash"),
        ("https://host/x?X-Amz-Signature=abcdef012345&page=2", "abcdef012345"),
        ("https://host/x?access_token=abc", "=abc"),
        ("Authorization: Bearer abc.def", "abc.def"),
        ('{"Authorization": "Basic dXNlcjpwYXNz"}', "dXNlcjpwYXNz"),
        ("curl -H 'bearer 0123456789abcdefXYZ'", "0123456789abcdefXYZ"),
        ("id AKIAIOSFODNN7EXAMPLE used", "AKIAIOSFODNN7EXAMPLE"),
        ("aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "wJalrXUtnFEMI"),
        (f"pushed with hf_{'a1' * 17}", "hf_a1a1"),
        (f"ghp_{'Ab1' * 12}", "ghp_Ab1"),
        ("-----BEGIN PRIVATE KEY-----\nMIIabc\n-----END PRIVATE KEY-----", "MIIabc"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, secret: str) -> None:
    assert secret not in Secrets().mask(text)
    assert MASK in Secrets().mask(text)


@given(
    st.lists(st.text(st.sampled_from(LETTERS + " \r\n\t€"), max_size=60), max_size=8),
    st.text(st.sampled_from(LETTERS), min_size=6, max_size=30),
    st.lists(st.integers(1, 17), min_size=1),
)
@example(["", ""], "secret", [1])
def test_however_it_is_cut_into_writes_no_secret_comes_through(
    around: list[str], secret: str, sizes: list[int]
) -> None:
    data = secret.join(around).encode()
    masker = LineMasker(Secrets([secret]).mask)
    lines = [line for piece in cut(data, sizes) for line in masker.feed(piece)] + masker.finish()
    assert secret not in "\n".join(lines)
    assert "".join(lines).replace("\r", "") == Secrets([secret]).mask(data.decode()).replace("\r", "").replace("\n", "")


@given(st.lists(st.integers(1, 30), min_size=1))
def test_a_private_key_that_comes_line_by_line_is_masked(sizes: list[int]) -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\ndefghi\n-----END RSA PRIVATE KEY-----"
    masker = LineMasker(Secrets().mask)
    data = f"before\n{key}\nafter\n".encode()
    lines = [line for piece in cut(data, sizes) for line in masker.feed(piece)] + masker.finish()
    assert lines == ["before", MASK, "after"]


def test_a_line_in_which_a_private_key_begins_stays_one_line() -> None:
    masker = LineMasker(Secrets().mask)
    first = masker.feed(b"before\nits key -----BEGIN PRIVATE KEY-----\nMIIabc\n")
    assert first == ["before"]
    assert masker.feed(b"-----END PRIVATE KEY-----\n") == [f"its key {MASK}"]


def test_a_private_key_without_an_end_does_not_hold_back_what_follows() -> None:
    masker = LineMasker(Secrets().mask)
    masker.feed(b"-----BEGIN PRIVATE KEY-----\n")
    assert len([line for _ in range(1000) for line in masker.feed(b"a line that has nothing to do with it\n")]) > 900


@given(
    st.lists(st.sampled_from(["secret-number-one", "x", "€", "https://u:", "@h", " "]), max_size=300),
    st.lists(st.integers(1, 60), min_size=1),
)
def test_a_line_that_is_too_long_is_cut_where_no_secret_is(words: list[str], sizes: list[int]) -> None:
    known, text = Secrets(["secret-number-one"]), "".join(words)
    masker = LineMasker(known.mask, limit=256, reserve=64)
    lines = [line for piece in cut(f"{text}\nnext\n".encode(), sizes) for line in masker.feed(piece)]
    first, second = lines + masker.finish()
    assert "secret" not in first
    assert first.endswith(LEFT_OUT) or len(first) <= 256
    assert second == "next"


@given(st.binary(max_size=300), st.lists(st.integers(1, 20), min_size=1))
def test_bytes_of_any_kind_become_lines(data: bytes, sizes: list[int]) -> None:
    masker = LineMasker(lambda text: text)
    whole = LineMasker(lambda text: text)
    lines = [line for piece in cut(data, sizes) for line in masker.feed(piece)] + masker.finish()
    assert lines == whole.feed(data) + whole.finish()


def test_many_megabytes_without_a_line_end_are_masked_in_seconds() -> None:
    masker = LineMasker(Secrets(["hunter22"]).mask)
    (line,) = masker.feed(b"https://a:b" * 400_000 + b"hunter22")
    assert masker.feed(b"still the same line") == []
    assert masker.feed(b"\nanother\n") == ["another"]
    assert line.endswith(LEFT_OUT)
    assert "hunter" not in line


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("WANDB_API_KEY", "0123456789abcdef", True),
        ("HF_TOKEN", "hf_abcdefgh1234", True),
        ("MLFLOW_TRACKING_PASSWORD", "correct", True),
        ("dbPassword", "hunter2", True),
        ("client_secret", "abcdef", True),
        ("PASSWORD", "short", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("TOKEN_FILE", "/run/secrets/token1", False),
        ("eos_token", "<|endoftext|>", False),
        ("sort_key", "timestamp", False),
        ("num_tokens", "50000000", False),
        ("PATH", "/usr/bin:/bin", False),
        ("PWD", "/home/somebody/project1", False),
    ],
)
def test_secrets_are_known_by_their_names(name: str, value: str, secret: bool) -> None:
    assert is_secret(name, value) is secret


def test_nested_sections_are_looked_through() -> None:
    values = {"a": {"password": "hunter22"}, "b": 1, "api_key": "0123456789abc", "width": 64, "passphrase": 12345678}
    assert list(secrets_in(values)) == ["hunter22", "0123456789abc", "12345678"]


def test_a_value_is_shown_masked_where_its_key_says_so() -> None:
    assert shown_value("params.api_key", "0123456789abc") == MASK
    assert shown_value("checkpoint.to", ["s3://a:bcdefg@host/x"]) == [f"s3://{MASK}@host/x"]
    assert shown_value("params.width", 64) == 64


def test_every_line_of_a_secret_of_several_is_masked() -> None:
    key = "-----BEGIN KEY-----\nabcdefghijk\nlmnopqrstuv\n-----END KEY-----"
    assert Secrets([key]).mask("one abcdefghijk, two lmnopqrstuv") == f"one {MASK}, two {MASK}"


def test_the_path_of_a_webhook_is_secret() -> None:
    url = "https://hooks.example.org/services/T0/B0/abcdef"
    assert Secrets(url_secrets(url)).mask(f"cannot reach {url}") == f"cannot reach https://hooks.example.org/{MASK}"


@given(
    st.recursive(
        st.integers() | st.text() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_values_without_secrets_are_the_same(value: object) -> None:
    known = Secrets(["a secret that nobody writes"])
    assume("://" not in str(value))
    assert known.mask_all(value) == value


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """The data in pieces of these sizes, again and again."""
    pieces, at, number = [], 0, 0
    while at < len(data):
        size = sizes[number % len(sizes)]
        pieces.append(data[at : at + size])
        at, number = at + size, number + 1
    return pieces


def test_what_means_nothing_any_more_is_forgotten_in_all_its_forms() -> None:
    secrets = Secrets(["the-key-of-all"])
    secrets.add(["a token/of one job"])
    secrets.forget(["a token/of one job"])
    assert secrets.known == Secrets(["the-key-of-all"]).known
