"""Module names by pattern, as quantisation configs list what they leave out: `lm_head`, `model.layers.*.gate`, `re:.*gate$`.

A config is untrusted, and a regular expression that backtracks can take years on one name. Expressions are therefore matched by
following all positions at once, in time (length of the pattern) x (length of the name); groups may choose, and not repeat.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate
from typing import Any

from engine.checkpoint.bounded import shown
from engine.errors import ConfigError, Refused

__all__ = ["Names"]

MAX_NAMES = 1 << 16  # published lists have up to 500
MAX_GLOBS = 1024
MAX_EXPRESSIONS = 128
MAX_PATTERN = 256
MAX_ALTERNATIVES = 256  # of one expression, its groups multiplied out


class Names:
    """A list of modules from config field `field`; a module matches it as a name, inside a listed one, or by pattern.

    Raises ConfigError for what is no list of short texts, Refused for a regular expression beyond the supported part.
    """

    def __init__(self, patterns: Any, field: str) -> None:
        if patterns is None:
            patterns = []
        if not isinstance(patterns, list) or len(patterns) > MAX_NAMES:
            raise ConfigError(f"config field {field} must be a list of at most {MAX_NAMES} names (got {shown(patterns)})")
        self.plain: set[str] = set()
        globs: list[str] = []
        self.expressions: list[Expression] = []
        for pattern in patterns:
            if not isinstance(pattern, str) or not 1 <= len(pattern) <= MAX_PATTERN:
                raise ConfigError(f"config field {field}: {shown(pattern)} must be a name of 1 to {MAX_PATTERN} characters")
            if pattern.startswith("re:"):
                self.expressions.append(Expression(pattern[3:], field))
            elif any(character in pattern for character in "*?["):
                globs.append(pattern)
            else:
                self.plain.add(pattern)
        if len(globs) > MAX_GLOBS or len(self.expressions) > MAX_EXPRESSIONS:
            raise ConfigError(f"config field {field} has more than {MAX_GLOBS} wildcards or {MAX_EXPRESSIONS} expressions")
        # Stars of a translated glob do not backtrack.
        self.globs = re.compile("|".join(map(translate, globs))) if globs else None

    def __contains__(self, module: str) -> bool:
        """`a.b.c` is in lists that hold `a.b.c`, `a.b` or `a`, a glob that matches one of these, or an expression."""
        parts = module.split(".")
        names = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
        if any(name in self.plain for name in names):
            return True
        if self.globs is not None and any(self.globs.match(name) for name in names):
            return True
        return any(expression.matches(module) for expression in self.expressions)


@dataclass(frozen=True)
class _Atom:
    character: re.Pattern[str]  # of one character
    optional: bool  # ? or *
    repeats: bool  # + or *


class Expression:
    """A regular expression, matched from the start of a name as `re.match` does; its end is free unless it has `$`.

    Supported: characters, `.`, escapes, [classes], `? * +`, `^`, `$`, and (groups | of | choices) without a repetition.
    """

    def __init__(self, text: str, field: str) -> None:
        self.where = f"config field {field}: expression {shown(text)}"
        self.text = text
        self.position = 0
        choices = self._choices()
        if self.position < len(text):
            raise Refused(f"{self.where} has a ')' too many")
        self.alternatives = choices

    def matches(self, name: str) -> bool:
        return any(_matches(atoms, name) for atoms in self.alternatives)

    def _choices(self) -> list[tuple[_Atom | None, ...]]:
        """Up to the end or a ')': sequences of atoms; None is the end of the name."""
        done: list[tuple[_Atom | None, ...]] = []
        current: list[tuple[_Atom | None, ...]] = [()]
        while self.position < len(self.text) and self.text[self.position] != ")":
            character = self.text[self.position]
            self.position += 1
            if character == "|":
                done, current = done + current, [()]
                continue
            following: list[tuple[_Atom | None, ...]]
            if character == "(":
                following = self._group()
            elif character == "^" and all(not atoms for atoms in current):
                continue
            elif character == "$":
                following = [(None,)]
            else:
                following = [(self._atom(character),)]
            current = [head + tail for head in current for tail in following]
            if len(current) + len(done) > MAX_ALTERNATIVES:
                raise Refused(f"{self.where} has more than {MAX_ALTERNATIVES} alternatives")
        return done + current

    def _group(self) -> list[tuple[_Atom | None, ...]]:
        if self.text.startswith("?", self.position):
            if not self.text.startswith("?:", self.position):
                raise Refused(f"{self.where} looks ahead or names a group, which is not supported")
            self.position += 2
        found = self._choices()
        if self.position == len(self.text):
            raise Refused(f"{self.where} has a '(' too many")
        self.position += 1
        if self.text[self.position : self.position + 1] in ("*", "+", "?", "{"):
            raise Refused(f"{self.where} repeats a group, which is not supported")
        return found

    def _atom(self, character: str) -> _Atom:
        start = self.position - 1
        if character == "\\":
            self.position += 1
            if self.text[start + 1 : self.position] not in _ESCAPES:
                raise Refused(f"{self.where}: escape {shown(self.text[start : self.position])} is not supported")
        elif character == "[":
            end = self.text.find("]", self.position + 1 + self.text.startswith("^", self.position))
            if end < 0:
                raise Refused(f"{self.where} has a '[' without ']'")
            self.position = end + 1
        elif character in "*+?{":
            raise Refused(f"{self.where} repeats nothing, or a number of times, which is not supported")
        try:
            one = re.compile(self.text[start : self.position], re.DOTALL)
        except re.error as error:
            raise Refused(f"{self.where} is no expression ({error})") from None
        quantifier = self.text[self.position : self.position + 1]
        if quantifier == "" or quantifier not in "?*+":
            return _Atom(one, False, False)
        self.position += 1
        if self.text[self.position : self.position + 1] == "?":  # lazy: what it matches is the same
            self.position += 1
        return _Atom(one, quantifier in "?*", quantifier in "*+")


_ESCAPES = frozenset("dDwWsS.^$*+?{}[]|()\\/-_")


def _matches(atoms: Sequence[_Atom | None], name: str) -> bool:
    """Whether the atoms match a beginning of the name; `states`: how many atoms may have been used up so far."""
    states = _skipped({0}, atoms)
    for character in name:
        if len(atoms) in states:
            return True
        following: set[int] = set()
        for state in states:
            atom = atoms[state]
            if atom is not None and atom.character.match(character):
                following.add(state + 1)
                if atom.repeats:
                    following.add(state)
        states = _skipped(following, atoms)
    return len(atoms) in _skipped(states, atoms, ended=True)


def _skipped(states: set[int], atoms: Sequence[_Atom | None], ended: bool = False) -> set[int]:
    """With all that follow by leaving out what is optional, and, where the name has ended, its end."""
    found = set(states)
    for state in states:
        while state < len(atoms):
            atom = atoms[state]
            if not (ended if atom is None else atom.optional):
                break
            state += 1
            found.add(state)
    return found
