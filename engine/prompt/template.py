"""A checkpoint's chat template: a conversation to the text of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from engine.errors import CheckpointError
from engine.prompt.sandbox import Environment, RefusedError

__all__ = ["ChatTemplate", "TemplateError"]

MAX_SOURCE = 1 << 20  # characters; published templates have up to 20,000


class TemplateError(CheckpointError):
    """The template does not compile, does not render, or refused the conversation (raise_exception); one line."""


class ChatTemplate:
    """Compiled once, rendered per conversation. `specials` are the named tokens that templates use (bos_token, eos_token)."""

    def __init__(self, source: str, specials: Mapping[str, str] | None = None):
        if len(source) > MAX_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters, the limit is {MAX_SOURCE}")
        self._specials = dict(specials or {})
        self._environment = Environment()
        try:
            self._template = self._environment.from_string(self._environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template does not compile: line {error.lineno}: {_line(error)}") from None
        except Exception as error:  # constants are computed while compiling, and can fail in any way
            raise TemplateError(f"the chat template does not compile: {type(error).__name__}: {_line(error)}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text, special tokens included: encode it with `specials=False`. Raises TemplateError."""
        context = {**self._specials, "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        self._environment.start()
        try:
            return self._template.render({**context, **variables})
        except RefusedError as error:
            raise TemplateError(f"the chat template refuses the conversation: {_line(error)}") from None
        except Exception as error:  # a template can raise anything that Python can
            raise TemplateError(f"the chat template does not render: {type(error).__name__}: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error)[:800].split())[:200] or "no message"
