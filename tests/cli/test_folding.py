from hypothesis import given
from hypothesis import strategies as st

from quorate.cli.errors import fold


def test_lines_are_broken_between_words_and_indented_under_their_own() -> None:
    text = "error: job.yaml has a mistake:\n  lanes: the text is not a whole number"
    assert fold(text, 24).split("\n") == [
        "error: job.yaml has a",
        "  mistake:",
        "  lanes: the text is not",
        "    a whole number",
    ]


def test_a_path_is_never_broken() -> None:
    path = "/a/very/long/path-with-dashes/that/does/not/fit"
    assert path in fold(f"see {path} for more", 20).split("\n  ")


@given(st.lists(st.text(alphabet="abc-/", min_size=1, max_size=12), min_size=1), st.integers(20, 100))
def test_no_word_is_lost(words: list[str], width: int) -> None:
    folded = fold(" ".join(words), width)
    assert folded.split() == words
    assert max(map(len, folded.split("\n"))) <= width
