"""Mistakes on the command line and in the environment."""

from catalogue.case import Case

CASES = (
    Case("A run without a name", command="quorate resume"),
    Case("No job file", command="quorate train"),
    Case("A job file that is not there", command="quorate train jbo.yaml"),
    Case("A job file in a folder that is not there", command="quorate train jobs/mine.yaml"),
    Case("A folder in place of a job file", command="quorate train ."),
    Case("A misspelt verb", command="quorate trian job.yaml"),
    Case("A verb as others call it", command="quorate fit job.yaml"),
    Case("A misspelt flag", command="quorate train job.yaml --wrkers 2"),
    Case("A parameter of the task as a flag", command="quorate train job.yaml --lr 0.1"),
    Case("A list as a flag", command="quorate train job.yaml --sizes [1,2]"),
    Case("A key of the job as a flag", command="quorate train job.yaml --batch-size=32"),
    Case("A task in place of a job file", command="quorate train task.py"),
    Case("Several settings that cannot be read", command="quorate train job.yaml --set seed --set =3 --set lanes="),
    Case("More workers than lanes", command="quorate train job.yaml --workers 3"),
    Case("A number of workers that is none", command="quorate train job.yaml --workers many"),
    Case("A number of steps that is none", command="quorate train job.yaml --steps 1.5"),
    Case("A misspelt key", command="quorate train job.yaml --set checkpoint.evry=3"),
    Case("A setting without a value", command="quorate train job.yaml --set checkpoint.every"),
    Case("An amount of memory that is none", command="quorate plan job.yaml --memory much"),
    Case("A misspelt variable", environment={"QUORATE_LANE": "2"}),
    Case("A variable with a wrong value", environment={"QUORATE_LANES": "none"}),
    Case("A job file without a verb", command="quorate job.yaml"),
    Case("A setting without its flag", command="quorate train job.yaml learning_rate=0.1"),
    Case("The job file as an option", command="quorate train --config job.yaml"),
    Case("Another ending of the job file", command="quorate train job.yml"),
    Case("A number of GPUs", command="quorate train job.yaml --gpus 2"),
    Case("Prints of nobody", command="quorate train job.yaml --print firts"),
    Case(
        "A search in place of a job", command="quorate train job.yaml", text="job: other.yaml\nspace: {seed: [1, 2]}\n"
    ),
    Case("A flag before its verb", command="quorate --runs elsewhere runs"),
    Case("A number of workers without its flag", command="quorate resize last 2"),
    Case("A job file in place of a run", command="quorate resume job.yaml"),
)
