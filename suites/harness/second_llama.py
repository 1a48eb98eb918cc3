"""A second honest llama, in torch, and the ways to break it: what the bounds are measured with, without the engine.

It decodes as an engine does (key/value cache, pieces of the prompt, one token at a time) and rounds as an engine may: fused
attention, rotary frequencies by another formula, norm and weight multiplied before rounding, rotation in the dtype itself.
It takes rope frequencies of scaled kinds from the reference, since it is a yardstick of rounding, not of equations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from harness.target import GreedyResult
from reference_models import llama

FAULTS = ("rope_offset", "no_mask", "dropped_key", "scale", "rewind_counter", "stale_state")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Cache:
    def __init__(self) -> None:
        self.position = 0
        self.calls = 0
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.last: np.ndarray | None = None


class SecondLlama:
    """A Session on one checkpoint; `fault` is one of FAULTS or None. `rotate_in_dtype` is the coarser way to rotate."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        dtype: str,
        fault: str | None = None,
        rotate_in_dtype: bool = False,
    ) -> None:
        assert fault is None or fault in FAULTS
        self.shape = llama._shape(config)
        self.dtype, self.fault = DTYPES[dtype], fault
        self.weights = {name: value.to(self.dtype) for name, value in weights.items()}
        self.rotate_dtype = self.dtype if rotate_in_dtype else torch.float32
        frequency, self.magnitude = llama._inverse_frequencies(config, self.shape.head_dim, torch.float64)
        if not config.get("rope_scaling") and not config.get("rope_parameters"):
            half = self.shape.head_dim // 2
            step = torch.tensor(math.log(config.get("rope_theta", 10000.0)) / half, dtype=torch.float32)
            frequency = torch.exp(-torch.arange(half, dtype=torch.float32) * step)
        self.frequency = frequency.to(torch.float32)
        self.caches: dict[str, _Cache] = {}
        self.closed = _Cache()

    def open(self, sequence: str) -> None:
        self.caches[sequence] = self.closed if self.fault == "stale_state" else _Cache()
        self.caches[sequence].position = 0

    def close(self, sequence: str) -> None:
        self.closed = self.caches.pop(sequence)

    def rewind(self, sequence: str, count: int) -> None:
        cache = self.caches[sequence]
        cache.position -= count
        if self.fault != "rewind_counter":
            cache.layers = {layer: (k[:, :-count], v[:, :-count]) for layer, (k, v) in cache.layers.items()}

    def feed(self, sequence: str, tokens: list[int], *, all_rows: bool, chunk: int | None) -> np.ndarray:
        size = chunk or len(tokens)
        pieces = [self._forward(self.caches[sequence], tokens[start : start + size]) for start in range(0, len(tokens), size)]
        rows = np.concatenate(pieces)
        self.caches[sequence].last = rows[-1]
        return rows if all_rows else rows[-1:]

    def step(self, tokens: dict[str, int]) -> np.ndarray:
        return np.concatenate([self.feed(name, [token], all_rows=False, chunk=None) for name, token in tokens.items()])

    def greedy(self, sequence: str, count: int) -> GreedyResult:
        cache, chosen, rows = self.caches[sequence], [], []
        for _ in range(count):
            assert cache.last is not None
            chosen.append(int(cache.last.argmax()))
            rows.append(self.feed(sequence, chosen[-1:], all_rows=False, chunk=None)[0])
        return GreedyResult(chosen, np.stack(rows))

    def counters(self) -> dict[str, int]:
        return {"calls": sum(cache.calls for cache in self.caches.values())}

    def _linear(self, x: Tensor, name: str, bias: bool) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"] if bias else None)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        y = x.to(torch.float32)
        y = (
            y
            / torch.sqrt(y.square().mean(-1, keepdim=True) + self.shape.eps)
            * self.weights[f"{name}.weight"].to(torch.float32)
        )
        return y.to(self.dtype)

    def _mask(self, queries: int, keys: int, cache: _Cache) -> Tensor:
        if self.fault == "no_mask" and cache.calls == 1:
            return torch.ones(queries, keys, dtype=torch.bool)
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        if self.fault == "dropped_key" and keys > 6:
            mask[max(0, 6 - (keys - queries)) :, 5] = False
        return mask

    def _forward(self, cache: _Cache, tokens: list[int]) -> np.ndarray:
        s, count = self.shape, len(tokens)
        start = cache.position + (self.fault == "rope_offset" and cache.calls > 0)
        angle = torch.arange(start, start + count, dtype=torch.float32)[:, None] * self.frequency
        cos, sin = ((t * self.magnitude).to(self.rotate_dtype) for t in (angle.cos(), angle.sin()))

        def rotate(x: Tensor) -> Tensor:
            a, b = x.to(self.rotate_dtype).chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(self.dtype)

        x = self.weights["model.embed_tokens.weight"][torch.tensor(tokens)]
        for layer in range(s.layers):
            name = f"model.layers.{layer}"
            h = self._norm(x, f"{name}.input_layernorm")
            q, k, v = (
                self._linear(h, f"{name}.self_attn.{part}_proj", s.attention_bias).view(count, -1, s.head_dim).transpose(0, 1)
                for part in "qkv"
            )
            q, k = rotate(q), rotate(k)
            if layer in cache.layers:
                k, v = (torch.cat([old, new], 1) for old, new in zip(cache.layers[layer], (k, v), strict=True))
            cache.layers[layer] = k, v
            k, v = (t.repeat_interleave(s.heads // s.kv_heads, 0) for t in (k, v))
            scale = s.head_dim**-0.5 * (1.01 if self.fault == "scale" else 1.0)
            mask = self._mask(count, k.shape[1], cache)
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
            x = x + self._linear(out.transpose(0, 1).reshape(count, -1), f"{name}.self_attn.o_proj", s.attention_bias)
            h = self._norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self._linear(h, f"{name}.mlp.{part}_proj", s.mlp_bias) for part in ("gate", "up"))
            x = x + self._linear(F.silu(gate) * up, f"{name}.mlp.down_proj", s.mlp_bias)
        cache.position += count
        cache.calls += 1
        head = self.weights["model.embed_tokens.weight" if s.tied else "lm_head.weight"]
        return F.linear(self._norm(x, "model.norm"), head).to(torch.float32).detach().numpy()
