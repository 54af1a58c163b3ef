"""How an extra of Quorate is installed here: from where Quorate itself was installed."""

import json
import shlex
from typing import Any
from urllib.parse import unquote, urlsplit


def install_of(extra: str) -> str:
    """The command that installs an extra. Of an index only where Quorate came from one: elsewhere another's package may
    have its name there."""
    # Here: most commands have no need of it, and it takes longer to import than their help.
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        told = distribution("quorate").read_text("direct_url.json")
        said = dict(json.loads(told or "{}"))
    except (PackageNotFoundError, ValueError, TypeError):
        said = {}
    return f"pip install {_requirement(said, extra)}"


def _requirement(said: dict[str, Any], extra: str) -> str:
    """As pip takes it: said is what the installer has written down (PEP 610), nothing where it was by name."""
    wanted, url = f"quorate[{extra}]", str(said.get("url", ""))
    if not url:
        return f"'{wanted}'"
    path = unquote(urlsplit(url).path)
    # A clone here, too: pip takes `@ git+file:///path` for a file of that name until version 24.
    if url.startswith("file:") and ("dir_info" in said or "vcs_info" in said):
        place = shlex.quote(f"{path}[{extra}]")
        return f"-e {place}" if said.get("dir_info", {}).get("editable") else place
    if (source := said.get("vcs_info")) is not None:
        revision = source.get("requested_revision")
        url = f"{source.get('vcs', 'git')}+{url}" + (f"@{revision}" if revision else "")
    if said.get("subdirectory"):
        url += f"#subdirectory={said['subdirectory']}"
    return shlex.quote(f"{wanted} @ {url}")
