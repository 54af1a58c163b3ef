from quorate.api.job import Job as Job
from quorate.api.result import Result as Result
from quorate.api.train import resume as resume
from quorate.api.train import train as train
from quorate.core.errors import QuorateError as QuorateError
from quorate.core.errors import RequestError as RequestError
from quorate.core.failure import JobFailed as JobFailed
from quorate.training.task import Task as Task

__all__ = ["Job", "JobFailed", "QuorateError", "RequestError", "Result", "Task", "resume", "train"]
