"""One change to a source file at a structural anchor: a qualified name and a snippet that must match there exactly once.

The snippet is compared with the syntax tree, so that white space, comments and line breaks do not matter; the change is made in
the text, so that all other lines stay as they are.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["AnchorError", "Change", "apply"]


class AnchorError(ValueError):
    """The anchor does not match exactly once, or the replacement changes nothing or does not parse; says which."""


@dataclass(frozen=True)
class Change:
    """`scope`: `KVState.append`, a class, or "" for the whole file. Snippets: an expression, or whole statements."""

    scope: str
    anchor: str
    replacement: str


@dataclass(frozen=True)
class _Place:
    """Where a snippet matched: its nodes, and the innermost statement that holds them, with the list that it stands in."""

    nodes: list[ast.AST]
    statement: ast.stmt
    siblings: list[ast.stmt]


def apply(source: str, change: Change, reached: str | None = None) -> str:
    """The changed source. `reached` is a file that the changed code creates when it runs, to prove that it ran.

    Raises AnchorError.
    """
    tree = _parse(source, "the file")
    scope = _scope(tree, change.scope)
    pattern = _pattern(change.anchor)
    places = list(_places(scope, pattern))
    where = change.scope or "the file"
    if len(places) != 1:
        raise AnchorError(f"anchor {_short(change.anchor)} matches {len(places)} times in {where}, must match exactly once")
    text = _Text(source)
    place = places[0]
    if reached is not None:
        _mark(text, place, reached)
    start, _ = text.span(place.nodes[0])
    _, stop = text.span(place.nodes[-1])
    text.replace(start, stop, _fitted(change.replacement, pattern, text.column(start)))
    changed = text.result()
    after = _parse(changed, f"the file, with the replacement {_short(change.replacement)},")
    if reached is None and ast.dump(after) == ast.dump(tree):
        raise AnchorError(f"replacement {_short(change.replacement)} in {where} changes nothing")
    return changed


def _short(snippet: str) -> str:
    line = " ".join(snippet.split())
    return repr(line if len(line) <= 80 else f"{line[:77]}...")


def _parse(source: str, what: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise AnchorError(f"{what} does not parse: {error}") from None


def _pattern(snippet: str) -> list[ast.AST]:
    """One expression, or statements."""
    snippet = textwrap.dedent(snippet).strip()
    body = _parse(snippet, f"anchor {_short(snippet)}").body
    if not body:
        raise AnchorError("the anchor is empty")
    if len(body) == 1 and isinstance(body[0], ast.Expr):
        return [body[0].value]
    return list(body)


def _scope(tree: ast.Module, name: str) -> ast.AST:
    """The definition of a qualified name. A name that is defined more than once is refused, the change would be ambiguous."""
    scope: ast.AST = tree
    for part in filter(None, name.split(".")):
        found = [node for node in _definitions(scope) if node.name == part]
        if len(found) != 1:
            raise AnchorError(f"scope {name!r}: {part!r} is defined {len(found)} times, must be exactly once")
        scope = found[0]
    return scope


def _definitions(scope: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Definitions directly in a scope, those below its if, with and try included."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node
        elif isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _definitions(node)


def _places(scope: ast.AST, pattern: list[ast.AST]) -> Iterator[_Place]:
    wanted = [_shape(node) for node in pattern]
    for siblings in _bodies(scope):
        for index, statement in enumerate(siblings):
            if isinstance(pattern[0], ast.stmt):
                run = siblings[index : index + len(wanted)]
                if [_shape(node) for node in run] == wanted:
                    yield _Place(list(run), statement, siblings)
            else:
                for node in _expressions(statement):
                    if _shape(node) == wanted[0]:
                        yield _Place([node], statement, siblings)


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements below a node."""
    for _, value in ast.iter_fields(node):
        items = value if isinstance(value, list) else [value]
        if items and isinstance(items[0], ast.stmt):
            yield items
        for item in items:
            if isinstance(item, ast.AST):
                yield from _bodies(item)


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Expressions of a statement itself, not of those in its body. Inside an f-string they have no place of their own."""
    stack: list[ast.AST] = [statement]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.expr):
            yield node
        if not isinstance(node, ast.JoinedStr):
            stack += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.stmt)]


def _shape(node: ast.AST) -> str:
    """The tree without places, and without whether a name is read or written."""
    return ast.dump(node).replace("ctx=Store()", "ctx=Load()").replace("ctx=Del()", "ctx=Load()")


def _fitted(replacement: str, pattern: list[ast.AST], column: int) -> str:
    replacement = textwrap.dedent(replacement).strip()
    if isinstance(pattern[0], ast.stmt):
        return replacement.replace("\n", "\n" + " " * column)
    try:
        node = ast.parse(replacement, mode="eval").body
    except SyntaxError as error:
        raise AnchorError(f"the anchor is an expression, but replacement {_short(replacement)} is none: {error.msg}") from None
    closed = isinstance(node, (ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.Subscript, ast.List, ast.Dict))
    return replacement if closed else f"({replacement})"


def _mark(text: _Text, place: _Place, reached: str) -> None:
    """Before the statement that is changed, or before the one that an `elif` belongs to: create the file, once per process."""
    mark = f"'_reached' in globals() or globals().update(_reached=open({reached!r}, 'w').close())"
    statement = place.statement
    start, _ = text.span(statement)
    if text.at(start, "elif"):
        raise AnchorError("the anchor stands in the condition of an elif; anchor the whole if statement instead")
    separator = f"\n{' ' * text.column(start)}" if text.is_first_on_line(start) else "; "
    text.replace(start, start, mark + separator)


class _Text:
    """Source text that is edited by places of the syntax tree, which count lines and UTF-8 bytes."""

    def __init__(self, source: str) -> None:
        self._bytes = source.encode()
        lines = self._bytes.splitlines(keepends=True)
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))
        self._edits: list[tuple[int, int, bytes]] = []

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Byte offsets of a node; a definition starts at its first decorator."""
        assert isinstance(node, (ast.expr, ast.stmt))
        first: ast.expr | ast.stmt = node
        decorators = getattr(node, "decorator_list", None)
        start = self._starts[first.lineno - 1] + first.col_offset
        if decorators:
            start = self._starts[decorators[0].lineno - 1] + node.col_offset
        assert node.end_lineno is not None and node.end_col_offset is not None
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def column(self, offset: int) -> int:
        return offset - max(start for start in self._starts if start <= offset)

    def is_first_on_line(self, offset: int) -> bool:
        return not self._bytes[offset - self.column(offset) : offset].strip()

    def at(self, offset: int, word: str) -> bool:
        return self._bytes.startswith(word.encode(), offset)

    def replace(self, start: int, stop: int, text: str) -> None:
        self._edits.append((start, stop, text.encode()))

    def result(self) -> str:
        edited = self._bytes
        for start, stop, text in sorted(self._edits, key=lambda edit: (edit[0], edit[1]), reverse=True):
            edited = edited[:start] + text + edited[stop:]
        return edited.decode()
