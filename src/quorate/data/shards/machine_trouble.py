"""Which exceptions are for the machine and not for the record: another worker would have read the sample.

Such a one ends the job, whatever it does with bad samples: left out on one crowded host, a sample would be missing
that all others read.
"""

import concurrent.futures
import re
import subprocess
import urllib.error

import torch

from quorate.core.errors import QuorateError

_KINDS = (
    MemoryError, torch.OutOfMemoryError, ImportError, TimeoutError, ConnectionError, urllib.error.URLError,
    subprocess.TimeoutExpired, concurrent.futures.BrokenExecutor, QuorateError,
)  # fmt: skip
# Libraries that ask other machines; not all of their errors are an OSError. Not all that is Google's: protobuf, which
# raises for a corrupt record, is too.
_OF_NETWORKS = re.compile(
    r"(aiobotocore|aiohttp|botocore|boto3|fsspec|gcsfs|google\.(api_core|auth|cloud|resumable_media)|azure|http|httpcore"
    r"|httpx|requests|s3fs|socket|ssl|urllib3)(\.|$)"
)
_TEXTS = re.compile(
    r"(can'?t|cannot|could not|failed to|unable to) (allocate|mmap|open shared memory|start (a )?new thread)"
    r"|(not enough|insufficient|out of) memory|too many open files|resource temporarily unavailable"
    r"|no space left on device|(cuda|cudnn|cublas|hip|nccl)\w* (driver )?error|encoder \w+ not available"
    r"|decoder \w+ not available",
    re.IGNORECASE,
)


def is_machines(error: BaseException | None) -> bool:
    """Whether it may be for the machine, or what it was raised from is."""
    while error is not None:
        if isinstance(error, _KINDS) or (isinstance(error, OSError) and error.errno is not None):
            return True
        if any(_OF_NETWORKS.match(kind.__module__) for kind in type(error).__mro__):
            return True
        # Those of torch, of OpenCV and of PIL say it in words only.
        says = isinstance(error, RuntimeError | OSError | SystemError) or type(error).__module__ == "cv2"
        if says and _TEXTS.search(str(error)):
            return True
        error = error.__cause__
    return False
