"""Mixture of experts: a float32 router, experts with weights, and zero experts, which return their input.

Zero experts as in https://arxiv.org/abs/2509.01322; the correction bias as in https://arxiv.org/abs/2408.15664: it takes part
in the choice of experts, never in their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from engine.layers.activations import softmax
from engine.layers.weights import Weights

__all__ = ["Experts", "MixtureOfExperts", "PlainExperts", "Router"]


class Router:
    """Chooses `top_k` of the classifier's experts per token. Scores, bias and choice are float32 in every compute dtype."""

    def __init__(self, weights: Weights, top_k: int, *, bias: bool, normalise: bool, scale: float) -> None:
        self.classifier = weights["classifier.weight"]  # float32 [experts, hidden]
        self.bias = weights["classifier.bias"] if bias else None  # float32 [experts]
        self.correction_bias = weights["e_score_correction_bias"]  # float32 [experts]
        self.top_k = top_k
        self.normalise = normalise  # the chosen weights sum to 1 before they are scaled
        self.scale = scale

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [T, hidden]. Returns expert ids [T, top_k], each at most once in a row, and weights float32 [T, top_k]."""
        logits = x.astype(mx.float32) @ self.classifier.T
        scores = softmax(logits if self.bias is None else logits + self.bias)
        ids = mx.argpartition(-(scores + self.correction_bias), kth=self.top_k - 1, axis=-1)[:, : self.top_k]
        weights = mx.take_along_axis(scores, ids, axis=-1)
        if self.normalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return ids, weights * self.scale


class Experts(Protocol):
    """Experts with weights, ids [0, len)."""

    def __len__(self) -> int: ...

    def __call__(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        """x [T, hidden], ids [T, k] and weights float32 [T, k] of the chosen experts; an id from `len` on is none of these.

        Returns the weighted sums of the experts' outputs, float32 [T, hidden].
        """
        ...


class PlainExperts:
    """Experts that are evaluated one after another, each once for all its tokens; experts without tokens are not touched.

    The ids are read on the host, which evaluates what leads to them.
    """

    def __init__(self, experts: Sequence[Callable[[mx.array], mx.array]]) -> None:
        self.experts = experts

    def __len__(self) -> int:
        return len(self.experts)

    def __call__(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        chosen = np.asarray(ids).reshape(-1)
        order = np.argsort(chosen, kind="stable")  # choices by expert, in each the tokens in order
        order = order[: np.count_nonzero(chosen < len(self))]
        out = mx.zeros(x.shape, mx.float32)
        if not order.size:
            return out
        if x.shape[0] == 1:  # one token: nothing to group, gather or scatter
            parts = [self.experts[chosen[choice]](x) * weights[:, int(choice), None] for choice in order]
            return sum(parts, out)
        tokens = order // ids.shape[1]
        occupied, starts = np.unique(chosen[order], return_index=True)
        parts = []
        for expert, start, stop in zip(occupied, starts, [*starts[1:], order.size], strict=True):
            parts.append(self.experts[expert](x[mx.array(tokens[start:stop])]))
        outputs = parts[0] if len(parts) == 1 else mx.concatenate(parts)  # [choices, hidden]
        return out.at[mx.array(tokens)].add(outputs * weights.reshape(-1)[mx.array(order)][:, None])


class MixtureOfExperts:
    """Ids from `len(experts)` on are zero experts."""

    def __init__(self, router: Router, experts: Experts) -> None:
        self.router = router
        self.experts = experts

    def __call__(self, x: mx.array) -> mx.array:
        """x [T, hidden] -> [T, hidden], in x's dtype."""
        ids, weights = self.router(x)
        out = self.experts(x, ids, weights)
        identity = mx.where(ids >= len(self.experts), weights, 0.0).sum(axis=-1, keepdims=True)  # [T, 1]
        return (out + identity * x).astype(x.dtype)
