"""The memory of a GPU, shared by descriptors: an allocation lives until the last process that has mapped it lets go.

So a worker that is killed takes nothing away from one that reads what it has shared. (CUDA's older way of sharing, by
handles of `cudaMalloc`ed memory, leaves that case undefined.)
"""

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from quorate.reduce.cuda_driver import (
    HAS_DESCRIPTORS,
    HAS_VIRTUAL_MEMORY,
    OUT_OF_MEMORY,
    Driver,
    DriverError,
    load_driver,
)
from quorate.reduce.memory import NotShareable
from quorate.reduce.reduction import add_up

log = logging.getLogger(__name__)


_left: list[tuple[Driver, int, int, torch.device]] = []
"""What could not be unmapped when it was no longer used."""
_pinned: list[memoryview] = []
"""What the driver has not let go: another mapping at this address would be taken for it, and the old pages copied."""


class CudaMemory:
    """A `DeviceMemory` of the one GPU that this process sees. Made once in a process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sum: AddUp | None = None

    def place(self) -> str:
        with _in_words():
            driver = load_driver()
            if not driver.attribute(HAS_VIRTUAL_MEMORY) or not driver.attribute(HAS_DESCRIPTORS):
                raise NotShareable("its GPU has no memory that another process could map")
            if self._sum is None:
                # Here and not in a step: a kernel has to be compiled the first time, while all are connecting.
                self._sum = choose_sum(self._device)
            return driver.uuid()

    def create(self, size: int) -> tuple[torch.Tensor, int]:
        for mapping in [_left.pop() for _ in range(len(_left))]:
            _unmap(*mapping)
        with _in_words():
            driver = load_driver()
            size_there = driver.rounded(size)
            handle = _created(driver, size_there)
            try:
                piece = self._mapped(driver, handle, size_there)
                piece.zero_()
                return piece[:size], driver.exported(handle)
            finally:
                driver.release(handle)

    def adopt(self, descriptor: int, size: int) -> torch.Tensor:
        with _in_words():
            driver = load_driver()
            handle = driver.imported(descriptor)
            try:
                return self._mapped(driver, handle, driver.rounded(size))[:size]
            finally:
                driver.release(handle)

    def wait(self) -> None:
        begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
        begun.record()
        begun.synchronize()

    def add_up(self, terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        assert self._sum is not None, "nothing is summed before it is known where"
        self._sum(terms, out)

    def zeros_on_host(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=True)

    def pin(self, region: memoryview) -> Callable[[], None]:
        address, size = torch.frombuffer(region, dtype=torch.uint8).data_ptr(), len(region)
        try:
            driver = load_driver()
            driver.register(address, size)
        except DriverError as error:
            log.info("copies between the host and the GPU are slower than they could be: %s", error)
            return lambda: None
        return lambda: _unpin(driver, address, region)

    def _mapped(self, driver: Driver, handle: int, size: int) -> torch.Tensor:
        """A tensor over the memory; unmapped when the last view of it is gone."""
        owner = _Mapping(driver.map(handle, size), size)
        weakref.finalize(owner, _unmap, driver, owner.address, size, self._device).atexit = False
        tensor = torch.as_tensor(owner, device=self._device)
        if tensor.data_ptr() != owner.address:
            raise NotShareable("torch takes memory that is shared for that of another GPU")
        return tensor


class _Mapping:
    """What torch makes a tensor of, without a copy; the tensor's memory keeps it."""

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


@contextmanager
def _in_words() -> Iterator[None]:
    """What the driver or torch cannot do is a reason to go another way."""
    try:
        yield
    except (DriverError, RuntimeError, TypeError) as error:
        raise NotShareable(f"the memory of its GPU cannot be shared: {error}") from None


def _created(driver: Driver, size: int) -> int:
    try:
        return driver.create(size)
    except DriverError as error:
        if error.code != OUT_OF_MEMORY:
            raise
    # Torch may hold what it no longer needs.
    torch.cuda.empty_cache()
    return driver.create(size)


def _unmap(driver: Driver, address: int, size: int, device: torch.device) -> None:
    try:
        if torch.cuda.is_current_stream_capturing() or threading.current_thread() is not threading.main_thread():
            # Garbage is collected at any time by any thread, and whoever waits for a device ends its capture.
            _left.append((driver, address, size, device))
            return
        # What still runs may read there.
        torch.cuda.synchronize(device)
        driver.unmap(address, size)
    except (DriverError, RuntimeError) as error:  # of a GPU that is lost, say: that is told elsewhere
        log.info("shared memory of the GPU was not unmapped: %s", error)


def _unpin(driver: Driver, address: int, region: memoryview) -> None:
    try:
        driver.unregister(address)
    except DriverError as error:
        log.info("memory that was pinned for the GPU was not let go: %s", error)
        _pinned.append(region)


AddUp = Callable[[Sequence[torch.Tensor], torch.Tensor], None]

FUSED_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_TERMS = 64
"""The loop over terms is unrolled, so each number of them is compiled anew; more than this is not worth it."""
_BLOCK = 1024
_PROBE = 4099


def choose_sum(device: torch.device) -> AddUp:
    """The fused sum where it works and is right, else torch's additions.

    Its additions are those of `add_up`, term after term, each rounded to the type of the sum. That is not taken on
    trust: it has to give the bits of torch for values that would show a difference.
    """
    try:
        fused = fused_sum()
        wrong = [dtype for dtype in FUSED_TYPES if not _is_right(fused, device, dtype)]
    except Exception as error:  # no Triton, no compiler for it, no such GPU: torch goes on without it
        log.info("lanes are summed by one kernel for each addition: %s: %s", type(error).__name__, error)
        return _add_up
    if wrong:
        log.warning("lanes are summed by one kernel for each addition: a fused one has other bits in %s", wrong)
        return _add_up
    return fused


def fused_sum() -> AddUp:
    """A sum by a Triton kernel. ImportError where there is no Triton."""
    from quorate.reduce.sum_kernel import add_all

    def run(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        # For two terms torch has such a kernel.
        if not 2 < len(terms) <= MOST_TERMS or out.dtype not in FUSED_TYPES:
            _add_up(terms, out)
            return
        addresses = _table(tuple(term.data_ptr() for term in terms), out.device)
        blocks = -(-out.numel() // _BLOCK)
        add_all[(blocks,)](addresses, out, out.numel(), len(terms), out.dtype.itemsize < 4, _BLOCK)

    return run


@functools.lru_cache(maxsize=4096)  # the same in every step
def _table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)


def _add_up(terms: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    add_up(terms[0], terms[1:], out)


def _is_right(fused: AddUp, device: torch.device, dtype: torch.dtype) -> bool:
    """Compared for values of all magnitudes, denormal ones among them, and zeros of both signs."""
    generator = torch.Generator().manual_seed(5)
    info = torch.finfo(dtype)
    exponents = torch.rand((5, _PROBE), generator=generator, dtype=torch.float64)
    lowest, highest = torch.log2(torch.tensor([info.smallest_normal, info.max], dtype=torch.float64)).tolist()
    values = torch.exp2(lowest - 8 + exponents * (highest - lowest))
    values *= torch.randint(-1, 2, values.shape, generator=generator)
    values[:, ::7] *= torch.exp2(lowest - torch.log2(values[:, ::7].abs().clamp_min(info.smallest_normal)))
    values[:, ::11] = -0.0
    terms = list(values.to(dtype).to(device))
    expected, given = torch.empty_like(terms[0]), torch.empty_like(terms[0])
    _add_up(terms, expected)
    fused(terms, given)
    return bool(torch.equal(expected.view(torch.uint8), given.view(torch.uint8)))
