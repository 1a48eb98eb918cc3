"""A case and a seed become a checkpoint directory: config.json and model.safetensors.

Every parameter is random and none is trivially zero or one, so that a parameter that an engine leaves out, adds twice or puts
in the wrong place moves the logits. Values are rounded to bfloat16, whatever dtype the file is in: one file serves all compute
dtypes without a rounding that would be counted as the target's error.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import reference_models
from harness.cases import stored
from harness.cases.case import Case

__all__ = ["build", "drawn", "fingerprint", "generator", "initial"]

# Gain of a weight [out, in]: its entries are normal with standard deviation gain / sqrt(in). Measured (suites/harness/
# test_cases.py): attention with a few keys that count for each query, branches of the size of the residual, and logits with
# standard deviation 1 to 3, so that one wrong position or key moves the logits by about as much as another prompt would.
GAINS = {
    "q_proj": 1.2,
    "k_proj": 1.2,
    "v_proj": 2.0,
    "o_proj": 2.0,
    "gate_proj": 0.7,
    "up_proj": 0.7,
    "down_proj": 0.7,
    "lm_head": 2.0,
    "gate_up_proj": 1.0,
    "in_proj": 1.0,
    "out_proj": 1.5,
    "conv1d": 0.6,
}
# Parameters that are neither weight, bias nor norm: mean and deviation. Time steps of 0.1 to 2 and decay rates of 0.05 to 1:
# a state forgets half of itself in 1 to 100 tokens.
SPREAD = {"dt_bias": (-0.7, 0.8), "A_log": (-1.5, 0.8), "sinks": (0.7, 0.8)}
TIED_EMBEDDING_GAIN = 2.0  # over sqrt(hidden): it is the head too


def generator(case: Case, seed: int, name: str) -> torch.Generator:
    """The random numbers of one part, usually a parameter, of (family, seed): the cases of a family share what they can."""
    digest = hashlib.sha256(f"{case.family}/{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def initial(case: Case, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """One parameter, float32 with bfloat16 values; each has a generator of its own, so that adding one changes no other."""
    noise = torch.randn(shape, generator=generator(case, seed, name))
    module, kind = name.split(".")[-2:]
    if kind in SPREAD:
        mean, deviation = SPREAD[kind]
        value = mean + deviation * noise
    elif kind.endswith("bias"):
        value = 0.5 * noise
    elif kind in GAINS:  # experts in one tensor [experts, in, out]
        value = noise * GAINS[kind] / math.sqrt(shape[1])
    elif len(shape) == 1:  # norm weights: spread around one, of one sign, no channel switched off
        value = (0.3 * noise).exp()
    elif module in ("embed_tokens", "embeddings"):
        value = noise * (TIED_EMBEDDING_GAIN / math.sqrt(shape[1]) if case.text.get("tie_word_embeddings") else 0.7)
    else:
        value = noise * GAINS.get(module, 1.0) / math.sqrt(shape[1])
    return value.to(torch.bfloat16).to(torch.float32)


def drawn(case: Case, seed: int) -> dict[str, Tensor]:
    """All parameters. A family module that has `adjust(case, seed, tensors) -> tensors` has the last word on its own."""
    shapes = reference_models.find(case.config["model_type"]).parameters(case.config)
    tensors = {name: initial(case, seed, name, shape) for name, shape in shapes.items()}
    adjust = getattr(importlib.import_module(f"harness.cases.{case.family}"), "adjust", None)
    return tensors if adjust is None else adjust(case, seed, tensors)


def _recipe() -> bytes:
    """The sources that decide the values: a kept directory is not reused after one of them changed."""
    return b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))


def build(case: Case, seed: int, directory: Path) -> Path:
    """The checkpoint of (case, seed) under `directory`; written once, whole or not at all, also by several processes."""
    config = dict(case.config)
    key = hashlib.sha256(_recipe() + json.dumps([config, case.stored], sort_keys=True).encode()).hexdigest()[:12]
    target = Path(directory) / f"{case.family}-{case.name}-{seed}-{key}"
    if target.exists():
        return target
    tensors = drawn(case, seed)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        tensors = {name: tensor.to(getattr(torch, case.file_dtype)) for name, tensor in tensors.items()}
        stored.write(case.stored, config, tensors, scratch)
        os.rename(scratch, target)
    except OSError:
        if not target.exists():  # else another process was faster, and its directory is the same
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def fingerprint(checkpoint: Path) -> str:
    """16 hex digits that are equal for equal checkpoints: config and weights."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.json")) + sorted(checkpoint.glob("*.safetensors")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
