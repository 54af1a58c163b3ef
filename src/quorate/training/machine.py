"""What the bits depend on besides the job: threads, kernels, libraries and the processor itself."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import numpy
import torch
from torch.nn.functional import conv2d, layer_norm

from quorate.core.digests import content_digest


def pin_machine(threads: int, deterministic: bool) -> None:
    """Compute with a fixed number of threads and with kernels that give the same bits each time."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    # What torch.use_deterministic_algorithms does, without importing the compiler, which takes two seconds.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # Filling empty tensors costs time and hides nothing here: reading one is a mistake in any mode.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def machine_facts(threads: int, deterministic: bool) -> dict[str, str]:
    """Everything outside the job that the bits depend on, for the run folder and for comparing workers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "quorate": _version("quorate"),
        "device": "cpu",
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(threads),
        "deterministic": str(deterministic),
        "hash_seed": os.environ.get("PYTHONHASHSEED", "random") if sys.flags.hash_randomization else "0",
    }


def canary() -> str:
    """Digest of a fixed computation, equal on machines that compute alike."""
    generator = torch.Generator().manual_seed(20)
    images = torch.randn(2, 3, 12, 12, generator=generator)
    kernels = torch.randn(8, 3, 3, 3, generator=generator).requires_grad_()
    matrix = torch.randn(72, 40, generator=generator)
    convolved = conv2d(images, kernels, padding=1)
    normed = layer_norm(convolved, convolved.shape[1:])
    torch.autograd.backward((normed.tanh() * convolved).mean())
    multiplied = convolved.detach().reshape(-1, 72) @ matrix
    denormal = torch.full((16,), 1e-38) * torch.linspace(0.001, 0.1, 16)
    optimizer = torch.optim.AdamW([kernels], lr=0.1)
    optimizer.step()
    results = (convolved, normed, multiplied.exp(), denormal, kernels)
    return content_digest(b"".join(result.detach().contiguous().numpy().tobytes() for result in results))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
