"""What the engine raises. Every message is one line: what happened, the likely cause, what to do.

EngineError
├── CheckpointError      files are missing, damaged or inconsistent
│   └── ConfigError      a config's field is missing or out of bounds
├── Refused              valid, and not supported by declaration
├── SequenceError        a call on a sequence that cannot be served; the sequence is as it was
└── RowsError            rows of a step that cannot be served; no row was run
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

__all__ = ["CheckpointError", "ConfigError", "EngineError", "Refused", "RowsError", "SequenceError"]


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose."""


class CheckpointError(EngineError):
    """A checkpoint's files are missing, damaged or inconsistent; names the file and the tensor or field."""


class ConfigError(CheckpointError):
    """A config's field is missing or out of bounds; names the field and its value."""


class Refused(EngineError):
    """What was asked for is valid, and the engine does not support it by declaration; says what it does support."""


class SequenceError(EngineError):
    """A call on a sequence that cannot be served (closed, bad token, rewind too far); the sequence is as it was."""


class RowsError(EngineError):
    """Some rows of a batched step are bad. Nothing was run: step again with the rows that are not in `rows`.

    rows: sequence -> what is wrong with its row.
    """

    def __init__(self, rows: Mapping[Hashable, SequenceError]) -> None:
        self.rows = dict(rows)
        super().__init__("; ".join(str(error) for error in self.rows.values()))
