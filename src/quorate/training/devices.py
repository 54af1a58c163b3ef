"""Which device a worker computes on."""

from quorate.core.errors import RunError
from quorate.core.gpus import gpus_here, use_gpu
from quorate.spec.device import kind_of
from quorate.spec.job import JobSpec
from quorate.training.device import CPU, CpuDevice, Device


def device_for(spec: JobSpec, place: int) -> Device:
    """The device of the worker in a place. Of several GPUs each worker gets one, in turn, and sees no other."""
    if kind_of(spec) == "cpu":
        return CPU if spec.precision in ("auto", "fp32") else CpuDevice(spec.precision)
    gpus = gpus_here()
    if not gpus:
        raise RunError("`device: cuda` asks for a GPU, and this machine has none. Use `device: cpu`, or `auto`.")
    use_gpu(gpus[place % len(gpus)])
    # Imported only here: a job on the CPU never needs it.
    from quorate.training.cuda_device import CudaDevice

    return CudaDevice(spec.precision, compiles=spec.compile, captures=spec.capture)
