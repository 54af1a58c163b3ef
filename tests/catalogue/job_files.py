"""Mistakes in a job file."""

from catalogue.case import Case

CASES = (
    Case("A misspelt key", job="batchsize: 8", without=("batch_size",)),
    Case("A misspelt key inside a section", job="checkpoint: {evry: 2}"),
    Case("A key in the wrong place", job="every: 2"),
    Case("A parameter of the task among the keys of the job", job="learning_rate: 0.1"),
    Case("Text in place of a number", job="lanes: four"),
    Case("A number in quotes", job='lanes: "2"'),
    Case("A number with an exponent in place of a whole one", job="steps: 1e3"),
    Case("A word that is almost right", job="schedule: {kind: cosin}"),
    Case("yes in place of true", job="deterministic: yes"),
    Case("A strategy that is not there yet", job="strategy: pipeline"),
    Case("No length", without=("steps",)),
    Case("Two lengths", job="epochs: 3"),
    Case("More workers than lanes", job="workers: 3"),
    Case("A batch that is too small for the lanes", job="lanes: 16"),
    Case("An early stop with nothing to watch", job="evaluate: {every: end}\nearly_stop: {metric: loss, patience: 3}"),
    Case("Checkpoints that go to a store only", job="checkpoint: {to: [s3://bucket/prefix]}"),
    Case("A place for copies that is no full path", job="checkpoint: {to: [checkpoints, backup]}"),
    Case("Encryption without a key", job="checkpoint: {encrypt: {}}"),
    Case("A variable for the key that sets a key of the job", job="checkpoint: {encrypt: {key_env: QUORATE_KEY}}"),
    Case("A task without a class", job="task: task.py"),
    Case("A task's file that is not there", job="task: tsk.py:Mine"),
    Case("An empty file", text="# to be written\n"),
    Case("An indentation with tabs", text="task: task.py:Mine\nbatch_size: 8\ncheckpoint:\n\tevery: 2\nsteps: 4\n"),
    Case("A bracket that is not closed", text="task: task.py:Mine\nbatch_size: 8\ncheckpoint: {every: 2\nsteps: 4\n"),
    Case(
        "Several mistakes at once",
        text="task: task.py:Mine\nbatchsize: 8\nlanes: 0\nepochs: 3\nsteps: 4\nlog_level: warn\n",
    ),
)
