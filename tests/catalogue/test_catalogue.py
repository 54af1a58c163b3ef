"""Every mistake of a newcomer, made with the real command; its answer stands on a page that is read by people."""

import pytest

from catalogue import command_lines, data_verbs, datasets, job_files, machine, own_loops, runs, signals, tasks
from catalogue.case import Case
from catalogue.forked import run_forked
from catalogue.page import Page
from command import Workplace

pytestmark = pytest.mark.usefixtures("unmeasured")

PAGES = (
    Page("job_files", "Mistakes in a job file", job_files.CASES),
    Page("command_lines", "Mistakes on the command line and in the environment", command_lines.CASES),
    Page("tasks", "Mistakes in a task", tasks.CASES),
    Page("own_loops", "Mistakes in a training loop of one's own", own_loops.CASES),
    Page("datasets", "Mistakes in the data", datasets.CASES),
    Page("data_verbs", "Mistakes with data in shards", data_verbs.CASES),
    Page("runs", "Mistakes with runs and folders", runs.CASES),
)
CASES = [
    pytest.param(page, case, id=f"{page.file.stem}: {case.title}") for page in PAGES for case in page.cases.values()
]


def recorded(workplace: Workplace) -> dict[str, bytes]:
    """What the runs are and how they ended."""
    names = ("job.yaml", "environment.json", "result.json")
    files = (run / name for run in workplace.runs() for name in names)
    return {file.name: file.read_bytes() for file in files if file.exists()}


@pytest.mark.parametrize(("page", "case"), CASES)
def test_a_mistake_is_answered_as_the_page_says(
    page: Page, case: Case, workplace: Workplace, request: pytest.FixtureRequest
) -> None:
    if case.finished:
        request.getfixturevalue("used_workplace")
        if case.prepare is not None:
            case.prepare(workplace)
    else:
        case.set_up(workplace)
    before = recorded(workplace)
    run = workplace.run(*case.arguments) if case.starts else run_forked(workplace, case.arguments, case.environment)
    page.hold(case, run, workplace)
    if run.document["status"] == "refused":
        assert len(workplace.runs()) == case.finished, "what is refused leaves nothing behind"
        assert recorded(workplace) == before, "and changes nothing in the run"
        return
    failure = run.document["failure"]
    assert workplace.result()["failure"] == failure
    assert [event["message"] for event in workplace.failures()] == [failure["message"]]


@pytest.mark.parametrize("page", [*PAGES, machine.PAGE, signals.PAGE], ids=lambda page: page.file.stem)
def test_a_page_has_a_section_for_each_of_its_cases_and_no_other(page: Page) -> None:
    assert list(page.sections()) == list(page.cases)
    assert page.file.read_text().startswith(f"# {page.title}\n")
