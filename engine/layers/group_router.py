"""Sigmoid router with limited groups, as in DeepSeek-V3 https://arxiv.org/abs/2412.19437 and Nemotron 3."""

from __future__ import annotations

import mlx.core as mx

from engine.layers.weights import Weights

__all__ = ["GroupRouter"]


class GroupRouter:
    """Chooses `top_k` experts per token by sigmoid scores plus a correction bias, which has no part in their weights.

    The experts lie in `groups` groups; only those of the `top_groups` groups whose two best sum highest can be chosen: the
    others fall to -inf, not to 0, which would beat a live expert with a negative sum of score and bias.
    Logits, scores and choice are float32 in every compute dtype.
    """

    def __init__(
        self,
        weights: Weights,
        top_k: int,
        *,
        groups: int,
        top_groups: int,
        normalise: bool,
        scale: float,
    ) -> None:
        self.weight = weights["weight"]  # float32 [experts, hidden]
        self.correction_bias = weights["e_score_correction_bias"]  # float32 [experts]
        self.top_k = top_k
        self.groups = groups
        self.top_groups = top_groups
        self.normalise = normalise  # the chosen weights sum to 1 before they are scaled
        self.scale = scale

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [T, hidden]. Returns expert ids [T, top_k], each at most once in a row, and weights float32 [T, top_k]."""
        scores = mx.sigmoid(x.astype(mx.float32) @ self.weight.T)
        choice = scores + self.correction_bias
        if self.top_groups < self.groups:
            choice = self._limited(choice)
        ids = mx.argpartition(-choice, kth=self.top_k - 1, axis=-1)[:, : self.top_k]
        weights = mx.take_along_axis(scores, ids, axis=-1)
        if self.normalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return ids, weights * self.scale

    def _limited(self, choice: mx.array) -> mx.array:
        """choice [T, experts] with -inf for the experts of all but the best groups."""
        grouped = choice.reshape(choice.shape[0], self.groups, -1)
        best = mx.topk(grouped, min(2, grouped.shape[-1]), axis=-1).sum(axis=-1)  # [T, groups]
        dropped = mx.argpartition(best, kth=self.groups - self.top_groups - 1, axis=-1)[:, : self.groups - self.top_groups]
        is_dropped = (dropped[..., None] == mx.arange(self.groups)).any(axis=1)  # [T, groups]
        return mx.where(is_dropped[..., None], -float("inf"), grouped).reshape(choice.shape)
