"""Small mistakes made on purpose in the code of decisions: which there are, and the code that has one of them.

In every function a condition is negated, a guard removed, `and` and `or` swapped, a comparison shifted, a call whose
result nobody uses dropped, a boolean result flipped. Words are left as they are: what a message says, and what is
logged, decides nothing. What runs when a module is imported is left as well.
"""

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

Function = ast.FunctionDef | ast.AsyncFunctionDef

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SHIFTED: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_LOGGERS = ("log", "logging", "warnings")
_LONGEST = 100


@dataclass(frozen=True)
class Mutation:
    """One mistake: what is done to which text, in a function of a file.

    `name` says so without the line and the file, and so stays the same where only others change. `lines` are those of
    the statement: whoever does not reach them does not meet the mistake.
    """

    name: str
    file: Path
    function: str
    line: int
    what: str
    text: str
    lines: range
    site: int
    variant: int


@dataclass(frozen=True)
class _Change:
    """What is done to a piece of code, and how."""

    what: str
    about: ast.expr | ast.stmt
    apply: Callable[[], None]


def mutations_of(file: Path, package: str) -> list[Mutation]:
    """Every mistake that can be made in a file."""
    source = _source(file)
    found: list[Mutation] = []
    seen: Counter[str] = Counter()
    for qualified, function in _functions(ast.parse(source)):
        done: set[tuple[str, str]] = set()
        statements = _statements(function)
        for site, node in enumerate(_nodes(function)):
            for variant, change in enumerate(_changes(node, function)):
                where = f"{change.about.lineno}:{change.about.col_offset}-{change.about.end_col_offset}"
                if (change.what, where) in done:
                    continue  # a condition that is a comparison is negated in two ways
                done.add((change.what, where))
                text = _short(source, change.about)
                name = f"{package}: {qualified}: {change.what}: {text}"
                seen[name] += 1
                name = name if seen[name] == 1 else f"{name} ({seen[name]})"
                lines = _header(statements[node])
                line = change.about.lineno
                found.append(Mutation(name, file, qualified, line, change.what, text, lines, site, variant))
    return found


def code_with(mutation: Mutation) -> CodeType:
    """The code of the function, with the mistake."""
    tree = ast.parse(_source(mutation.file))
    name, number = _numbered(mutation.function)
    function = next(one for qualified, one in _functions(tree) if qualified == mutation.function)
    _changes(_nodes(function)[mutation.site], function)[mutation.variant].apply()
    ast.fix_missing_locations(tree)
    module = compile(tree, str(mutation.file), "exec")
    return [code for code in _codes(module) if code.co_qualname == name][number]


@functools.cache
def _source(file: Path) -> str:
    """As it was when it was first read: it may be edited meanwhile."""
    return file.read_text()


def _numbered(function: str) -> tuple[str, int]:
    """A property and its setter have one name."""
    name, _, number = function.partition("#")
    return name, int(number or 1) - 1


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _functions(tree: ast.Module) -> list[tuple[str, Function]]:
    """Functions and methods by name, and not those inside of them."""
    found: list[tuple[str, Function]] = []
    seen: Counter[str] = Counter()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, Function):
                name = f"{prefix}{node.name}"
                seen[name] += 1
                found.append((name if seen[name] == 1 else f"{name}#{seen[name]}", node))

    visit(tree.body, "")
    return found


def _nodes(function: Function) -> list[ast.AST]:
    """What of a function can be changed, always in the same order: not its arguments, and no words."""
    nodes: list[ast.AST] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.JoinedStr):
            return
        nodes.append(node)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for statement in function.body:
        visit(statement)
    return nodes


def _statements(function: Function) -> dict[ast.AST, ast.stmt]:
    """The statement that each node is in."""
    found: dict[ast.AST, ast.stmt] = {}

    def note(node: ast.AST, statement: ast.stmt) -> None:
        found[node] = statement
        for child in ast.iter_child_nodes(node):
            note(child, child if isinstance(child, ast.stmt) else statement)

    for statement in function.body:
        note(statement, statement)
    return found


def _header(statement: ast.stmt) -> range:
    """The lines of a statement, without those of the statements inside."""
    inner = [
        child.lineno
        for child in ast.walk(statement)
        if isinstance(child, ast.stmt) and child is not statement and child.lineno > statement.lineno
    ]
    end = statement.end_lineno or statement.lineno
    return range(statement.lineno, min([end + 1, *inner]))


# --- what can be done to a node


def _changes(node: ast.AST, function: Function) -> list[_Change]:
    return [*_of_condition(node), *_of_operator(node), *_of_statement(node, function)]


def _of_condition(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
            yield _negation(node, "test")
        case ast.match_case(guard=ast.expr()):
            yield _negation(node, "guard")
        case ast.comprehension():
            for index, condition in enumerate(node.ifs):
                yield _replacement(node.ifs, index, condition)
        case ast.BoolOp(values=[*_, ast.Constant(value=int() | float() | str()) | ast.Dict(keys=[])]):
            pass  # a value and what stands for it where there is none: not a condition
        case ast.BoolOp():
            for index, operand in enumerate(node.values):
                yield _replacement(node.values, index, operand)
        case _:
            for field, child in ast.iter_fields(node):
                if isinstance(child, ast.UnaryOp) and isinstance(child.op, ast.Not):
                    yield _negation(node, field)


def _negation(node: ast.AST, field: str) -> _Change:
    condition = getattr(node, field)
    return _Change("negate", condition, lambda: setattr(node, field, _negated(condition)))


def _replacement(conditions: list[ast.expr], index: int, condition: ast.expr) -> _Change:
    return _Change("negate", condition, lambda: conditions.__setitem__(index, _negated(condition)))


def _negated(condition: ast.expr) -> ast.expr:
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        return condition.operand
    if isinstance(condition, ast.Compare) and len(condition.ops) == 1 and type(condition.ops[0]) in _OPPOSITE:
        opposite = _OPPOSITE[type(condition.ops[0])]()
        return ast.copy_location(ast.Compare(condition.left, [opposite], condition.comparators), condition)
    return ast.copy_location(ast.UnaryOp(ast.Not(), condition), condition)


def _of_operator(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            what = "and → or" if isinstance(node.op, ast.And) else "or → and"
            yield _Change(what, node, lambda: setattr(node, "op", other))
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                if new := (_SHIFTED | _OPPOSITE).get(type(operator)):
                    yield _shift(node, index, operator, new)


def _shift(node: ast.Compare, index: int, operator: ast.cmpop, new: type[ast.cmpop]) -> _Change:
    what = "shift" if type(operator) in _SHIFTED else "negate"
    return _Change(what, node, lambda: node.ops.__setitem__(index, new()))


def _of_statement(node: ast.AST, function: Function) -> Iterator[_Change]:
    match node:
        case ast.If(orelse=[]) if isinstance(node.body[-1], _LEAVES):
            yield _Change("remove guard", node.test, lambda: _drop(node, function))
        case ast.Expr(value=ast.Call() as call) if not _is_words(call):
            yield _Change("drop", call, lambda: _drop(node, function))
        case ast.Return(value=ast.Constant(value=bool() as value)):
            yield _Change("flip", node, lambda: setattr(node, "value", ast.Constant(not value)))


def _is_words(call: ast.Call) -> bool:
    """Logging, what an error says, and what is for the type checker."""
    text = ast.unparse(call.func)
    return text.partition(".")[0] in _LOGGERS or text in ("super().__init__", "assert_never")


def _drop(statement: ast.stmt, function: Function) -> None:
    for node in ast.walk(function):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and statement in block:
                block[block.index(statement)] = ast.copy_location(ast.Pass(), statement)
                return
    raise AssertionError("a statement is in some block")


@functools.cache
def _lines(source: str) -> list[bytes]:
    """In bytes, which is what a tree counts columns in."""
    return source.encode().splitlines(keepends=True)


def _short(source: str, node: ast.expr | ast.stmt) -> str:
    # Not by ast.get_source_segment, which splits the whole file for each of a thousand nodes.
    assert node.end_lineno is not None
    *before, last = _lines(source)[node.lineno - 1 : node.end_lineno]
    first, *rest = [*before, last[: node.end_col_offset]]
    text = " ".join(b"".join([first[node.col_offset :], *rest]).decode().split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
