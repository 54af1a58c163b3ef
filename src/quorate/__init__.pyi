from quorate import ray as ray
from quorate.api.callbacks import Callback as Callback
from quorate.api.evaluate import Evaluation as Evaluation
from quorate.api.evaluate import evaluate as evaluate
from quorate.api.job import Job as Job
from quorate.api.result import Result as Result
from quorate.api.result import open_run as open_run
from quorate.api.train import launch as launch
from quorate.api.train import resume as resume
from quorate.api.train import train as train
from quorate.api.warm import warm as warm
from quorate.core.errors import JobFileError as JobFileError
from quorate.core.errors import QuorateError as QuorateError
from quorate.core.errors import RequestError as RequestError
from quorate.core.errors import RunError as RunError
from quorate.core.errors import TaskError as TaskError
from quorate.core.failure import JobFailed as JobFailed
from quorate.cuda.attention import attention as attention
from quorate.data.stream import Stream as Stream
from quorate.shards.dataset import Shards as Shards
from quorate.task.task import Task as Task
from quorate.tune.result import SearchResult as SearchResult
from quorate.tune.result import open_search as open_search
from quorate.tune.search import Search as Search
from quorate.tune.search import tune as tune

__version__: str

__all__ = [
    "Callback",
    "Evaluation",
    "Job",
    "JobFailed",
    "JobFileError",
    "QuorateError",
    "RequestError",
    "Result",
    "RunError",
    "Search",
    "SearchResult",
    "Shards",
    "Stream",
    "Task",
    "TaskError",
    "attention",
    "evaluate",
    "launch",
    "open_run",
    "open_search",
    "resume",
    "train",
    "tune",
    "warm",
]
