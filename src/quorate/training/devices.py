"""Which device a worker computes on."""

from pathlib import Path

import torch

from quorate.core.errors import OutOfMemory, RunError
from quorate.core.gpus import VISIBLE, gpus_here, use_gpu, users_of
from quorate.spec.device import gpu_of, kind_of
from quorate.spec.job import JobSpec
from quorate.training.device import CPU, CpuDevice, Device


def device_for(spec: JobSpec, member: int, compile_cache: Path | None = None) -> Device:
    """The device of a worker or a server. Of several GPUs each gets one, in turn, and sees no other."""
    if kind_of(spec) == "cpu":
        return CPU if spec.precision in ("auto", "fp32") else CpuDevice(spec.precision)
    gpus = gpus_here()
    if not gpus:
        raise RunError("`device: cuda` asks for a GPU, and this machine has none. Use `device: cpu`, or `auto`.")
    gpu = gpus[gpu_of(member, len(gpus))]
    use_gpu(gpu)
    # Imported only here: a job on the CPU never needs it.
    from quorate.training.compiler import can_compile
    from quorate.training.cuda_device import CudaDevice

    is_sharded = spec.strategy.mesh(1) is not None  # gathers its weights on the way, which is not compiled
    compiles = not is_sharded and (can_compile() if spec.compile == "auto" else spec.compile)
    captures = spec.capture and not is_sharded
    device = CudaDevice(spec.precision, compiles=compiles, captures=captures, cache=compile_cache)
    check_room(device, gpu)
    return device


def check_room(device: Device, gpu: str) -> None:
    """Refuse a GPU that has no room for anything. It may have later: whoever was killed there takes a while to go."""
    try:
        device.zeros(1, torch.float32)
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        users = users_of(gpu) or "who uses it, nvidia-smi does not say here"
        raise OutOfMemory(f"GPU {gpu} is full: {users}. Another can be chosen with {VISIBLE}.") from None
