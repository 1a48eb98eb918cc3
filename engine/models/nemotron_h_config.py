"""config.json of Nemotron-H and Nemotron 3: kinds of layers in every spelling, sizes of mixers, and what only files say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import Refused
from engine.fields import Fields
from engine.layers.mamba2 import Mamba2Config

__all__ = ["ATTENTION", "MAMBA", "MLP", "MOE", "Config", "MoEConfig", "text_fields"]

MAMBA, ATTENTION, MOE, MLP = "M", "*", "E", "-"  # as in hybrid_override_pattern
_LETTERS = {"M": MAMBA, "*": ATTENTION, "A": ATTENTION, "E": MOE, "-": MLP}
_NAMES = {
    "mamba": MAMBA,
    "mamba2": MAMBA,
    "linear_attention": MAMBA,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "moe": MOE,
    "mlp": MLP,
}
_MAX_LAYERS = 1 << 12
_MAX_EXPERTS = 1 << 16  # of all layers together: bounds what one config can make us build
_OLDER = {  # spellings that transformers still reads
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "num_local_experts": "n_routed_experts",
}


@dataclass(frozen=True)
class MoEConfig:
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int
    moe_shared_expert_intermediate_size: int  # of all shared experts together
    moe_latent_size: int | None  # width of the routed experts' inputs and outputs; None: hidden_size
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float


@dataclass(frozen=True)
class Config:
    """`is_wrapped`: the config of a multimodal checkpoint, of which this is the language model.

    `optional`: the tensors of the files that a checkpoint may have or lack whatever its config says: biases, an output head,
    stacked experts, the MTP head. Empty until `nemotron_h.complete`.
    """

    hidden_size: int
    vocab_size: int
    pattern: str  # the kind of each layer, as in hybrid_override_pattern
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int | None  # of dense MLPs; None where there are none
    layer_norm_epsilon: float
    max_position_embeddings: int
    use_bias: bool  # of a Mamba mixer's projections
    use_conv_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    mamba: Mamba2Config
    moe: MoEConfig | None
    num_nextn_predict_layers: int
    mtp_pattern: str | None
    is_wrapped: bool
    optional: frozenset[str] = field(default=frozenset(), repr=False)
    conv_channels_last: bool = False

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Config:
        """Read config.json. Raises ConfigError, which names field and value, or Refused for what is not supported."""
        inner, prefix = text_fields(raw)
        fields = Fields(_spelled(inner, prefix), prefix)
        hidden_size = fields.integer("hidden_size", 1, 1 << 17)
        pattern = _layers(fields)
        mtp_steps = fields.integer("num_nextn_predict_layers", 0, 64, 0)
        mtp_pattern = _pattern(fields, "mtp_hybrid_override_pattern", ("mtp_layers_block_type",)) if mtp_steps else None
        heads = fields.integer("num_attention_heads", 1, 1 << 12)
        kv_heads = fields.integer("num_key_value_heads", 1, 1 << 12, heads)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"must divide num_attention_heads {heads}")
        head_dim = fields.integer("head_dim", 1, 1 << 12, None)
        if head_dim is None:
            if hidden_size % heads:
                raise fields.error("num_attention_heads", f"must divide hidden_size {hidden_size}, or head_dim be given")
            head_dim = hidden_size // heads
        _refuse(fields)
        eps = fields.number("rms_norm_eps", 1e-12, 1.0, 1e-5)
        eps = fields.number("layer_norm_epsilon", 1e-12, 1.0, eps)
        kinds = pattern + (mtp_pattern or "")
        return cls(
            hidden_size=hidden_size,
            vocab_size=fields.integer("vocab_size", 1, 1 << 24),
            pattern=pattern,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=_needed_integer(fields, "intermediate_size", 1 << 20, needed=MLP in kinds),
            layer_norm_epsilon=eps,
            max_position_embeddings=fields.integer("max_position_embeddings", 1, 1 << 30, 4096),
            use_bias=fields.flag("use_bias", False),
            use_conv_bias=fields.flag("use_conv_bias", True),
            mlp_bias=fields.flag("mlp_bias", False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            mamba=_mamba(fields, eps),
            moe=_moe(fields, kinds.count(MOE)),
            num_nextn_predict_layers=mtp_steps,
            mtp_pattern=mtp_pattern,
            is_wrapped=inner is not raw,
        )


def text_fields(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The language model's fields and their prefix.

    Multimodal configs nest them in `llm_config` or `text_config`, which replaces the top level entirely.
    """
    for name in ("llm_config", "text_config"):
        if raw.get(name) is not None:
            return Fields(raw).section(name).raw, f"{name}."
    return raw, ""


def _spelled(raw: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Today's names for older ones."""
    spelled = dict(raw)
    for older, name in _OLDER.items():
        value = raw.get(older)
        if value is None:
            continue
        if spelled.get(name) is None:
            spelled[name] = value
        elif spelled[name] != value:
            raise Fields(raw, prefix).error(older, f"and {name} {spelled[name]!r:.80} are one field and contradict")
    return spelled


def _layers(fields: Fields) -> str:
    pattern = _pattern(fields, "hybrid_override_pattern", ("layers_block_type", "layer_types"))
    if pattern is None:
        raise fields.error("hybrid_override_pattern", "must say the kind of each layer, or layers_block_type")
    layers = fields.integer("num_hidden_layers", 1, _MAX_LAYERS, len(pattern))
    if layers != len(pattern):
        raise fields.error("num_hidden_layers", f"must be the number of layers that are listed, {len(pattern)}")
    return pattern


def _pattern(fields: Fields, letters: str, lists: tuple[str, ...]) -> str | None:
    """Kinds of layers from the field `letters` (one character each) or the `lists` of names; those given must agree."""
    found: dict[str, str] = {}
    if fields.has(letters):
        value = fields.raw[letters]
        value = value.strip() if isinstance(value, str) else value
        if not isinstance(value, str) or not 1 <= len(value) <= _MAX_LAYERS or any(kind not in _LETTERS for kind in value):
            raise fields.error(letters, f"must be 1 to {_MAX_LAYERS} of M (Mamba), * or A (attention), E (MoE), - (MLP)")
        found[letters] = "".join(_LETTERS[kind] for kind in value)
    for name in lists:
        if fields.has(name):
            kinds = fields.raw[name]
            if not isinstance(kinds, list) or not 1 <= len(kinds) <= _MAX_LAYERS:
                raise fields.error(name, f"must be a list of 1 to {_MAX_LAYERS} names")
            for i, kind in enumerate(kinds):
                if not isinstance(kind, str) or kind not in _NAMES:
                    field_name, known = f"{fields.prefix}{name}[{i}]", ", ".join(_NAMES)
                    raise Refused(f"config field {field_name} = {kind!r:.80} is not supported (supported: {known})")
            found[name] = "".join(_NAMES[kind] for kind in kinds)
    for name, pattern in found.items():
        first = next(iter(found))
        if pattern != found[first]:
            raise fields.error(name, f"must list the same layers as {first}")
    return next(iter(found.values()), None)


def _refuse(fields: Fields) -> None:
    fields.choice("mlp_hidden_act", ("relu2",), "relu2")
    fields.choice("mamba_hidden_act", ("silu",), "silu")
    for name in ("sliding_window", "rope_scaling"):  # these checkpoints attend to everything and rotate nothing
        if fields.has(name):
            raise Refused(f"config field {fields.prefix}{name} = {fields.raw[name]!r:.80} is not supported (supported: null)")
    for name in ("attention_bias", "mamba_proj_bias"):  # nothing follows from these: a bias is used where the files have it
        fields.flag(name, False)


def _needed_integer(fields: Fields, name: str, most: int, *, needed: bool) -> int | None:
    value: int | None = fields.integer(name, 1, most) if needed else fields.integer(name, 1, most, None)
    return value


def _mamba(fields: Fields, eps: float) -> Mamba2Config:
    heads = fields.integer("mamba_num_heads", 1, 1 << 12, 128)
    groups = fields.integer("n_groups", 1, 1 << 12, 1)
    if heads % groups:
        raise fields.error("n_groups", f"must divide mamba_num_heads {heads}")
    fields.integer("chunk_size", 1, 1 << 20, 128)  # of other engines' scans: the result does not depend on it
    return Mamba2Config(
        mamba_num_heads=heads,
        mamba_head_dim=fields.integer("mamba_head_dim", 1, 1 << 12, 64),
        n_groups=groups,
        ssm_state_size=fields.integer("ssm_state_size", 1, 1 << 12, 128),
        conv_kernel=fields.integer("conv_kernel", 1, 64, 4),
        time_step_limit=_time_step_limit(fields),
        layer_norm_epsilon=eps,
    )


def _time_step_limit(fields: Fields) -> tuple[float, float]:
    """Default (0, inf). time_step_min and time_step_max are no limits: training began with step sizes between them."""
    value = fields.raw.get("time_step_limit")
    if value is None:
        return 0.0, math.inf
    numbers = [_number(part) for part in value] if isinstance(value, (list, tuple)) and len(value) == 2 else [math.nan]
    if len(numbers) != 2 or not (0.0 <= numbers[0] < math.inf and numbers[0] <= numbers[1] and numbers[1] > 0.0):
        raise fields.error("time_step_limit", "must be two numbers from 0, the lower first; the upper may be Infinity")
    return numbers[0], numbers[1]


def _number(value: Any) -> float:
    """nan for what is no number. {"__float__": "Infinity"} is how transformers writes what JSON cannot."""
    if isinstance(value, Mapping):
        value = math.inf if value == {"__float__": "Infinity"} else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _moe(fields: Fields, layers: int) -> MoEConfig | None:
    """None where no layer needs it and the config has none; a config may have it for an MTP head alone."""
    if not layers and not all(map(fields.has, ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"))):
        return None
    experts = fields.integer("n_routed_experts", 1, _MAX_EXPERTS)
    if experts * max(layers, 1) > _MAX_EXPERTS:
        raise fields.error("n_routed_experts", f"times {layers} layers must be at most {_MAX_EXPERTS}")
    groups = fields.integer("n_group", 1, 1 << 12, 1)
    if experts % groups:
        raise fields.error("n_group", f"must divide n_routed_experts {experts}")
    top_groups = fields.integer("topk_group", 1, groups, groups)
    shared_size = fields.integer("moe_shared_expert_intermediate_size", 1, 1 << 20, None)
    shared = fields.integer("n_shared_experts", 0, 1 << 12, 0 if shared_size is None else 1)
    if shared and shared_size is None:
        raise fields.error("moe_shared_expert_intermediate_size", f"must be given with n_shared_experts {shared}")
    return MoEConfig(
        n_routed_experts=experts,
        num_experts_per_tok=fields.integer("num_experts_per_tok", 1, experts // groups * top_groups),
        moe_intermediate_size=fields.integer("moe_intermediate_size", 1, 1 << 20),
        n_shared_experts=shared,
        moe_shared_expert_intermediate_size=shared_size or 0,
        moe_latent_size=fields.integer("moe_latent_size", 1, 1 << 17, None),
        n_group=groups,
        topk_group=top_groups,
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        routed_scaling_factor=fields.number("routed_scaling_factor", 0.0, 1e6, 1.0),
    )
