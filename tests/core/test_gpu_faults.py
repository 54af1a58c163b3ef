import pytest

from quorate.core.errors import UserCodeError
from quorate.core.gpus import cuda_error_of, xid_of
from quorate.core.user_code import user_code

ADVICE = """
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Device-side assertions were explicitly omitted for this error check; the error probably arose while initializing."""


@pytest.mark.parametrize(
    "told",
    [
        "an illegal memory access was encountered",
        "misaligned address",
        "unspecified launch failure",
        "uncorrectable ECC error encountered",
        "the launch timed out and was terminated",
        "CUDA-capable device(s) is/are busy or unavailable",
        "unknown error",
        "operation not supported on global/shared address space",
        "an async error has occured in external entity outside of CUDA",
        "no CUDA-capable device is detected",
    ],
)
def test_a_fault_of_the_gpu_is_known_by_its_text(told: str) -> None:
    assert cuda_error_of(RuntimeError(f"CUDA error: {told}{ADVICE}")) == told
    assert cuda_error_of(RuntimeError(f"CUDA driver error: {told}")) == told
    assert cuda_error_of(RuntimeError(f"Triton Error [CUDA]: {told}")) == told


@pytest.mark.parametrize(
    "text",
    [
        f"CUDA error: device-side assert triggered{ADVICE}",
        "CUDA error: out of memory",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB",
        "CUDA error: invalid argument",
        "CUDA error: no kernel image is available for execution on the device",
        "the file has an illegal memory access in its name",
        "",
    ],
)
def test_what_is_wrong_with_the_code_or_the_memory_is_not(text: str) -> None:
    assert cuda_error_of(RuntimeError(text)) is None


def test_it_is_found_below_what_was_made_of_it() -> None:
    with pytest.raises(UserCodeError) as raised, user_code("loss()"):
        try:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        except RuntimeError:
            raise ValueError("the loss cannot be computed")  # noqa: B904 (as users do)
    assert cuda_error_of(raised.value) == "an illegal memory access was encountered"


FAILED = "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`"


@pytest.mark.parametrize("text", [FAILED, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "cuFFT error: CUFFT_EXEC_FAILED"])
def test_where_a_library_tells_only_that_it_failed_the_gpu_is_asked(text: str) -> None:
    def wait() -> None:
        raise RuntimeError(f"CUDA error: an illegal memory access was encountered{ADVICE}")

    assert cuda_error_of(RuntimeError(text), wait) == "an illegal memory access was encountered"
    assert cuda_error_of(RuntimeError(text), lambda: None) is None
    assert cuda_error_of(RuntimeError("shapes do not fit"), wait) is None


def test_errors_that_lead_in_a_circle_come_to_an_end() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    assert cuda_error_of(first) is None


LOG = [
    "[  100.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE",
    "[  101.0] NVRM: Xid (PCI:0000:3b:00): 999, pid=12, name=python, something else",
    "[  102.0] usb 1-1: new device",
]


def test_the_kernels_note_of_this_process_is_told() -> None:
    assert xid_of(LOG, 4711) == "Xid 31 of PCI:0000:3b:00: a page fault of its memory"
    assert xid_of(LOG, 12) == "Xid 999 of PCI:0000:3b:00"
    assert xid_of(LOG, 13) is None
    lost = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    assert xid_of([*LOG, lost], 4711) == "Xid 79 of PCI:0000:3b:00: it has fallen off the bus"


def test_what_the_kernel_noted_long_ago_is_not_of_this_fault() -> None:
    lost = "[50.0] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
    assert xid_of([lost], 4711, since=40.0) is not None
    assert xid_of([lost], 4711, since=60.0) is None
    assert xid_of(LOG, 4711, since=100.5) is None
