"""The versions of a registry as a table that fits a terminal."""

from rich.text import Text

from quorate.api.documents import models_document
from quorate.api.models import ModelRegistry, ModelVersion
from quorate.cli.layout import NONE, Page, headed_table
from quorate.cli.output import print_document
from quorate.storage.tracking_notes import place

_DIGEST = 8
_HEADINGS = ("model", "aliases", "run", "step", "weights", "job", "data", "code", "commit")


def show_versions(registry: ModelRegistry, as_json: bool) -> None:
    """Print what is registered."""
    versions = registry.versions()
    if as_json:
        print_document(models_document(registry.uri, versions))
        return
    page = Page()
    if not versions:
        page.line(f"No model is registered at {place(registry.uri)}. Register one: quorate models register RUN")
        return
    page.table(headed_table(_HEADINGS, rows=[_row(each) for each in versions]))


def _row(version: ModelVersion) -> tuple[Text, ...]:
    aliases, lineage = ", ".join(version.aliases) or NONE, version.lineage
    if lineage is None:
        cells = [str(version), aliases, *[NONE] * (len(_HEADINGS) - 2)]
    else:
        digests = (lineage.weights_digest, lineage.job_digest, lineage.data, lineage.code, lineage.git_commit)
        # What stands before a colon says how the digest was made.
        short = [NONE if digest is None else digest.rpartition(":")[2][:_DIGEST] for digest in digests]
        cells = [str(version), aliases, lineage.run, f"{lineage.step:,}", *short]
    return tuple(Text(cell) for cell in cells)
