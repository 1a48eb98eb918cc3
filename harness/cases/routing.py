"""Routers whose choices have wide margins on any tokens, so that rounding never decides which expert runs.

A router that reads a random direction sees a continuum: among a thousand tokens some lie on the edge between two experts, and
two correct programs then choose differently. So each token of the vocabulary belongs to one of GROUPS groups, and its embedding
holds the group's code word in the first CODE channels, where the blocks write little (LEAK); routers read mostly these
channels. What an expert's logit is for a group is drawn at random until, for every plausible size of the normed code word, the
corrected scores on both sides of the top-k edge lie at least EDGE apart. The rest of the hidden state still shifts the logits
a little, so the choice stands but the weights depend on the context.

`reroute` then measures the margins with the reference over three passes of the whole vocabulary, and draws again where the
least is below the family's `margin`: the bound holds for every seed by construction, not by the luck of a seed. On other tokens
a margin may be smaller, since the rest of the hidden state differs: suites/reference/test_margins.py holds every margin of
twenty seeds to at least five times what naive bfloat16 moves it by.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import reference_models
from harness.cases import build
from harness.cases.case import Case

__all__ = ["CODE", "GROUPS", "Routers", "Site", "among", "exact", "reroute"]

CODE = 8  # channels of the hidden state that hold the code word
GROUPS = 6
AMPLITUDE = 1.6  # root mean square of a code word in the embedding
LEAK = 0.015  # factor on what blocks write to the code channels
CONTEXT = 0.015  # standard deviation of what the other channels add to a router logit, before the norm weight
RESIDUAL = 1.4  # root mean square of the residual where the first router reads it; it grows as the root of the branches added
SPACING = 0.8  # between the logits of neighbouring ranks, at the nominal size of the code word
SIZES = (0.5, 0.6, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 1.8, 2.2)  # of the normed code word, relative to the nominal one
_DRAWS = 400
_BIASES = 100
_ATTEMPTS = 20
_PROBE = 384  # tokens, so that a probe of a large vocabulary stays cheap: its groups are the same ones

Choose = Callable[[Tensor, Tensor], "tuple[Tensor, Tensor]"]  # logits, correction -> margin [...], chosen [..., experts]


def among(topk: int, scores: Callable[[Tensor], Tensor]) -> Choose:
    """The choice of the `topk` best of scores(logits) + correction."""

    def choose(logits: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
        ordered = (scores(logits) + correction).sort(-1, descending=True)
        margin = ordered.values[..., topk - 1] - ordered.values[..., topk]
        return margin, torch.zeros_like(logits).scatter(-1, ordered.indices[..., :topk], 1.0)

    return choose


@dataclass(frozen=True)
class Site:
    """One router. `norm`: the norm weight that it reads through. `depth`: about half the branches that the residual has there.
    `correction`: its correction bias; without one it is the linear bias, `bias`, that makes half of the choices other ones.
    """

    weight: str
    norm: str
    depth: float
    bias: str = ""
    correction: str = ""


@dataclass(frozen=True)
class Routers:
    """How a family routes. `writes`: patterns of the names of tensors that write to the residual -> their hidden axis.

    `mean` of the correction bias. `edge`: least gap of the drawn tables; `margin`: of the reference's measure; both in the
    units that the choice is made in. `spacing` of the logits of neighbouring ranks, at the nominal size of the code word.
    """

    sites: Sequence[Site]
    choose: Choose
    embedding: str = "model.embed_tokens.weight"
    writes: Mapping[str, int] = field(default_factory=lambda: {r"\.(o_proj|down_proj)\.weight$": 0})
    mean: float = 0.0
    edge: float = 0.05
    margin: float = 0.025
    spacing: float = 0.8


def exact(value: Tensor) -> Tensor:
    """Rounded to bfloat16, kept in float32."""
    return value.to(torch.bfloat16).to(torch.float32)


def _tables(generator: torch.Generator, offset: Tensor, routers: Routers, corrected: bool) -> tuple[Tensor, Tensor]:
    """A bias [experts] and router logits [GROUPS, experts] at the nominal size of the code word.

    Every group's edge is wide at every size, the bias changes the choice of half of the groups, and every expert is chosen by
    some group. `offset` is the router's linear bias, which does not grow with the code word. The bias is the correction bias;
    where there is none (not `corrected`), it is the linear bias, drawn anew.
    """
    experts = len(offset)
    sizes = torch.tensor(SIZES)[:, None, None]
    ranks = torch.arange(experts) - (experts - 1) / 2
    none = torch.zeros(experts)
    for _ in range(_BIASES):
        if corrected:
            bias = exact(routers.mean + 0.3 * (torch.rand(experts, generator=generator) - 0.5))
        else:
            offset = exact(0.8 * torch.randn(experts, generator=generator))
        order = torch.rand(_DRAWS, experts, generator=generator).argsort(-1)
        jitter = 0.4 * (torch.rand(_DRAWS, experts, generator=generator) - 0.5)
        logits = routers.spacing * (ranks[order] + jitter)  # [draws, experts]
        # margin [sizes, draws], chosen [sizes, draws, experts]
        margin, chosen = routers.choose(offset + sizes * (logits - offset), bias if corrected else none)
        wide = margin.amin(0) >= routers.edge
        chosen = chosen[0]
        _, unbiased = routers.choose(logits if corrected else logits - offset, none)
        moved = (chosen != unbiased).any(-1)
        picked: list[int] = []
        idle = torch.ones(experts)  # no group has chosen these yet
        for kind in [wide & moved, wide & ~moved] * (GROUPS // 2):
            gain = torch.where(kind, 1 + chosen @ idle, 0.0)
            gain[picked] = 0
            picked.append(int(gain.argmax()))
            if not gain[picked[-1]]:
                break
            idle = idle * (1 - chosen[picked[-1]])
        else:
            if not idle.any():
                return (bias if corrected else offset), logits[picked]
    raise ValueError(f"no router tables with wide margins for {experts} experts in {_BIASES} draws of the bias")


def _plant(routers: Routers, tensors: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
    """A copy of `tensors` with code words, quiet code channels and router weights that read them."""
    planted = dict(tensors)
    words = torch.linalg.qr(torch.randn(CODE, CODE, generator=generator)).Q[:GROUPS] * math.sqrt(CODE) * AMPLITUDE
    embedding = tensors[routers.embedding].clone()
    hidden = embedding.shape[1]
    group = torch.randint(GROUPS, (len(embedding),), generator=generator)
    size = embedding[:, CODE:].square().mean().sqrt() / 0.7  # families scale their embeddings: the code goes along
    embedding[:, :CODE] = size * (words[group] + 0.02 * torch.randn(len(embedding), CODE, generator=generator))
    planted[routers.embedding] = exact(embedding)
    for name, tensor in tensors.items():
        for pattern, axis in routers.writes.items():
            if re.search(pattern, name) and tensor.shape[axis] == hidden:
                quiet = tensor.clone()
                quiet.narrow(axis, 0, CODE).mul_(LEAK)
                planted[name] = exact(quiet)
    for site in routers.sites:
        experts = len(tensors[site.weight])
        offset = tensors[site.bias] if site.bias else torch.zeros(experts)
        bias, table = _tables(generator, offset, routers, bool(site.correction))
        if not site.correction:
            offset = bias
        nominal = RESIDUAL * math.sqrt(1 + 2 * site.depth)
        # a zero expert adds the normed code word to the residual: nearly even norm weights keep its direction
        norm = tensors[site.norm].clone()
        norm[:CODE] = exact((0.02 * torch.randn(CODE, generator=generator)).exp())
        planted[site.norm] = norm
        read = (table - offset).T @ words / (CODE * AMPLITUDE**2) * nominal / norm[:CODE]
        noise = CONTEXT / math.sqrt(hidden) * torch.randn(experts, hidden - CODE, generator=generator)
        planted[site.weight] = exact(torch.cat([read, noise], 1))
        planted[site.correction or site.bias] = bias
    return planted


def reroute(case: Case, seed: int, tensors: dict[str, Tensor], routers: Routers) -> dict[str, Tensor]:
    """`tensors` with routers whose margins are wide on every token of the vocabulary, by the reference's measure."""
    recompute = reference_models.find(case.config["model_type"]).recompute
    least = []
    for attempt in range(_ATTEMPTS):
        generator = build.generator(case, seed, f"routing {attempt}")
        planted = _plant(routers, tensors, generator)
        orders = [torch.randperm(case.config["vocab_size"], generator=generator) for _ in range(3)]
        tokens = torch.cat(orders)[:_PROBE].tolist()
        margins = recompute(case.config, planted, tokens).margins
        assert margins is not None
        least.append(float(margins.min()))
        if least[-1] >= routers.margin:
            return planted
    raise ValueError(f"{case.id}, seed {seed}: no routers with margins of {routers.margin} in {_ATTEMPTS} attempts ({least})")
