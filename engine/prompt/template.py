"""A checkpoint's chat template, rendered in a sandbox with bounds.

A template is code that comes with untrusted weights. Jinja's immutable sandbox keeps it from attributes and mutation; what the
sandbox leaves open is bounded here: every loop counts against a budget and a deadline, and every text and list that an operator,
filter or call returns is limited in size. Functions and whitespace rules are those that published templates are written for.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from engine.errors import CheckpointError

__all__ = ["ChatTemplate", "TemplateError"]

MAX_SOURCE = 1 << 20  # characters
MAX_OUTPUT = 4 << 20  # characters, of the whole text and of any value on the way: about a million tokens
MAX_ARGUMENT = 100_000  # largest number that a filter or method may be given: `center(10**9)` is a gigabyte
MAX_ITERATIONS = 5_000_000
MAX_SECONDS = 5.0


class TemplateError(CheckpointError):
    """The template does not compile, does not render, or refused the conversation (raise_exception); one line."""


class _Bounds(Exception):
    """The template went beyond a bound."""


class ChatTemplate:
    """Compiled once, rendered per conversation. `specials` are the named tokens that templates use (bos_token, eos_token)."""

    def __init__(self, source: str, specials: Mapping[str, str] | None = None):
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters, the limit is {MAX_SOURCE}")
        self._specials = dict(specials or {})
        self._environment = _Environment()
        try:
            tree = self._environment.parse(source)
            _meter(tree)
            self._template = self._environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template does not compile: line {error.lineno}: {_line(error)}") from None
        except (RecursionError, SyntaxError, ValueError, TypeError, MemoryError) as error:
            raise TemplateError(f"the chat template does not compile: {type(error).__name__}: {_line(error)}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text, specials included: encode it with `specials=False`. Raises TemplateError."""
        environment, pieces, length = self._environment, [], 0
        environment.start()
        context = {**self._specials, "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            for piece in self._template.generate(**context, **variables):
                length += len(piece)
                if length > MAX_OUTPUT:
                    raise _Bounds(f"it writes more than {MAX_OUTPUT} characters")
                pieces.append(piece)
        except _Refused as error:
            raise TemplateError(f"the chat template refuses the conversation: {_line(error)}") from None
        except Exception as error:  # a template can raise anything that Python can
            raise TemplateError(f"the chat template does not render: {type(error).__name__.lstrip('_')}: {_line(error)}") from None
        return "".join(pieces)


class _Refused(Exception):
    """raise_exception(...) in a template."""


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
        self.filters = {name: self._bounded_filter(name, self.filters[name]) for name in _FILTERS}
        self.filters["tojson"] = _tojson
        self.filters[_METERED] = self._metered
        self.filters[_SIZED] = _sized
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace")}
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.start()

    def start(self) -> None:
        self._iterations, self._deadline = 0, time.monotonic() + MAX_SECONDS

    def _metered(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._count()
            yield item

    def _count(self, items: int = 1) -> None:
        before, self._iterations = self._iterations, self._iterations + items
        if self._iterations > MAX_ITERATIONS:
            raise _Bounds(f"it loops more than {MAX_ITERATIONS} times")
        if before >> 8 != self._iterations >> 8 and time.monotonic() > self._deadline:
            raise _Bounds(f"it takes longer than {MAX_SECONDS:g} seconds")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _bounded_arguments((left, right))
            if abs(right) > 64:
                raise _Bounds(f"the power {right} is beyond 64")
        if operator == "*":
            for sized, count in ((left, right), (right, left)):
                if isinstance(sized, (str, list, tuple)) and isinstance(count, int) and len(sized) * count > MAX_OUTPUT:
                    raise _Bounds(f"a text or list of more than {MAX_OUTPUT}")
        if operator == "%" and isinstance(left, str):
            _bounded_format(_PERCENT_WIDTH, left)
        return _sized(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        self._count()
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        if isinstance(getattr(method, "__self__", None), (str, bytes)):
            _bounded_arguments((*args, *kwargs.values()))
            if method.__name__ in ("format", "format_map"):
                _bounded_format(_BRACE_FORMAT, method.__self__)
            if method.__name__ == "replace" and len(args) >= 2:
                _bounded_replace(method.__self__, *args[:2])
            if method.__name__ == "join" and len(args) == 1:
                args = (_bounded_join(method.__self__, args[0]),)
        return _sized(super().call(context, function, *args, **kwargs))

    def _bounded_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Jinja marks what a filter wants passed (the environment) by attributes of the function, which `wraps` keeps."""
        passed = int(hasattr(function, "jinja_pass_arg"))

        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            value, *options = args[passed:]
            self._count(1 + (len(value) >> 4 if isinstance(value, (str, list, tuple, dict)) else 0))
            _bounded_arguments((*options, *kwargs.values()))
            if name == "replace" and len(options) >= 2:
                _bounded_replace(value, *options[:2])
            if name == "indent":
                width = max((len(o) if isinstance(o, str) else int(o) for o in (*options, *kwargs.values())), default=4)
                _bounded_replace(value, "\n", " " * width)
            if name == "join":
                value = _bounded_join(kwargs.get("d", options[0] if options else ""), value)
            return _sized(function(*args[:passed], value, *options, **kwargs))

        return bounded


# What published templates use; the others are no part of a prompt, and some (wordwrap, urlize) take minutes on a long text.
_FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "indent", "int",
    "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round",
    "safe", "select", "selectattr", "sort", "string", "sum", "title", "trim", "unique", "upper",
)  # fmt: skip
_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*[0-9*]")
_BRACE_FORMAT = re.compile(r"\{[^{}]*[:{]")

_METERED, _SIZED = "_metered", "_sized"  # filters that _meter plants; a name with an underscore is nothing a template uses


def _meter(tree: jinja2.nodes.Template) -> None:
    """Loops count (Environment._metered) and concatenations are limited (_sized): Jinja gives no hook for either."""
    for loop in list(tree.find_all(jinja2.nodes.For)):
        loop.iter = jinja2.nodes.Filter(loop.iter, _METERED, [], [], None, None, lineno=loop.lineno)
    for parent in [tree, *tree.find_all(jinja2.nodes.Node)]:
        for field, value in list(parent.iter_fields()):
            if isinstance(value, jinja2.nodes.Concat):
                setattr(parent, field, _sized_node(value))
            elif isinstance(value, list):
                value[:] = [_sized_node(item) if isinstance(item, jinja2.nodes.Concat) else item for item in value]
    tree.set_environment(tree.environment)


def _sized_node(node: jinja2.nodes.Concat) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, _SIZED, [], [], None, None, lineno=node.lineno)


def _sized(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple, dict)) and len(value) > MAX_OUTPUT:
        raise _Bounds(f"a text or list of {len(value)}, the limit is {MAX_OUTPUT}")
    if type(value) is int and value.bit_length() > 4096:
        raise _Bounds("a number of more than 4096 bits")
    return value


def _bounded_arguments(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, (int, float)) and abs(value) > MAX_ARGUMENT:
            raise _Bounds(f"the argument {value!r:.40} is beyond {MAX_ARGUMENT}")


def _bounded_format(widths: re.Pattern[str], form: str) -> None:
    if widths.search(form):
        raise _Bounds("formatting with widths is not supported in a chat template")


def _bounded_replace(text: Any, old: Any, new: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    if text.count(old) * len(new) > MAX_OUTPUT:
        raise _Bounds(f"replacing makes a text of more than {MAX_OUTPUT} characters")


def _bounded_join(separator: Any, items: Iterable[Any]) -> list[Any]:
    kept, total = [], 0
    for item in items:
        total += len(separator) + (len(item) if isinstance(item, (str, bytes)) else 0)
        if total > MAX_OUTPUT:
            raise _Bounds(f"joining makes a text of more than {MAX_OUTPUT} characters")
        kept.append(item)
    return kept


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Plain JSON as transformers renders it; Jinja's own filter escapes HTML characters."""
    if indent is not None and not 0 <= indent <= 16:
        raise _Bounds(f"tojson indent {indent!r:.40} is not within 0 to 16")
    return _sized(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys))


def _raise_exception(message: Any) -> None:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    if len(form) > 256:
        raise _Bounds("strftime_now takes at most 256 characters")
    return datetime.now().strftime(form)


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant wrote, for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares a plain set)

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _line(error: BaseException) -> str:
    return " ".join(str(error)[:800].split())[:200] or "no message"
