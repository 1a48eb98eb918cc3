"""Checkpoints that transformers itself saves: a random model of a config, no parameter trivially zero or one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.24", reason="needs the transformers extra")

__all__ = ["logits", "randomised", "save", "transformers"]

LENGTH = 60  # tokens, beyond every window and several chunks


def _drawn(name: str, tensor: torch.Tensor, model_type: str, time_step: float) -> torch.Tensor:
    noise = torch.randn_like(tensor)
    if name.endswith("dt_bias"):
        return time_step + 0.8 * noise
    if name.endswith("A_log"):
        return -1.5 + 0.8 * noise
    if name.endswith("e_score_correction_bias"):
        return 0.2 * noise
    if tensor.ndim == 1 and "norm" in name:
        return 0.3 * noise + (0.0 if model_type.startswith("gemma3") else 1.0)
    if tensor.ndim == 1 or name.endswith("_bias"):
        return 0.5 * noise
    transposed = model_type == "gpt_oss" and ".experts." in name
    return 1.3 * noise * tensor.shape[1 if transposed else -1] ** -0.5


def randomised(model: Any, model_type: str, seed: int, time_step: float = -0.7) -> Any:
    """The model with every parameter, and what its routers correct by, drawn anew."""
    torch.manual_seed(seed)
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if "correction" in name]
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *buffers]:
            tensor.copy_(_drawn(name, tensor, model_type, time_step))
    return model


def save(directory: Path, config: dict[str, Any], seed: int = 0, time_step: float = -0.7) -> tuple[Any, list[int]]:
    """A float32 model of the config, saved by transformers to the directory, and tokens for it.

    `time_step`: mean of the bias of a Mamba mixer's time steps.
    """
    settings = dict(config)
    made = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
    randomised(model, config["model_type"], seed, time_step).save_pretrained(directory)
    vocab = getattr(made, "text_config", made).vocab_size
    tokens = torch.randint(3, vocab, (LENGTH,), generator=torch.Generator().manual_seed(seed + 1)).tolist()
    return model, tokens


def logits(model: Any, tokens: list[int]) -> np.ndarray:
    """float32 [T, vocab] of one full forward, no cache."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
