"""Messages name an extra by the place from where Quorate was installed."""

import json
from importlib.metadata import PackageNotFoundError

import pytest

from quorate.core.installation import install_of


class Told:
    def __init__(self, said: object) -> None:
        self.said = said

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.said is None else json.dumps(self.said)


@pytest.mark.parametrize(
    ("said", "command"),
    [
        (None, "pip install 'quorate[ray]'"),
        ({"url": "file:///home/ann/quorate", "dir_info": {"editable": True}}, "-e '/home/ann/quorate[ray]'"),
        ({"url": "file:///home/my%20ann/quorate", "dir_info": {}}, "pip install '/home/my ann/quorate[ray]'"),
        (
            {"url": "file:///tmp/quorate-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'quorate[ray] @ file:///tmp/quorate-0.1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://example.org/q.git", "vcs_info": {"vcs": "git", "requested_revision": "main"}},
            "pip install 'quorate[ray] @ git+https://example.org/q.git@main'",
        ),
        (
            {"url": "ssh://git@example.org/q", "vcs_info": {"vcs": "git"}, "subdirectory": "src"},
            "pip install 'quorate[ray] @ git+ssh://git@example.org/q#subdirectory=src'",
        ),
        (
            {"url": "file:///home/ann/quorate", "vcs_info": {"vcs": "git", "commit_id": "ab"}},
            "pip install '/home/ann/quorate[ray]'",
        ),
        (["damaged"], "pip install 'quorate[ray]'"),
    ],
)
def test_an_extra_is_installed_from_where_quorate_came(
    said: object, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Told(said))
    assert install_of("ray").removeprefix("pip install ") == command.removeprefix("pip install ")


def test_without_metadata_it_is_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Told:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", absent)
    assert install_of("s3") == "pip install 'quorate[s3]'"
