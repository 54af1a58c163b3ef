"""Which modules of a model are cut across the tensor dimension of a mesh, and how.

A linear map is cut by **columns**: each worker computes some of its outputs; or by **rows**: each reads some of its
inputs, and the results are added up. Either is right by itself: a worker is given the whole input, and everybody gets
the whole output. A column that is followed by a row saves that exchange, since what the one computes is what the other
reads; this is done where the trace of the model (`linear_flow.py`) shows that nothing else is read by the row, and that
nothing else reads the columns.

The plan decides what is exchanged, never what is computed: between a column and a row tensors keep the shape, and the
meaning, that they have in one process (`tensor_parallel.py`).
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from quorate.core.errors import TaskError
from quorate.strategies.gangs.linear_flow import (
    LinearFlow,
    flow_of_task,
    is_map,
    is_transposed,
    names_inside,
    shared_start,
)
from quorate.strategies.gangs.option import FsdpSpec
from quorate.training.activation_checkpointing import shown_modules
from quorate.training.task import Task

KEY = "strategy.plan"
COPIED = -1
"""Of the bias of a row: all have the whole of it, as a part of what is cut."""
How = Literal["column", "row"]


@dataclass(frozen=True)
class Cut:
    """How one module is cut. `whole`: the output of a column is gathered, the input of a row is given in full.
    `parts`: how many maps a column holds one after the other, such as query, key and value; each of them is cut."""

    module: str
    how: How
    whole: bool = True
    parts: int = 1


@dataclass(frozen=True)
class TensorPlan:
    """All cuts, in the order of the model. Within the modules `regions` tensors are cut across that pass from a column
    to a row. `notes` say what was left whole, and why."""

    tensor: int
    cuts: tuple[Cut, ...] = ()
    regions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def rows(self) -> tuple[tuple[str, str], ...]:
        """For people: patterns of names, and what is done with the modules."""
        told: dict[tuple[str, str], None] = {}
        for cut in self.cuts:
            told[pattern_of(cut.module), _in_words(cut)] = None
        return tuple(told)


def plan_task(task: Task, spec: FsdpSpec, seed: int, batch: Any, model: torch.nn.Module) -> TensorPlan:
    """The plan of a job: `batch` is one of a few samples, and `model` the one to be cut, on any device."""
    if spec.tensor == 1:
        return TensorPlan(1)
    try:
        _, flow = flow_of_task(task, seed, batch)
    except Exception as error:
        cause = error.__cause__ or error
        why = f"the model cannot be traced without content ({type(cause).__name__}: {_first_line(cause)})"
        if spec.plan == "auto":
            return TensorPlan(spec.tensor, notes=(f"nothing is cut: {why}",))
        return plan_tensors(model, spec.plan, spec.tensor, None, (f"outputs are gathered, inputs whole: {why}",))
    return plan_tensors(model, spec.plan, spec.tensor, flow)


def plan_tensors(
    model: torch.nn.Module,
    plan: Literal["auto"] | Mapping[str, str],
    tensor: int,
    flow: LinearFlow | None,
    notes: tuple[str, ...] = (),
) -> TensorPlan:
    """Cut a model `tensor` times across; without a flow, nothing stays cut between modules."""
    if plan == "auto":
        found = _Automatic(model, tensor, flow or LinearFlow({}, frozenset(), ()))
        hows, notes = found.hows, (*notes, *found.notes)
    else:
        hows = _by_patterns(model, plan, flow)
    pairs = _pairs(model, hows, flow, tensor) if flow is not None else {}
    cuts = []
    for name, module in model.named_modules():
        if name in hows:
            _check_size(name, module, hows[name], tensor)
            parts = _parts_and_heads(name, flow)[0] if flow and name in pairs and hows[name] == "column" else 1
            cuts.append(Cut(name, hows[name], whole=name not in pairs, parts=parts))
    _check_ties(model, cuts)
    return TensorPlan(tensor, tuple(cuts), _regions(pairs, flow) if flow else (), notes)


def cut_dimension(module: torch.nn.Module, how: How) -> int:
    """Which dimension of its weight is cut; rows of an embedding are those of the table."""
    is_first = (how == "column") != (isinstance(module, torch.nn.Embedding) or is_transposed(module))
    return 0 if is_first else 1


def pattern_of(name: str) -> str:
    """The name with its first number as a star: all blocks at once."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name, count=1)


def _by_patterns(model: torch.nn.Module, plan: Mapping[str, str], flow: LinearFlow | None) -> dict[str, How]:
    """The first pattern that matches a module decides."""
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise TaskError(f"{KEY}: {pattern!r} names no module of the model. Its modules: {shown_modules(model)}.")
    hows: dict[str, How] = {}
    for name, module in modules.items():
        chosen = next((pattern for pattern in plan if fnmatchcase(name, pattern)), None)
        if chosen is None or plan[chosen] == "replicate":
            continue
        if not is_map(module):
            raise TaskError(
                f"{KEY}: {chosen!r} names '{name}', a {type(module).__name__}. What can be cut across is a Linear, an "
                "Embedding or a Conv1D with a weight of its own; name only these."
            )
        if isinstance(module, torch.nn.Embedding) and (module.max_norm is not None or module.sparse):
            raise TaskError(f"{KEY}: '{name}' is an Embedding with max_norm or sparse gradients, which is not cut.")
        if flow is not None and name not in flow.passages:
            raise TaskError(
                f"{KEY}: {chosen!r} names '{name}', which is never called: another module reads its weight itself, as "
                f"MultiheadAttention does. Give it as replicate."
            )
        if flow is not None and name in flow.read_elsewhere:
            raise TaskError(f"{KEY}: the weight of '{name}' is read outside of it as well. Give it as replicate.")
        hows[name] = "column" if plan[chosen] == "column" else "row"
    return hows


class _Automatic:
    """In each block that the model repeats: maps that read only what other maps of the block have computed are rows,
    and those others are columns. All that is outside of blocks stays whole."""

    def __init__(self, model: torch.nn.Module, tensor: int, flow: LinearFlow) -> None:
        self._model, self._tensor, self._flow = model, tensor, flow
        self.hows: dict[str, How] = {}
        self._told: dict[str, None] = {}
        holders = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        self._tied = {parameter for parameter, count in holders.items() if count > 1}
        if not flow.blocks:
            self._told[f"nothing is cut: {type(model).__name__} repeats no blocks"] = None
        for block in flow.blocks:
            self._cut(block)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(self._told)

    def _cut(self, block: str) -> None:
        names = [name for name in names_inside(self._flow, block) if self._is_free(name)]
        passages = self._flow.passages
        readers = {name for name in names if (given := passages[name].arrives) and given <= set(names)}
        columns: set[str] = set()
        for row in names:
            given = passages[row].arrives
            if row not in readers or row in columns or any(self.hows.get(each) == "row" for each in given):
                continue
            rows = set().union(*(passages[each].goes_to for each in given))
            if not rows <= readers - columns:
                continue
            if why := self._why_not(given, rows):
                self._told[f"{pattern_of(row)} and what it reads stay whole: {why}"] = None
                continue
            columns |= given
            self.hows.update(dict.fromkeys(given, "column"))
            self.hows.update(dict.fromkeys(rows, "row"))
        inside = {name for name, module in self._model.named_modules() if is_map(module)}
        whole = {pattern_of(name) for name in inside if name.startswith(f"{block}.") and name not in self.hows}
        for pattern in sorted(whole):
            if not any(pattern in note for note in self._told):
                self._told[
                    f"{pattern} stays whole: it is no part of a pair, the second of which reads only the first"
                ] = None

    def _is_free(self, name: str) -> bool:
        module = self._model.get_submodule(name)
        if any(id(parameter) in self._tied for parameter in module.parameters()):
            self._told[f"{pattern_of(name)} stays whole: it shares a weight with another module"] = None
            return False
        return name not in self._flow.read_elsewhere and not isinstance(module, torch.nn.Embedding)

    def _why_not(self, columns: set[str], rows: set[str]) -> str:
        for name in sorted(columns):
            if why := _misfit(self._model, name, self._flow, self._tensor):
                return why
        for name in sorted(rows):
            size = features(self._model.get_submodule(name))[0]
            if size % self._tensor:
                return f"{pattern_of(name)} reads {size} inputs, which {self._tensor} workers cannot share equally"
        return ""


def features(module: torch.nn.Module) -> tuple[int, int]:
    """How many inputs and outputs a map has; of an embedding, rows and their width."""
    weight = module._parameters["weight"]
    assert weight is not None
    first, second = weight.shape
    return (first, second) if isinstance(module, torch.nn.Embedding) or is_transposed(module) else (second, first)


def _pairs(model: torch.nn.Module, hows: Mapping[str, How], flow: LinearFlow, tensor: int) -> dict[str, set[str]]:
    """Columns whose outputs go to rows alone, and rows that read only such columns; with the rows of each."""
    passages = flow.passages
    columns = {name for name, how in hows.items() if how == "column" and not _misfit(model, name, flow, tensor)}
    rows = {name for name, how in hows.items() if how == "row" and passages[name].arrives}
    while True:
        kept = {name for name in columns if (to := passages[name].goes_to) and to <= rows and _region(name, to, flow)}
        fed = {name for name in rows if passages[name].arrives <= kept}
        if (kept, fed) == (columns, rows):
            return {name: passages[name].goes_to for name in kept} | {name: {name} for name in fed}
        columns, rows = kept, fed


def _misfit(model: torch.nn.Module, name: str, flow: LinearFlow, tensor: int) -> str:
    """Why what a column computes cannot stay shared out; empty if it can."""
    parts, heads = _parts_and_heads(name, flow)
    size = features(model.get_submodule(name))[1]
    if heads and heads % tensor:
        return f"{pattern_of(name)} has {heads} heads, which {tensor} workers cannot share equally"
    if size % (tensor * parts):
        return f"{pattern_of(name)} has {size} outputs, which {tensor} workers cannot share equally"
    return ""


def _parts_and_heads(name: str, flow: LinearFlow) -> tuple[int, int]:
    """How many maps lie one after the other in it, and how many heads its output is seen as, or 0.

    The output is first split into equal pieces, or seen as (parts, heads, width): then there are several. As (heads,
    …) there are not: what belongs to one head lies together.
    """
    passage = flow.passages[name]
    pieces, heads = passage.pieces, passage.heads
    if len(pieces) > 1 and len(set(pieces)) == 1:
        return len(pieces), heads[0] if heads else 0
    if len(heads) == 3 and heads[0] in (2, 3) and not pieces:
        return heads[0], heads[1]
    return 1, heads[0] if heads else 0


def _regions(pairs: Mapping[str, set[str]], flow: LinearFlow) -> tuple[str, ...]:
    """The innermost modules within whose calls a column and its rows are called."""
    return tuple({_region(name, rows, flow)[-1]: None for name, rows in sorted(pairs.items())})


def _region(column: str, rows: set[str], flow: LinearFlow) -> tuple[str, ...]:
    """The modules within whose calls both are called; none where loss() itself calls them."""
    shared = flow.passages[column].inside
    for row in sorted(rows):
        shared = shared_start(shared, flow.passages[row].inside)
    return shared


def _check_size(name: str, module: torch.nn.Module, how: How, tensor: int) -> None:
    size = features(module)[1 if how == "column" else 0]
    if size % tensor:
        what = "rows" if isinstance(module, torch.nn.Embedding) else "inputs"
        raise TaskError(
            f"{KEY}: '{name}' has {size} {'outputs' if how == 'column' else what}, which strategy.tensor: {tensor} "
            "cannot share equally. Give it as replicate, or choose another number."
        )


def _check_ties(model: torch.nn.Module, cuts: list[Cut]) -> None:
    """A weight that several modules share is cut in one way, by all of them."""
    hows = {cut.module: cut.how for cut in cuts}
    first: dict[int, tuple[str, int | None]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            is_weight = parameter is module._parameters.get("weight")
            cut = None
            if name in hows:
                cut = cut_dimension(module, hows[name]) if is_weight else 0 if hows[name] == "column" else COPIED
            other, before = first.setdefault(id(parameter), (name, cut))
            if before != cut:
                raise TaskError(
                    f"{KEY}: '{other}' and '{name}' share a weight, which is {_cut_words(before)} for the one and "
                    f"{_cut_words(cut)} for the other. An embedding by row goes with a Linear by column, and either "
                    "with itself."
                )


def _cut_words(dimension: int | None) -> str:
    return "whole" if dimension in (None, COPIED) else f"cut along dimension {dimension}"


def _in_words(cut: Cut) -> str:
    if cut.how == "row":
        return "row" + (", given the whole input" if cut.whole else "")
    parts = f", {cut.parts} maps in one" if cut.parts > 1 else ""
    return "column" + parts + (", output gathered" if cut.whole else "")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def describe(plan: TensorPlan) -> Iterator[str]:
    """The plan in lines."""
    for pattern, words in plan.rows():
        yield f"{pattern}: {words}"
    yield from plan.notes
