"""NVML with the answers that an H200 has given, where there is no GPU: `tests/observe/nvml_answers.json`."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ANSWERS: dict[str, Any] = json.loads((Path(__file__).parent / "observe" / "nvml_answers.json").read_text())


class RecordedNvml:
    """As `pynvml` is asked. `silent` are the questions that the GPU does not know an answer to."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self, *gpus: str, silent: tuple[str, ...] = ()) -> None:
        self.gpus = [ANSWERS[name] for name in gpus]
        self.silent = silent

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._answer("handle")
        return index

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return str(self._answer("name", gpu))

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(**self._answer("utilization", gpu))

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(**self._answer("memory", gpu))

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return int(self._answer("temperature", gpu))

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return int(self._answer("milliwatts", gpu))

    def _answer(self, question: str, gpu: int | None = None) -> Any:
        if question in self.silent:
            raise self.NVMLError("Not Supported")
        return None if gpu is None else self.gpus[gpu][question]
