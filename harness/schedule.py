"""Schedules: ordered operations on sequences, with a text form that parses back.

    open a; feed a 12 all; step a 4; rewind a 3; feed a 5 chunk=2; greedy a 8; step a+b 4; close a

| operation          | meaning                                                                               |
|--------------------|---------------------------------------------------------------------------------------|
| open S             | open sequence S (implicit on first use)                                               |
| feed S N           | prefill the next N tokens in one call; yields the last row of logits                   |
| feed S N all       | the same, yields all N rows                                                           |
| feed S N chunk=C   | the same, and the target itself cuts the call into chunks of C tokens                 |
| feed S N pad=P     | the same, and the target pads each forward on the right to P rows                      |
| step S N           | N decode steps of one token each, teacher-forced; yields N rows                       |
| step S+R N         | the same for several sequences, one batched call a step                               |
| greedy S N         | the target decodes N tokens that it chooses itself, after the last row it computed     |
| rewind S N         | drop the last N tokens                                                                |
| save S X           | take a snapshot of S and call it X                                                     |
| restore S X        | S, opened where it is not and whatever it held, holds what X was taken of              |
| close S            | release the sequence                                                                  |
| refuse OPERATION   | the target refuses the operation, and all sequences are as they were                   |

S is a lower-case word and may be left out where there is one sequence only (it is then `a`). X is a word of the same form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "MAX_COUNT", "Close", "Feed", "Greedy", "Open", "Operation", "Refuse", "Restore", "Rewind", "Save", "Schedule",
    "ScheduleError", "Step",
]  # fmt: skip

MAX_COUNT = 1_000_000
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")
_FEED_NUMBER = re.compile(r"(chunk|pad)=([0-9]{1,7})\Z")
_VERBS = ("open", "feed", "step", "greedy", "rewind", "save", "restore", "close", "refuse")
_WORDS = frozenset({*_VERBS, "all"})


class ScheduleError(ValueError):
    """The text is not a schedule, or the schedule cannot run on any target; names the operation at fault."""


def _checked_name(name: str) -> str:
    if not _NAME.match(name) or name in _WORDS:
        raise ScheduleError(f"{name!r} is not a name (lower-case word, at most 32 characters, no operation's name)")
    return name


def _checked_count(value: int, what: str, least: int = 1) -> int:
    if not least <= value <= MAX_COUNT:
        raise ScheduleError(f"{what} must be {least} to {MAX_COUNT} (got {value})")
    return value


@dataclass(frozen=True)
class Open:
    sequence: str = "a"

    def __post_init__(self) -> None:
        _checked_name(self.sequence)

    def __str__(self) -> str:
        return f"open {self.sequence}"


@dataclass(frozen=True)
class Feed:
    count: int
    sequence: str = "a"
    all_rows: bool = False
    chunk: int | None = None
    pad: int | None = None

    def __post_init__(self) -> None:
        _checked_name(self.sequence)
        _checked_count(self.count, "feed count")
        for what in ("chunk", "pad"):
            if getattr(self, what) is not None:
                _checked_count(getattr(self, what), what)

    def __str__(self) -> str:
        options = [f" {what}={getattr(self, what)}" for what in ("chunk", "pad") if getattr(self, what) is not None]
        return f"feed {self.sequence} {self.count}{' all' * self.all_rows}{''.join(options)}"


@dataclass(frozen=True)
class Step:
    count: int
    sequences: tuple[str, ...] = ("a",)

    def __post_init__(self) -> None:
        for name in self.sequences:
            _checked_name(name)
        if not self.sequences or len(set(self.sequences)) != len(self.sequences):
            raise ScheduleError(f"step needs distinct sequences (got {'+'.join(self.sequences)!r})")
        _checked_count(self.count, "step count")

    def __str__(self) -> str:
        return f"step {'+'.join(self.sequences)} {self.count}"


@dataclass(frozen=True)
class Greedy:
    count: int
    sequence: str = "a"

    def __post_init__(self) -> None:
        _checked_name(self.sequence)
        _checked_count(self.count, "greedy count")

    def __str__(self) -> str:
        return f"greedy {self.sequence} {self.count}"


@dataclass(frozen=True)
class Rewind:
    count: int
    sequence: str = "a"

    def __post_init__(self) -> None:
        _checked_name(self.sequence)
        _checked_count(self.count, "rewind count")

    def __str__(self) -> str:
        return f"rewind {self.sequence} {self.count}"


@dataclass(frozen=True)
class Save:
    snapshot: str
    sequence: str = "a"

    def __post_init__(self) -> None:
        _checked_name(self.sequence)
        _checked_name(self.snapshot)

    def __str__(self) -> str:
        return f"save {self.sequence} {self.snapshot}"


@dataclass(frozen=True)
class Restore:
    snapshot: str
    sequence: str = "a"

    def __post_init__(self) -> None:
        _checked_name(self.sequence)
        _checked_name(self.snapshot)

    def __str__(self) -> str:
        return f"restore {self.sequence} {self.snapshot}"


@dataclass(frozen=True)
class Close:
    sequence: str = "a"

    def __post_init__(self) -> None:
        _checked_name(self.sequence)

    def __str__(self) -> str:
        return f"close {self.sequence}"


@dataclass(frozen=True)
class Refuse:
    operation: Open | Feed | Step | Greedy | Rewind | Save | Restore | Close

    def __post_init__(self) -> None:
        if isinstance(self.operation, Refuse):
            raise ScheduleError("an operation is refused once")

    def __str__(self) -> str:
        return f"refuse {self.operation}"


Operation = Open | Feed | Step | Greedy | Rewind | Save | Restore | Close | Refuse


@dataclass(frozen=True)
class Schedule:
    """Operations in order. `str(schedule)` is the text form; `Schedule.parse(str(s)) == s`."""

    operations: tuple[Operation, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.operations))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Raises ScheduleError, which names the part that does not parse."""
        parts = [part.strip() for part in text.split(";")]
        operations = tuple(_parse_operation(part) for part in parts if part)
        if not operations:
            raise ScheduleError("the schedule is empty; an example: 'feed 5; rewind 2; step 3'")
        return cls(operations)


def _parse_operation(part: str) -> Operation:
    verb, *words = part.split()
    if verb == "refuse":
        if not words or words[0] == "refuse":
            raise ScheduleError(f"in {part!r}: refuse needs the operation that is to be refused")
        return Refuse(_parse_operation(" ".join(words)))  # type: ignore[arg-type]
    if verb in ("save", "restore"):
        return _parse_snapshot(part, verb, words)
    names: tuple[str, ...] = ("a",)
    if words and not words[0].isdecimal() and words[0] != "all" and "=" not in words[0]:
        names = tuple(words.pop(0).split("+"))
    if verb != "step" and len(names) > 1:
        raise ScheduleError(f"in {part!r}: only step takes several sequences")
    try:
        if verb in ("open", "close"):
            if words:
                raise ScheduleError(f"takes a sequence and nothing else (got {' '.join(words)!r})")
            return Open(names[0]) if verb == "open" else Close(names[0])
        if not words:
            raise ScheduleError(f"{verb} needs a count")
        if not re.fullmatch(r"[0-9]{1,7}", words[0]):
            raise ScheduleError(f"{verb} needs a count of 1 to {MAX_COUNT} (got {words[0]!r:.40})")
        count, options = int(words[0]), words[1:]
        if verb == "feed":
            numbers = [match for option in options if (match := _FEED_NUMBER.match(option))]
            given = {str(match[1]): int(match[2]) for match in numbers}
            if len(options) != options.count("all") + len(numbers) or options.count("all") > 1 or len(given) < len(numbers):
                raise ScheduleError(f"feed takes 'all', 'chunk=N' and 'pad=N' once each (got {' '.join(options)!r})")
            return Feed(count, names[0], "all" in options, given.get("chunk"), given.get("pad"))
        if options:
            raise ScheduleError(f"unexpected {' '.join(options)!r}")
        if verb == "step":
            return Step(count, names)
        if verb == "greedy":
            return Greedy(count, names[0])
        if verb == "rewind":
            return Rewind(count, names[0])
    except ScheduleError as error:
        raise ScheduleError(f"in {part!r}: {error}") from None
    raise ScheduleError(f"in {part!r}: unknown operation {verb!r} ({', '.join(_VERBS)})")


def _parse_snapshot(part: str, verb: str, words: list[str]) -> Save | Restore:
    try:
        if not 1 <= len(words) <= 2:
            raise ScheduleError(f"takes a sequence and a snapshot's name (got {' '.join(words)!r})")
        sequence, snapshot = words if len(words) == 2 else ("a", words[0])
        return Save(snapshot, sequence) if verb == "save" else Restore(snapshot, sequence)
    except ScheduleError as error:
        raise ScheduleError(f"in {part!r}: {error}") from None
