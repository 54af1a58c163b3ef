"""PowerSGD (Vogels et al. 2019): of a gradient that is a matrix only two narrow ones travel, whose product is near it.

With the matrix M of each worker, and the same Q on all of them: P is the sum of M·Q, made orthonormal; Q becomes the
sum of Mᵀ·P; and P·Qᵀ is what everybody takes for the sum of M. What is left of its own, M − P·(Mᵀ·P)ᵀ, a worker adds to
its next gradient. That is the mathematics of `torch.distributed.algorithms.ddp_comm_hooks`, which differs in two
things: it keeps M less the mean of all workers, whose sum is the same, but which grows from step to step; and it waits
for sums inside the backward pass, where nobody can end the wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch._C._distributed_c10d import GradBucket

from quorate.core.digests import derive_seed
from quorate.strategies.gangs.process_group import ProcessGroup

WORTH_IT = 2
"""A matrix that does not become this many times smaller travels whole."""


class Kept(Protocol):
    """What this worker has held back of its gradients."""

    def begin(self) -> None:
        """Another step: what is held back after it is written down beside what there is."""
        ...

    def held(self, index: int) -> torch.Tensor | None:
        """What was held back of a parameter, flat; None where that is nothing yet."""
        ...

    def hold(self, index: int, rest: torch.Tensor) -> None:
        """What is held back of it after this step."""
        ...

    def seal(self, step: int) -> None:
        """All is written down."""
        ...


class PowerSgd:
    """What all workers know alike, through all generations: the Q of each parameter after the last applied step.

    Those of the step under way count once it is applied.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], rank: int, start: int, seed: int) -> None:
        self.start = start
        self.factors: dict[int, torch.Tensor] = {}
        self._seed = seed
        self._parameters = parameters
        self._next: dict[int, torch.Tensor] = {}
        self._shapes = {index: _narrowed(parameter, rank) for index, parameter in enumerate(parameters)}

    @property
    def narrowed(self) -> tuple[int, ...]:
        """Which parameters travel as narrow matrices, by their index."""
        return tuple(index for index, shape in self._shapes.items() if shape is not None)

    def nbytes(self) -> int:
        """Of what stands for the gradients."""
        return sum(
            parameter.nbytes if shape is None else (shape[0] + shape[1]) * shape[2] * parameter.itemsize
            for shape, parameter in zip(self._shapes.values(), self._parameters, strict=True)
        )

    def factor(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Orthonormal columns: where the step before has found most, and at first at random."""
        shape = self._shapes[index]
        assert shape is not None
        if index in self.factors:
            return orthonormal(self.factors[index])
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "power-sgd", index))
        drawn = torch.randn(shape[1:], generator=generator, dtype=torch.float64)
        return orthonormal(drawn.to(like.device, like.dtype))

    def propose(self, index: int, factor: torch.Tensor) -> None:
        """Where this step has found most."""
        self._next[index] = factor

    def commit(self) -> bool:
        """The step is applied; whether any of it has travelled as narrow matrices."""
        self.factors |= self._next
        is_used = bool(self._next)
        self._next = {}
        return is_used

    def load(self, factors: Mapping[int, torch.Tensor]) -> None:
        """Take up those of a state."""
        self.factors = {
            index: factor.to(self._parameters[index].device, copy=True) for index, factor in factors.items()
        }
        self._next = {}

    def forget(self) -> None:
        """A step begins: of one that was void, or is done again, nothing counts."""
        self._next = {}


@dataclass
class _Narrow:
    """A parameter on its way: the place of its gradient, that with what was held back (later what is left of it), what
    is summed of it, and whether there is a gradient at all."""

    index: int
    gradient: torch.Tensor
    matrix: torch.Tensor
    left: torch.Tensor
    presence: torch.Tensor
    right: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    is_present: bool = True


@dataclass
class _Bucket:
    narrow: list[_Narrow]
    whole: list[torch.Tensor]
    message: torch.Tensor
    answer: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class PowerSgdSums:
    """The sums of one generation. `begin` is called as buckets are filled, in the backward pass; `finish` after it."""

    def __init__(
        self, state: PowerSgd, parameters: Sequence[torch.nn.Parameter], group: ProcessGroup, kept: Kept
    ) -> None:
        self._state = state
        self._indices: dict[torch.Tensor, int] = {parameter: index for index, parameter in enumerate(parameters)}
        self._narrowed = frozenset(state.narrowed)
        self._group = group
        self._kept = kept
        self._step = 0
        self._begun: list[_Bucket] = []

    def begin_step(self, step: int) -> None:
        """What was begun and not finished is of a step that is not, or is done again."""
        self._step = step
        self._begun = []
        self._state.forget()
        if step > self._state.start:
            self._kept.begin()

    def begin(self, bucket: GradBucket) -> None:
        if self._step <= self._state.start:
            self._group.begin_sum(bucket.buffer())
            return
        narrow, whole = [], []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            index = self._indices[parameter]
            if index in self._narrowed:
                narrow.append(self._narrow(index, gradient, is_present=parameter.grad is not None))
            else:
                whole.append(gradient)
        message = _packed(_first_parts(narrow, whole))
        self._begun.append(_Bucket(narrow, whole, message))
        self._group.begin_sum(message)

    def _narrow(self, index: int, gradient: torch.Tensor, *, is_present: bool) -> _Narrow:
        """What was held back goes along where only other workers have a gradient too."""
        right = self._state.factor(index, gradient)
        matrix = gradient.reshape(gradient.shape[0], -1)
        held = self._kept.held(index)
        if held is not None:
            matrix = matrix + held.view(matrix.shape).to(matrix.device)
        return _Narrow(index, gradient, matrix, matrix @ right, matrix.new_full((1,), float(is_present)))

    def finish(self) -> None:
        """Return when the sums are in the gradients' places."""
        self._group.wait()
        narrowed = [bucket for bucket in self._begun if bucket.narrow]
        for bucket in self._begun:
            _unpack(bucket.message, _first_parts(bucket.narrow, bucket.whole))
        for bucket in narrowed:
            for one in bucket.narrow:
                self._find_rest(one)
            bucket.answer = _packed([one.right for one in bucket.narrow])
            if bucket is narrowed[-1]:
                # Before anybody can complete the step: whoever takes this worker's place then needs the rest.
                self._kept.seal(self._step)
            self._group.begin_sum(bucket.answer)
        self._group.wait()
        for bucket in narrowed:
            _unpack(bucket.answer, [one.right for one in bucket.narrow])
            for one in bucket.narrow:
                one.gradient.copy_((one.left @ one.right.t()).view(one.gradient.shape))
                if one.is_present:
                    self._state.propose(one.index, one.right)
        self._begun = []

    def _find_rest(self, one: _Narrow) -> None:
        """Where no worker has a gradient, nothing is sent, and what was held back stays so."""
        one.is_present = bool(one.presence)
        one.left = orthonormal(one.left)
        one.right = one.matrix.t() @ one.left
        if one.is_present:
            one.matrix = torch.addmm(one.matrix, one.left, one.right.t(), alpha=-1)
        else:
            one.right.zero_()
        self._kept.hold(one.index, one.matrix)


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """By QR, which has an answer for columns of zeros too: a gradient may vanish."""
    is_half = columns.dtype.itemsize < 4
    found: torch.Tensor = torch.linalg.qr(columns.float() if is_half else columns).Q
    return found.to(columns.dtype)


def _narrowed(parameter: torch.Tensor, rank: int) -> tuple[int, int, int] | None:
    """Rows, columns and rank of what stands for it; None where that is not worth it."""
    if parameter.dim() < 2 or not parameter.numel():
        return None
    rows = parameter.shape[0]
    columns = parameter.numel() // rows
    narrow = min(rank, rows, columns)
    return (rows, columns, narrow) if (rows + columns) * narrow * WORTH_IT < rows * columns else None


def _first_parts(narrow: Sequence[_Narrow], whole: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What is summed of a bucket in the backward pass."""
    return [*(part for one in narrow for part in (one.left, one.presence)), *whole]


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """In one piece: a sum of a few small tensors takes as long as of one."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unpack(message: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    offset = 0
    for tensor in tensors:
        tensor.copy_(message[offset : offset + tensor.numel()].view(tensor.shape))
        offset += tensor.numel()
