"""torch.compile: whether it can be had, how it gives the same bits in every process, and what is compiled by it."""

import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def can_compile() -> bool:
    """Whether what torch.compile needs is installed: Triton, and a C compiler for its launchers."""
    compilers = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return find_spec("triton") is not None and any(name and shutil.which(name) for name in compilers)


def use_compile_cache(folder: Path, gpu: str, deterministic: bool) -> None:
    """Have compiled kernels kept in a folder, unless the user has chosen one. Before anything is compiled.

    It is named after what torch's own key lacks, such as how attention is computed, and what people look for.
    """
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    chosen = "".join(str(int(getattr(torch.backends.cuda, f"{kind}_sdp_enabled")())) for kind in kinds)
    mode = "deterministic" if deterministic else "free"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"torch {torch.__version__} {gpu} {mode} attention {chosen}")
    for variable, kind in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
        os.environ.setdefault(variable, str(folder.resolve() / name / kind))


def pin_compiler(deterministic: bool) -> None:
    """Have compiled code compute the same in every process, whatever it has computed before."""
    from torch._dynamo import config as tracing
    from torch._functorch import config as passes
    from torch._inductor import config as kernels

    # Kernels are not chosen by a stopwatch, which may choose another each time. Inductor's own mode still times the
    # tiles of pointwise kernels, and these round differently: a product that one tile shape fuses into the addition
    # after it is rounded by another. Equal machines then had two digests of one job.
    kernels.deterministic = deterministic
    kernels.triton.autotune_pointwise = not deterministic
    # Where too many shapes are met, an error: a worker that alone goes on without compiling has other bits.
    tracing.recompile_limit, tracing.fail_on_recompile_limit_hit = 64, True
    # Blocks that are computed again would draw from generators of their own, which are seeded once in a process and
    # run on from one lane to the next.
    passes.graphsafe_rng_functionalization = False


def compile_in_place(model: torch.nn.Module) -> None:
    """Have a model compiled when it is called: its parameters keep their names, and whoever calls it need not know."""
    call: Any = model._call_impl

    def forward(*inputs: Any, **named: Any) -> Any:
        # A function that is not torch's own: those are not looked into, and so a plain Sequential would stay as it is.
        return call(*inputs, **named)

    model._compiled_call_impl = torch.compile(forward, dynamic=False)


def number_of_graphs() -> int:
    """How many were compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def graphs_looked_up() -> tuple[int, int]:
    """How many were there already, among what is kept of other processes, of how many that were looked for there."""
    from torch._dynamo.utils import counters

    found, absent, refused = (int(counters["inductor"][f"fxgraph_cache_{how}"]) for how in ("hit", "miss", "bypass"))
    return found, found + absent + refused
