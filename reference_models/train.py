"""Train one small checkpoint: `python -m reference_models.train FAMILY`, minutes on one core.

Writes config.json, model.safetensors, tokenizer.json, tokenizer_config.json and training.json to
`reference_models/checkpoints/FAMILY`, beside the chat template that is kept there. The reference itself is trained, in float32.
Deterministic: one thread, fixed seeds, deterministic kernels; the same bits come out on the same torch, Python and processor.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

import reference_models
from reference_models import nemotron_h, training_text

__all__ = ["CONFIGS", "FLOAT32", "main", "parameters", "train"]

ROOT = Path(__file__).parent / "checkpoints"
SEED = 20_240_229
WINDOW, BATCH, RATE, WARMUP = 128, 8, 4e-3, 40
STEPS = {"llama": 600, "nemotron_nas": 500, "longcat_flash": 450, "longcat_flash_ngram": 450, "nemotron_h": 250}
HELD_OUT = 0.03  # of the chats, from the end
GUESSES = 0.3  # weight of the loss of a head that guesses one token further
# float32 in published files: routers, and what the recurrence is made of
FLOAT32 = ("router.classifier.weight", "e_score_correction_bias", "gate.weight", "A_log", "dt_bias", "mixer.D")

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "hidden_size": 96,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 512,
}
_LLAMA: dict[str, Any] = _COMMON | {
    "bos_token_id": 0,
    "eos_token_id": [1, 4],
    "hidden_act": "silu",
    "mlp_bias": False,
    "num_attention_heads": 6,
    "num_hidden_layers": 4,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 256,
        "rope_type": "llama3",
    },
    "rope_theta": 10000.0,
}
_LONGCAT: dict[str, Any] = _COMMON | {
    "attention_method": "MLA",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "expert_ffn_hidden_size": 64,
    "ffn_hidden_size": 192,
    "kv_lora_rank": 24,
    "mla_scale_kv_lora": True,
    "mla_scale_q_lora": True,
    "moe_topk": 2,
    "n_routed_experts": 4,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_layers": 2,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.0,
    "router_bias": False,
    "v_head_dim": 24,
    "zero_expert_num": 2,
    "zero_expert_type": "identity",
}


def _block(attention: dict[str, Any], ffn: dict[str, Any]) -> dict[str, Any]:
    unset = {"no_op": False, "replace_with_linear": False, "sparsify": None}
    windows = {
        "num_sink_tokens": None,
        "unshifted_sink": False,
        "use_prefill_window_in_sink_attention": False,
        "window_length": None,
    }
    return {"attention": unset | windows | {"n_heads_in_group": None} | attention, "ffn": unset | {"ffn_mult": None} | ffn}


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 256,
        "num_key_value_heads": 2,
    },
    "nemotron_nas": _LLAMA
    | {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "intermediate_size": None,
        "num_hidden_layers": 5,
        "num_key_value_heads": None,
        "block_configs": [
            _block({"replace_with_linear": True}, {"ffn_mult": 2.625}),
            _block({"n_heads_in_group": 3}, {"ffn_mult": 2.625}),
            _block({"no_op": True}, {"replace_with_linear": True}),
            _block({"n_heads_in_group": 2}, {"ffn_mult": 5.25}),
            _block({"n_heads_in_group": 6}, {"no_op": True}),
        ],
    },
    "nemotron_h": _COMMON
    | {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "bos_token_id": 1,
        "chunk_size": 32,
        "conv_kernel": 4,
        "eos_token_id": [2, 4],
        "head_dim": 32,
        "hybrid_override_pattern": "ME*M-E",
        "intermediate_size": 192,
        "layer_norm_epsilon": 1e-5,
        "mamba_head_dim": 16,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": 8,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 96,
        "mtp_hybrid_override_pattern": "*E",
        "n_group": 1,
        "n_groups": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 6,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 0,
        "routed_scaling_factor": 2.5,
        "ssm_state_size": 16,
        "topk_group": 1,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "longcat_flash": _LONGCAT | {"architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash"},
    "longcat_flash_ngram": _LONGCAT
    | {
        "architectures": ["LongcatFlashNgramForCausalLM"],
        "model_type": "longcat_flash_ngram",
        "emb_neighbor_num": 4,
        "emb_split_num": 4,
        "ngram_vocab_size_ratio": 4,
        "pad_token_id": 3,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "mscale": 1,
            "mscale_all_dim": 1,
            "original_max_position_embeddings": 256,
            "type": "yarn",
        },
    },
}


def _initial(config: dict[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    tensors = {}
    for name, shape in parameters(config).items():
        if name.endswith("e_score_correction_bias"):  # only chooses, so it has no gradient: it stays as drawn
            tensors[name] = 0.1 * (torch.rand(shape, generator=generator) - 0.5)
            continue
        if name.endswith("A_log"):  # decay rates of 1 to 16
            tensors[name] = (1 + 15 * torch.rand(shape, generator=generator)).log().requires_grad_()
            continue
        if name.endswith("dt_bias"):  # time steps of 0.001 to 0.1
            steps = torch.exp(math.log(1e-3) + math.log(100) * torch.rand(shape, generator=generator))
            tensors[name] = steps.expm1().log().requires_grad_()
            continue
        out = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
        scale = 0.5 if "embed" in name and "post_projs" not in name else (0.3 if out else 0.8) / math.sqrt(shape[-1])
        drawn = torch.randn(shape, generator=generator)
        tensors[name] = (torch.ones(shape) + 0.1 * drawn if len(shape) == 1 else scale * drawn).requires_grad_()
    return tensors


def parameters(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all that is trained: the reference's parameters, and those of its MTP head where it has one."""
    reference = reference_models.find(config["model_type"])
    guesses = getattr(reference, "mtp_parameters", None)
    return {**reference.parameters(config), **(guesses(config) if guesses else {})}


def _loss(config: dict[str, Any], tensors: dict[str, Tensor], window: list[int]) -> Tensor:
    """Nats a token; where there is an MTP head, with its own loss, weighted by GUESSES, on top."""
    following = torch.tensor(window[1:])
    if not config.get("num_nextn_predict_layers"):
        rows = reference_models.find(config["model_type"]).recompute(config, tensors, window[:-1], dtype=torch.float32).logits
        return F.cross_entropy(rows, following)
    hidden = nemotron_h.hidden_states(config, tensors, window[:-1], dtype=torch.float32)
    guess = nemotron_h.mtp(config, tensors, hidden[:-1], window[1:-1])
    own = F.cross_entropy(nemotron_h.head(config, tensors, hidden), following)
    return own + GUESSES * F.cross_entropy(guess.logits, following[1:])


def _rate(step: int, steps: int) -> float:
    return RATE * min((step + 1) / WARMUP, 0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)


def train(family: str, steps: int) -> tuple[dict[str, Tensor], tokenizers.Tokenizer, dict[str, Any]]:
    """The trained tensors in the dtypes of the file, the tokenizer, and what there is to say about the training."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    config = CONFIGS[family]
    template = ROOT / family / "chat_template.jinja"
    chats = training_text.documents()
    texts = [training_text.render(template, chat, training_text.SPECIAL[family][0]) for chat in chats]
    held = int(len(texts) * (1 - HELD_OUT))
    tokenizer = training_text.tokenizer(family, texts[:held], config["vocab_size"])
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    stream = [token for ids in encoded[:held] for token in ids]
    unseen = [token for ids in encoded[held:] for token in ids]

    tensors = _initial(config, torch.Generator().manual_seed(SEED))
    trained = [tensor for tensor in tensors.values() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    pick = random.Random(SEED)
    started, recent = time.monotonic(), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, steps)
        optimizer.zero_grad(set_to_none=True)
        for _ in range(BATCH):
            start = pick.randrange(len(stream) - WINDOW)
            window = stream[start : start + WINDOW + 1]
            loss = _loss(config, tensors, window) / BATCH
            loss.backward()
            recent.append(float(loss.detach()) * BATCH)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        recent = recent[-100 * BATCH :]
        if step % 100 == 99:
            print(
                f"{family} step {step + 1}/{steps} loss {sum(recent) / len(recent):.3f} {time.monotonic() - started:.0f} s",
                flush=True,
            )

    saved = {
        name: tensor.detach().to(torch.float32 if name.endswith(FLOAT32) else torch.bfloat16).contiguous()
        for name, tensor in tensors.items()
    }
    return saved, tokenizer, _report(config, saved, unseen, recent, steps, len(stream))


def _report(
    config: dict[str, Any], saved: dict[str, Tensor], unseen: list[int], recent: list[float], steps: int, tokens: int
) -> dict[str, Any]:
    """Losses, and how far apart the two best tokens (and, with experts, the choices) are on text that was not trained on."""
    reference = reference_models.find(config["model_type"])
    losses, margins, choices, agreed = [], [], [], []
    for start in range(0, min(len(unseen) - WINDOW, 16 * WINDOW), WINDOW):
        window = unseen[start : start + WINDOW + 1]
        with torch.inference_mode():
            result = reference.recompute(config, saved, window[:-1])
        losses.append(float(F.cross_entropy(result.logits, torch.tensor(window[1:]))))
        best = result.logits.topk(2).values
        margins.append(best[:, 0] - best[:, 1])
        if result.margins is not None:
            choices.append(result.margins)
        if config.get("num_nextn_predict_layers"):
            with torch.inference_mode():
                hidden = nemotron_h.hidden_states(config, saved, window[:-1])
                guess = nemotron_h.mtp(config, saved, hidden[:-1], window[1:-1])
            agreed.append((guess.logits.argmax(-1) == result.logits[1:].argmax(-1)).double())
    return {
        "seed": SEED,
        "steps": steps,
        "tokens_per_step": BATCH * WINDOW,
        "tokens_of_text": tokens,
        "parameters": sum(tensor.numel() for tensor in saved.values()),
        "train_loss": round(sum(recent) / len(recent), 4),  # nats per token, mean of the last hundred steps
        "held_out_loss": round(sum(losses) / len(losses), 4),
        "top2_margin": _quantiles(torch.cat(margins)),
        "router_margin": _quantiles(torch.cat(choices)) if choices else None,
        **({"guesses_agree": round(float(torch.cat(agreed).mean()), 4)} if agreed else {}),  # with the model's own choice
        "text": "pydoc_data.topics",
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "tokenizers": tokenizers.__version__,
        },
    }


def _quantiles(values: Tensor) -> dict[str, float]:
    ordered = values.double()
    return {"least": float(f"{ordered.min():.3g}")} | {
        name: float(f"{ordered.quantile(q):.3g}") for name, q in (("p01", 0.01), ("p10", 0.1), ("median", 0.5))
    }


def _write(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m reference_models.train", description=__doc__.splitlines()[0])
    parser.add_argument("family", choices=sorted(CONFIGS))
    parser.add_argument("--steps", type=int, help="optimiser steps (default: as the shipped checkpoint)")
    parser.add_argument("--out", type=Path, help="directory to write to (default: the shipped checkpoint's)")
    options = parser.parse_args()
    family = options.family
    directory = options.out or ROOT / family
    directory.mkdir(parents=True, exist_ok=True)
    saved, tokenizer, report = train(family, options.steps or STEPS[family])
    special = training_text.SPECIAL[family]
    config = CONFIGS[family]
    ends = config["eos_token_id"]
    _write(directory, "config.json", config)
    _write(
        directory,
        "tokenizer_config.json",
        {
            "bos_token": special[config["bos_token_id"]],
            "eos_token": special[ends[-1] if isinstance(ends, list) else ends],
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    _write(directory, "training.json", report)
    tokenizer.save(str(directory / "tokenizer.json"))
    save_file(saved, directory / "model.safetensors", metadata={"format": "pt"})
    print(json.dumps(report))


if __name__ == "__main__":
    main()
