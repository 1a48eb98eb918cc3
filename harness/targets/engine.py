"""Our own engine as a target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness import faults
from harness.outcomes import Refusal, Rejected, Unsupported
from harness.target import Capabilities, GreedyResult, Loaded, Session

if TYPE_CHECKING:
    import mlx.core as mx

    from engine.engine import Engine, SequenceId, Snapshot
    from engine.models.model import Model
    from engine.state import SequenceStateLayout

__all__ = ["EngineTarget"]


class EngineTarget:
    """`package` is what a build replaces; `faults` are what power is measured with."""

    name = "engine"
    package = "engine"
    faults = faults.ENGINE
    capabilities = Capabilities(
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        layouts=frozenset({"dense", "model_owned"}),
        pad=True,
        snapshot=True,
        lacks={
            "model_owned": {
                "rewind": "the model holds the state and does not go back",
                "batch": "the model holds the state of one sequence",
                "several_sequences": "the model holds the state of one sequence",
                "pad": "supports_padded_prefill is false",
                "snapshot": "supports_snapshot_reuse is false",
            }
        },
    )

    def require(self) -> None:
        """Always there: the engine is part of the project."""

    def environment(self) -> dict[str, str]:
        from engine import blas

        blas.bind()
        import mlx.core as mx

        return {"mlx": metadata.version("mlx"), "device": str(mx.default_device()), "blas": blas.describe()}

    def load(self, checkpoint: Path, *, dtype: str, layout: str) -> Loaded:
        from engine.checkpoint import load
        from engine.errors import CheckpointError, Refused
        from engine.models import family
        from engine.state import SequenceStateLayout

        # Quantised cases, whose small matrices stay packed if nothing is said, run in the second layout to be unpacked too.
        quantised = None if layout == "dense" else "unpacked"
        try:
            loaded = load(checkpoint, dtype=dtype, quantised=quantised)
            model = family(loaded.model_type).Model(loaded.config, loaded.weights)
            return _LoadedModel(model, SequenceStateLayout(layout))
        except Refused as error:
            raise Unsupported(str(error)) from None
        except CheckpointError as error:
            raise Rejected(str(error)) from None


class _LoadedModel:
    def __init__(self, model: Model, layout: SequenceStateLayout) -> None:
        self._model = model
        self._layout = layout

    def start(self) -> Session:
        from engine.engine import Engine

        return _EngineSession(Engine(self._model, layout=self._layout))


@contextmanager
def _refusals() -> Iterator[None]:
    from engine.errors import Refused

    try:
        yield
    except Refused as error:
        raise Refusal(str(error)) from error


class _EngineSession:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ids: dict[str, SequenceId] = {}
        self._last: dict[str, mx.array] = {}  # [1, vocab]: the last row of each sequence
        self._saved: dict[str, Snapshot] = {}

    def open(self, sequence: str) -> None:
        with _refusals():
            self._ids[sequence] = self._engine.open()

    def feed(
        self, sequence: str, tokens: list[int], *, all_rows: bool, chunk: int | None, pad: int | None = None
    ) -> np.ndarray:
        with _refusals():
            rows = self._engine.prefill(self._ids[sequence], tokens, all_logits=all_rows, chunk=chunk, pad_to=pad)
        self._last[sequence] = rows[-1:]
        return _numpy(rows)

    def step(self, tokens: dict[str, int]) -> np.ndarray:
        rows = self._engine.step({self._ids[sequence]: token for sequence, token in tokens.items()})
        for index, sequence in enumerate(tokens):
            self._last[sequence] = rows[index : index + 1]
        return _numpy(rows)

    def greedy(self, sequence: str, count: int) -> GreedyResult:
        from engine.direct import decode

        tokens, rows = decode(self._engine, self._ids[sequence], self._last[sequence], count)
        return GreedyResult(tokens, _numpy(rows))

    def rewind(self, sequence: str, count: int) -> None:
        with _refusals():
            self._engine.rewind(self._ids[sequence], count)

    def save(self, sequence: str, snapshot: str) -> None:
        with _refusals():
            self._saved[snapshot] = self._engine.snapshot(self._ids[sequence])

    def restore(self, sequence: str, snapshot: str) -> None:
        with _refusals():
            self._ids[sequence] = self._engine.restore(self._saved[snapshot], self._ids.get(sequence))

    def close(self, sequence: str) -> None:
        self._engine.close(self._ids.pop(sequence))

    def counters(self) -> dict[str, int]:
        return dict(self._engine.counters)


def _numpy(rows: mx.array) -> np.ndarray:
    import mlx.core as mx

    return np.array(rows.astype(mx.float32))
