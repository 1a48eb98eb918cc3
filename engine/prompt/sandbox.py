"""A Jinja environment for chat templates, which are code that comes with untrusted weights.

Jinja's immutable sandbox keeps a template from attributes and mutation. What it leaves open is bounded here:
- loops and calls count against a budget, and a deadline is looked at while they count;
- every text, number and collection that a literal, operator, filter or call makes is limited in size, and where an argument
  decides the size (`center(10**9)`, `replace`, `join`) it is limited before the value exists;
- everything that is written counts, inside `{% set %}` blocks and macros too.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

__all__ = ["BoundsError", "Environment", "RefusedError"]

MAX_VALUE = 4 << 20  # characters of any value: a text of about a million tokens
ITEM = 16  # characters that an item of a list or dict counts for
MAX_WRITTEN = 4 * MAX_VALUE  # characters that are written in all
MAX_ARGUMENT = 100_000  # numbers given to methods of texts and numbers
MAX_ITERATIONS = 5_000_000
MAX_SECONDS = 5.0

# What published templates use. The others are no part of a prompt, and some (wordwrap, urlize) take minutes on a long text.
_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby",
    "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject",
    "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "trim",
    "unique", "upper",
)  # fmt: skip
_UNBOUNDED_METHODS = frozenset({"expandtabs", "translate", "format_map"})
_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*[0-9*]")
_BRACE_WIDTH = re.compile(r"\{[^{}]*[:{]")
_METERED, _SIZED = "_metered", "_sized"  # filters that `parse` plants; no template uses such a name


class BoundsError(Exception):
    """The template went beyond a bound."""


class RefusedError(Exception):
    """raise_exception(...) in a template: it refuses the conversation."""


class _Namespace(jinja2.utils.Namespace):
    def __repr__(self) -> str:  # the inherited one spells out the content, which may hold itself twice over, a hundred deep
        return "<Namespace>"


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """With the functions, filters and whitespace rules of published templates. Call `start()` before each rendering."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        self.start()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            finalize=self._write,
        )
        self.filters = {name: self._bounded_filter(name, self.filters[name]) for name in _FILTERS}
        self.filters |= {"tojson": _tojson, _METERED: self._metered, _SIZED: sized}
        self.globals = {"range": self.globals["range"], "dict": dict, "namespace": _Namespace}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def start(self) -> None:
        self._iterations, self._written, self._deadline = 0, 0, time.monotonic() + MAX_SECONDS

    def parse(self, *args: Any, **kwargs: Any) -> jinja2.nodes.Template:
        """The tree with loops metered and concatenations and literals sized: Jinja has no hook for these."""
        tree = super().parse(*args, **kwargs)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            text = sum(len(node.data) for node in loop.find_all(jinja2.nodes.TemplateData))
            loop.iter = _filtered(loop.iter, _METERED, [jinja2.nodes.Const(text)])
        for parent in [tree, *tree.find_all(jinja2.nodes.Node)]:
            for field, value in list(parent.iter_fields()):
                if isinstance(value, list):
                    value[:] = [_sized_node(item) for item in value]
                else:
                    setattr(parent, field, _sized_node(value))
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        unbounded = isinstance(obj, (str, bytes)) and attr in _UNBOUNDED_METHODS
        return not unbounded and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check_arguments((left, right, abs(right) * 1000))  # a power of at most 100
        if operator == "*":
            for collection, count in ((left, right), (right, left)):
                if isinstance(collection, (str, list, tuple)) and isinstance(count, int):
                    _check_size(weight(collection) * count)
        if operator == "%" and isinstance(left, str):
            _check_format(_PERCENT_WIDTH, left, "%", right if isinstance(right, tuple) else (right,))
        return sized(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self._count()
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, (str, bytes, int, float)):
            if name == "format":
                _check_format(_BRACE_WIDTH, owner, "{", (*args, *kwargs.values()))
            else:
                _check_arguments((*args, *kwargs.values()))
            if name == "replace" and len(args) >= 2:
                _check_replace(owner, *args[:2])
            if name == "join" and len(args) == 1:
                args = (_bounded_join(owner, args[0]),)
        return sized(super().call(context, function, *args, **kwargs))

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Jinja marks what a filter wants passed (the environment) by attributes of the function, which `wraps` keeps."""
        passed = int(hasattr(function, "jinja_pass_arg"))

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value, *options = args[passed:]
            self._count(1 + (len(value) >> 4 if isinstance(value, (str, list, tuple, dict)) else 0))
            if name in ("round", "int", "indent"):
                _check_arguments((*options, *kwargs.values()))
            if name == "replace" and len(options) >= 2:
                _check_replace(value, *options[:2])
            if name == "indent":
                widths = [len(o) if isinstance(o, str) else int(o) for o in (*options, *kwargs.values())]
                _check_replace(value, "\n", " " * max(widths, default=4))
            if name == "join":
                value = _bounded_join(kwargs.get("d", options[0] if options else ""), value)
            return sized(function(*args[:passed], value, *options, **kwargs))

        return bounded

    def _metered(self, items: Iterable[Any], text: int = 0) -> Iterator[Any]:
        """The items of a loop whose body holds `text` characters of plain text."""
        for item in items:
            self._count()
            self._count_written(text)
            yield item

    def _count(self, steps: int = 1) -> None:
        before, self._iterations = self._iterations, self._iterations + steps
        if self._iterations > MAX_ITERATIONS:
            raise BoundsError(f"it loops more than {MAX_ITERATIONS} times")
        if before >> 8 != self._iterations >> 8 and time.monotonic() > self._deadline:
            raise BoundsError(f"it takes longer than {MAX_SECONDS:g} seconds")

    @jinja2.pass_context  # which also keeps Jinja from writing constants on its own
    def _write(self, _context: Any, value: Any) -> Any:
        self._count_written(weight(value))
        return value

    def _count_written(self, characters: int) -> None:
        self._written += characters
        if self._written > MAX_WRITTEN:
            raise BoundsError(f"it writes more than {MAX_WRITTEN} characters")


def _filtered(node: Any, name: str, args: list[Any] | None = None) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, args or [], [], None, None, lineno=node.lineno)


def _sized_node(node: Any) -> Any:
    made = isinstance(node, (jinja2.nodes.Concat, jinja2.nodes.List, jinja2.nodes.Tuple, jinja2.nodes.Dict))
    return _filtered(node, _SIZED) if made and getattr(node, "ctx", "load") == "load" else node


def weight(value: Any) -> int:
    """Characters of a value, items at ITEM each, nested ones each time they occur. Raises BoundsError beyond MAX_VALUE."""
    if isinstance(value, (str, bytes)):
        return _check_size(len(value))
    if not isinstance(value, (list, tuple, dict)):
        return ITEM
    total, waiting = 0, [value]
    while waiting:
        items = waiting.pop()
        total += ITEM * len(items)
        for item in (part for pair in items.items() for part in pair) if isinstance(items, dict) else items:
            if isinstance(item, (str, bytes)):
                total += len(item)
            elif isinstance(item, (list, tuple, dict)):
                waiting.append(item)
        _check_size(total)
    return total


def sized(value: Any) -> Any:
    """The value, within bounds. Raises BoundsError."""
    if type(value) is int and value.bit_length() > 4096:
        raise BoundsError("a number of more than 4096 bits")
    weight(value)
    return value


def _check_size(size: int) -> int:
    if size > MAX_VALUE:
        raise BoundsError(f"a text or list of {size}, the limit is {MAX_VALUE}")
    return size


def _check_arguments(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, (int, float)) and abs(value) > MAX_ARGUMENT:
            raise BoundsError(f"the argument {value!r:.40} is beyond {MAX_ARGUMENT}")


def _check_format(widths: re.Pattern[str], form: Any, mark: str, values: Iterable[Any]) -> None:
    if widths.search(form):
        raise BoundsError("formatting with widths is not supported in a chat template")
    _check_size(form.count(mark) * max(map(weight, values), default=0))


def _check_replace(text: Any, old: Any, new: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    _check_size(text.count(old) * len(new))


def _bounded_join(separator: Any, items: Iterable[Any]) -> list[Any]:
    kept, total = [], 0
    for item in items:
        total = _check_size(total + len(separator) + weight(item))
        kept.append(item)
    return kept


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON, as published templates expect it; Jinja's own filter escapes HTML characters."""
    if indent is not None and not 0 <= indent <= 16:
        raise BoundsError(f"tojson indent {indent!r:.40} is not within 0 to 16")
    return sized(json.dumps(sized(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys))


def _raise_exception(message: Any) -> None:
    raise RefusedError(message)


def _strftime_now(form: str) -> str:
    if len(form) > 256:
        raise BoundsError("strftime_now takes at most 256 characters")
    return datetime.now().strftime(form)


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant wrote, for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a plain set)

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
