"""mlx-lm as a target, through its public model and cache API. What it gets wrong is reported as found."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from harness.outcomes import Infra, Unsupported
from harness.target import Capabilities, GreedyResult, Loaded, Session

__all__ = ["MlxLmTarget"]


class MlxLmTarget:
    """Sequences are prompt caches; a batched step merges the caches of its sequences and takes them apart again.

    Where mlx-lm decides (its cuts of a prompt, its choice of tokens) its own generation loop runs, and a logits processor, its
    way to let callers see logits, notes the rows.
    """

    name = "mlx_lm"
    capabilities = Capabilities(dtypes=frozenset({"float32", "bfloat16", "float16"}))

    def require(self) -> None:
        if importlib.util.find_spec("mlx_lm") is None:
            raise Infra("mlx-lm is not installed; pip install 'decodegate[mlx-lm]'")

    def environment(self) -> dict[str, str]:
        import mlx.core as mx

        return {"mlx": metadata.version("mlx"), "version": metadata.version("mlx-lm"), "device": str(mx.default_device())}

    def load(self, checkpoint: Path, *, dtype: str, layout: str) -> Loaded:
        import mlx.core as mx
        from mlx_lm.utils import load_model

        model, _ = load_model(checkpoint)
        model.set_dtype(getattr(mx, dtype))
        mx.eval(model.parameters())
        return _MlxLmModel(model)


class _MlxLmModel:
    def __init__(self, model: Any) -> None:
        self._model = model

    def start(self) -> Session:
        return _MlxLmSession(self._model)


class _MlxLmSession:
    def __init__(self, model: Any) -> None:
        self._model = model
        self._caches: dict[str, list[Any]] = {}
        self._last: dict[str, np.ndarray] = {}  # the last row of each sequence
        self._counters = {"prefill_chunks": 0, "decode_steps": 0, "batched_rows": 0}

    def open(self, sequence: str) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self._caches[sequence] = make_prompt_cache(self._model)

    def feed(self, sequence: str, tokens: list[int], *, all_rows: bool, chunk: int | None) -> np.ndarray:
        if chunk is None:
            self._counters["prefill_chunks"] += 1
            rows = self._forward([tokens], self._caches[sequence])[0]
        elif all_rows:
            raise Unsupported("mlx-lm gives the last row only of a prompt that it cuts itself")
        else:
            _, rows = self._generate(sequence, tokens, 0, chunk)
        self._last[sequence] = rows[-1]
        return rows if all_rows else rows[-1:]

    def step(self, tokens: dict[str, int]) -> np.ndarray:
        self._counters["decode_steps"] += 1
        names = list(tokens)
        if len(names) == 1:
            rows = self._forward([[tokens[names[0]]]], self._caches[names[0]])[:, -1]
        else:
            self._counters["batched_rows"] += len(names)
            layers = list(zip(*(self._caches[name] for name in names), strict=True))  # [layer][sequence]
            merged = [type(layer[0]).merge(list(layer)) for layer in layers]
            rows = self._forward([[tokens[name]] for name in names], merged)[:, -1]
            for index, name in enumerate(names):
                self._caches[name] = [cache.extract(index) for cache in merged]
        self._last.update(zip(names, rows, strict=True))
        return rows

    def greedy(self, sequence: str, count: int) -> GreedyResult:
        first = int(self._last[sequence].argmax())  # its loop starts from a token, not from a row
        chosen, rows = self._generate(sequence, [first], count - 1, None)
        self._counters["decode_steps"] += count
        self._last[sequence] = rows[-1]
        return GreedyResult([first, *chosen], rows)

    def rewind(self, sequence: str, count: int) -> None:
        from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

        cache = self._caches[sequence]
        trimmed = trim_prompt_cache(cache, count) if can_trim_prompt_cache(cache) else 0
        if trimmed != count:
            raise RuntimeError(f"mlx-lm dropped {trimmed} of {count} tokens")

    def close(self, sequence: str) -> None:
        del self._caches[sequence]

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def _generate(self, sequence: str, prompt: list[int], count: int, chunk: int | None) -> tuple[list[int], np.ndarray]:
        """Tokens that its loop chose, and float32 [count + 1, vocab]: the row each was chosen from, and the last."""
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        rows: list[Any] = []
        fed = [0]

        def note(tokens: Any, logits: Any) -> Any:
            rows.append(logits)
            return logits

        def progress(done: int, total: int) -> None:
            self._counters["prefill_chunks"] += chunk is not None and done > fed[-1]
            fed.append(done)

        options: dict[str, Any] = {} if chunk is None else {"prefill_step_size": chunk}
        loop = generate_step(
            mx.array(prompt, dtype=mx.int32),
            self._model,
            max_tokens=count,
            logits_processors=[note],
            prompt_cache=self._caches[sequence],
            prompt_progress_callback=progress,
            **options,
        )
        chosen = [int(token) for token, _ in loop]
        return chosen, np.array(mx.concatenate(rows).astype(mx.float32))

    def _forward(self, tokens: list[list[int]], cache: list[Any]) -> np.ndarray:
        """[sequences, tokens] -> float32 [sequences, tokens, vocab]."""
        import mlx.core as mx

        logits = self._model(mx.array(tokens, dtype=mx.int32), cache=cache)
        return np.array(logits.astype(mx.float32))
