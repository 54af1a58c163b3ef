"""`quorate.ray.trainer`: a job as Ray Train's `TorchTrainer`, for programs that live in Ray.

::

    import quorate

    trainer = quorate.ray.trainer(quorate.Job.from_file("job.yaml"))
    result = trainer.fit()                     # Ray's own Result
    print(result.metrics["loss"], result.path)
"""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from quorate.api import session
from quorate.api.job import Job
from quorate.api.result import Result
from quorate.api.run_part import run_on_engine
from quorate.api.train import shown
from quorate.core.errors import RequestError
from quorate.core.installation import install_of
from quorate.core.machine import usable_cores
from quorate.engines.ray.option import RaySpec


def trainer(job: Job, progress: bool = True) -> Any:
    """Return a `ray.train.torch.TorchTrainer` for a job, with scaling, run and failure configuration from the job.

    `fit()` trains the job in a new run folder, as `quorate.train` does, and returns Ray's `Result`: `metrics` has the
    last reported metrics and those of the job, `path` is the run folder. Checkpoints are Quorate's own, in that folder.
    Other features of Ray Train can be set before `fit()`, for example ``trainer.run_config.callbacks``.

    It is for `strategy: ddp` and `fsdp`. Train jobs with other strategies with `quorate.train`.
    """
    spec = job.spec
    if not isinstance(spec.engine, RaySpec):
        job = job.replace(engine="ray")
    if not spec.strategy.is_gang:
        raise RequestError(
            f"quorate.ray.trainer is for strategy: ddp and fsdp, and this job has strategy: {spec.strategy.kind}. "
            'Train it with quorate.train(job.replace(engine="ray")).'
        )
    if find_spec("ray") is None:
        raise RequestError(
            f"quorate.ray.trainer needs the library ray, which is not installed here: {install_of('ray')}."
        )
    return _trainer_class()(job, progress)


def _trainer_class() -> Any:
    """Made only here: whoever does not use Ray does not wait for it."""
    from ray.train.torch import TorchTrainer

    from quorate.engines.ray.train import GroupConfig, NoProcessGroup, group_trainer, hold_place, run_config
    from quorate.engines.ray.train import scaling_config as scaling_of

    class JobTrainer(TorchTrainer):  # type: ignore[misc] # Ray has no types here
        """Configured by a job, which its `fit` trains."""

        def __init__(self, job: Job, progress: bool) -> None:
            self.job = job
            self.progress = progress
            spec = job.spec
            assert isinstance(spec.engine, RaySpec)
            scaling = scaling_of(
                spec.worker_count(usable_cores()) + spec.spares,
                spec.engine.resources_each(spec.device, spec.threads),
                spec.engine.placement,
            )
            super().__init__(hold_place, torch_config=NoProcessGroup(), scaling_config=scaling, run_config=run_config())

        def fit(self) -> Any:
            """Train the job to its end; one that fails raises `JobFailed`."""
            ended: list[Any] = []

            def fit_group(config: GroupConfig) -> None:
                ended.append(group_trainer(config, self.scaling_config, self.run_config).fit())

            runner = partial(run_on_engine, fit=fit_group)
            result = shown(lambda watch: session.start(self.job.resolved, watch, runner), self.progress)
            return _as_rays(result, ended[-1] if ended else None)

    return JobTrainer


def _as_rays(result: Result, reported: Any) -> Any:
    """What a job has come to, as Ray tells it. Without `reported` Ray Train was not able to end its run in time."""
    from ray.train import Result as RayResult

    own = {
        **result.metrics,
        "run": result.run,
        "status": result.status,
        "steps": result.steps,
        "weights_digest": result.weights_digest,
        "recoveries": len(result.recoveries),
    }
    if reported is None:
        return RayResult(metrics=own, checkpoint=None, error=None, path=str(result.folder))
    return replace(reported, metrics={**(reported.return_value or {}), **own}, path=str(result.folder))
