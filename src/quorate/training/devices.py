"""Which device a worker computes on."""

from pathlib import Path

import torch

from quorate.core.errors import OutOfMemory, RunError
from quorate.core.gpus import VISIBLE, gpus_here, use_gpu, users_of
from quorate.spec.device import kind_of
from quorate.spec.job import JobSpec
from quorate.training.device import CPU, CpuDevice, Device


def device_for(spec: JobSpec, place: int, compile_cache: Path | None = None) -> Device:
    """The device of the worker in a place. Of several GPUs each worker gets one, in turn, and sees no other."""
    if kind_of(spec) == "cpu":
        return CPU if spec.precision in ("auto", "fp32") else CpuDevice(spec.precision)
    gpus = gpus_here()
    if not gpus:
        raise RunError("`device: cuda` asks for a GPU, and this machine has none. Use `device: cpu`, or `auto`.")
    gpu = gpus[place % len(gpus)]
    use_gpu(gpu)
    # Imported only here: a job on the CPU never needs it.
    from quorate.training.cuda_device import CudaDevice, can_compile

    compiles = can_compile() if spec.compile == "auto" else spec.compile
    device = CudaDevice(spec.precision, compiles=compiles, captures=spec.capture, cache=compile_cache)
    check_room(device, gpu)
    return device


def check_room(device: Device, gpu: str) -> None:
    """Refuse a GPU that has no room for anything. It may have later: whoever was killed there takes a while to go."""
    try:
        device.zeros(1, torch.float32)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        users = users_of(gpu) or "who uses it, nvidia-smi does not tell here"
        raise OutOfMemory(f"GPU {gpu} is full: {users}. Another can be chosen with {VISIBLE}.") from None
