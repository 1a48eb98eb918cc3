"""A target in numpy for the harness's own tests: llama without a cache, and variants that go wrong in every way a target can.

Variants are honest until a sequence is rewound, so that of all checks only the one with a rewind meets what is wrong.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from safetensors.numpy import load_file

from harness.faults import Fault, Patch, Planted
from harness.outcomes import Infra, Unsupported
from harness.target import Capabilities, GreedyResult


class Honest:
    name = "honest"

    def __init_subclass__(cls) -> None:
        cls.name = re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    capabilities = Capabilities(families=frozenset({"llama"}))

    def require(self) -> None:
        """numpy is always there."""

    def environment(self) -> dict[str, str]:
        return {"device": "numpy", "version": np.__version__}

    def load(self, checkpoint: Path, *, dtype: str, layout: str) -> Honest:
        self._config = json.loads((checkpoint / "config.json").read_text())
        self._weights = load_file(checkpoint / "model.safetensors")
        return self

    def start(self) -> Session:
        return Session(self, self._config, self._weights)

    def on_rewind(self, session: Session) -> None:
        """What a variant does instead."""

    def on_rows(self, rows: np.ndarray) -> np.ndarray:
        """What a variant makes of the rows after a rewind."""
        return rows


class Session:
    def __init__(self, target: Honest, config: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
        self._target, self._config, self._weights = target, config, weights
        self._tokens: dict[str, list[int]] = {}
        self._rewound = False
        self._counters = {"prefill_chunks": 0, "decode_steps": 0, "batched_rows": 0}

    def open(self, sequence: str) -> None:
        self._tokens[sequence] = []

    def feed(self, sequence: str, tokens: list[int], *, all_rows: bool, chunk: int | None) -> np.ndarray:
        self._counters["prefill_chunks"] += -(-len(tokens) // (chunk or len(tokens)))
        self._tokens[sequence] += tokens
        return self._rows(sequence, len(tokens) if all_rows else 1)

    def step(self, tokens: dict[str, int]) -> np.ndarray:
        self._counters["decode_steps"] += 1
        self._counters["batched_rows"] += len(tokens) * (len(tokens) > 1)
        for sequence, token in tokens.items():
            self._tokens[sequence].append(token)
        return np.concatenate([self._rows(sequence, 1) for sequence in tokens])

    def greedy(self, sequence: str, count: int) -> GreedyResult:
        chosen, rows = [], []
        for _ in range(count):
            chosen.append(int(self._rows(sequence, 1)[0].argmax()))
            rows.append(self.step({sequence: chosen[-1]})[0])
        return GreedyResult(chosen, np.stack(rows))

    def rewind(self, sequence: str, count: int) -> None:
        del self._tokens[sequence][len(self._tokens[sequence]) - count :]
        self._rewound = True
        self._target.on_rewind(self)

    def close(self, sequence: str) -> None:
        del self._tokens[sequence]

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def _rows(self, sequence: str, count: int) -> np.ndarray:
        rows = llama(self._config, self._weights, self._tokens[sequence])[-count:]
        return self._target.on_rows(rows) if self._rewound else rows


def llama(config: dict[str, Any], weights: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """float32 [tokens, vocab]; default rope and no biases, which is what llama/gqa, mha, mqa and tied need."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    dim = config.get("head_dim", hidden // heads)
    n = len(tokens)
    inverse = config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    angles = np.arange(n)[:, None, None] * inverse
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    mask = np.where(np.tri(n, dtype=bool), 0.0, -np.inf).astype(np.float32)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]

    def rotated(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        a = norm(x, f"{layer}.input_layernorm")
        q, k, v = (a @ weights[f"{layer}.self_attn.{p}_proj.weight"].T for p in "qkv")
        q = rotated(q.reshape(n, heads, dim)).swapaxes(0, 1)
        k, v = (
            np.repeat(t.reshape(n, kv_heads, dim).swapaxes(0, 1), heads // kv_heads, 0)
            for t in (rotated(k.reshape(n, kv_heads, dim)), v)
        )
        scores = q @ k.swapaxes(1, 2) / np.sqrt(np.float32(dim)) + mask
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out = (scores / scores.sum(-1, keepdims=True)) @ v
        x = x + out.swapaxes(0, 1).reshape(n, -1) @ weights[f"{layer}.self_attn.o_proj.weight"].T
        a = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (a @ weights[f"{layer}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{layer}.mlp.down_proj.weight"].T
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return norm(x, "model.norm") @ weights[f"{head}.weight"].T


class Segfaults(Honest):
    def on_rewind(self, session: Session) -> None:
        print("about to read a null pointer", file=sys.stderr)
        ctypes.string_at(0)


class Aborts(Honest):
    def on_rewind(self, session: Session) -> None:
        os.write(2, b"assertion failed: cache->offset == 3\n")
        os.abort()


class Exits(Honest):
    status = 7

    def on_rewind(self, session: Session) -> None:
        os._exit(self.status)


class ExitsWithZero(Exits):
    status = 0


class CallsSysExit(Honest):
    def on_rewind(self, session: Session) -> None:
        sys.exit("no licence")


class IsKilled(Honest):
    def on_rewind(self, session: Session) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Honest):
    def on_rewind(self, session: Session) -> None:
        time.sleep(600)


class HangsWithTheInterpreterLock(Honest):
    def on_rewind(self, session: Session) -> None:
        ctypes.PyDLL(None).sleep(600)  # PyDLL keeps the lock: no other thread of the process runs


class RunsOutOfMemory(Honest):
    def on_rewind(self, session: Session) -> None:
        hoard = []
        while True:
            hoard.append(np.ones(2**24))


class PrintsGarbage(Honest):
    def on_rewind(self, session: Session) -> None:
        for stream in (1, 2):
            os.write(stream, bytes(range(256)) * 4096)
        print("\x1b[2J" + "x" * 100_000)


class PrintsGarbageAndDies(PrintsGarbage):
    def on_rewind(self, session: Session) -> None:
        super().on_rewind(session)
        os._exit(3)


class IsBuiltElsewhere(Honest):
    """Says that a build replaces a package that no build of the tests has."""

    package = "json"


class StartsAProcess(Honest):
    def on_rewind(self, session: Session) -> None:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


class Raises(Honest):
    def on_rewind(self, session: Session) -> None:
        raise KeyError("layer 3\nhas no cache")


class RaisesUnsupported(Honest):
    def on_rewind(self, session: Session) -> None:
        raise Unsupported("a ring cache cannot go back")


class GivesNan(Honest):
    def on_rows(self, rows: np.ndarray) -> np.ndarray:
        return rows * np.nan


class GivesWrongShape(Honest):
    def on_rows(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, :-1]


class GivesTooFewRows(Honest):
    def on_rows(self, rows: np.ndarray) -> np.ndarray:
        return rows[:0]


class IsWrong(Honest):
    def on_rows(self, rows: np.ndarray) -> np.ndarray:
        return rows + np.linspace(0, 0.01, rows.shape[1], dtype=np.float32)


class RaisesSurrogates(Honest):
    def load(self, checkpoint: Path, *, dtype: str, layout: str) -> Honest:
        raise RuntimeError("bad \ud800 text")  # as in the name of a file that is no UTF-8


class CannotBeMade(Honest):
    def __init__(self) -> None:
        raise RuntimeError("no\nway")


class HasABadName(Honest):
    def __init__(self) -> None:
        self.name = "a::b"


class HasNoName:
    """Nor anything else that a target has."""


class CannotRewind(Honest):
    capabilities = Capabilities(families=frozenset({"llama"}), rewind="it keeps no history")


class CutsNothing(Honest):
    """Takes a chunk size and feeds the prompt in one piece all the same."""

    def start(self) -> Session:
        session = super().start()
        feed = session.feed
        session.feed = lambda sequence, tokens, *, all_rows, chunk: feed(sequence, tokens, all_rows=all_rows, chunk=None)  # type: ignore[method-assign]
        return session


class IsNotInstalled(Honest):
    def require(self) -> None:
        raise Infra("fake-engine is not installed; pip install fake-engine")


class LingersOnEachRun(Honest):
    """Slow enough to be killed in the middle of a run."""

    def start(self) -> Session:
        time.sleep(0.2)
        return super().start()


def _fault(name: str, by: float | None, called: bool = True) -> Fault:
    def make(planted: Planted) -> list[Patch]:
        honest = Session._rows

        def rows(self: Session, sequence: str, count: int) -> np.ndarray:
            if called:
                planted.mark()
            if by is None:
                raise RuntimeError("planted")
            return honest(self, sequence, count) + np.float32(by)

        return [(Session, "_rows", rows)]

    return Fault(name, "rows are moved", make)


class Faulty(Honest):
    faults: ClassVar = {
        fault.name: fault
        for fault in (
            _fault("shows", 1.0),
            _fault("has_no_effect", 0.0),
            _fault("is_never_called", 1.0, called=False),
            _fault("raises", None),
        )
    }
