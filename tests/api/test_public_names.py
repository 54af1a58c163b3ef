"""The names that users write are promised: they are added with thought, and not taken away."""

import ast
import importlib.metadata
import inspect
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import quorate

PROMISED = [
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
    "Task",
    "TaskError",
    "attention",
    "evaluate",
    "launch",
    "open_run",
    "open_search",
    "resume",
    "train",
    "warm",
