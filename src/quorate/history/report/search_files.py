"""The files that a search ends with: its best job, and its report as a page and as Markdown."""

from datetime import datetime

from quorate.history.best_job import advise_on_search, best_job, write_best_job
from quorate.history.importance import importance_of
from quorate.history.report.search_markdown import search_markdown
from quorate.history.report.search_page import search_page
from quorate.history.search_record import SearchRecord
from quorate.storage.atomic import write_atomically


def page_of(record: SearchRecord, reference: str, now: datetime) -> str:
    """A search as HTML, with what to type next; `reference` names it on a command line."""
    return search_page(record, importance_of(record), best_job(record), advise_on_search(record, reference), now)


def write_search_files(record: SearchRecord, now: datetime) -> None:
    """Write all of them into the search's folder."""
    folder, importance = record.folder, importance_of(record)
    job = write_best_job(record)
    advice = advise_on_search(record, str(folder.path))
    write_atomically(folder.report_page, search_page(record, importance, job, advice, now))
    write_atomically(folder.report_text, search_markdown(record, importance))
