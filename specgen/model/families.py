"""`config.json` → `ModelSpec`, for every model family that the decoder can run.

Knows: what each family's config says, leaves out, and means. Does not know: tensors. A family, activation, layer kind
or quantisation method that is not known is refused by name: a guess would run and write nonsense.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specgen.errors import ModelError, nearest
from specgen.model.rope import RopeSettings, rope_spec, rope_type
from specgen.model.settings import Settings, text_part
from specgen.model.spec import Activation, LayerSpec, ModelSpec, MoeSpec, NormNames, RopeSpec
from specgen.weights.unread import READ_METHODS

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

QUANT_METHODS = (*READ_METHODS, "gguf")

FULL, SLIDING = "full_attention", "sliding_attention"

_SANDWICH = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_POST_ONLY = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
_GLM4_NORMS = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")


def _all_sliding(config: Settings, layers: int) -> list[str]:
    """Every layer has the window, where there is one."""
    return [SLIDING] * layers


def _none_sliding(config: Settings, layers: int) -> list[str]:
    return [FULL] * layers


def _qwen_kinds(config: Settings, layers: int) -> list[str]:
    """Qwen 2 and 3: only with use_sliding_window, from max_window_layers on."""
    if not config.flag("use_sliding_window", False):
        return [FULL] * layers
    first = config.number("max_window_layers", 28)
    return [SLIDING if layer >= first else FULL for layer in range(layers)]


def _gemma_kinds(period: int) -> Callable[[Settings, int], list[str]]:
    """Every `period`-th layer sees everything."""

    def kinds(config: Settings, layers: int) -> list[str]:
        every = config.count("sliding_window_pattern", period)
        return [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]

    return kinds


def _no_traits(config: Settings) -> dict[str, Any]:
    return {}


def _qwen3_traits(config: Settings) -> dict[str, Any]:
    return {"qk_norm": "head"}


def _gemma_traits(config: Settings) -> dict[str, Any]:
    return {
        "activation": "gelu_tanh",  # the first configs say "gelu" and mean the tanh form
        "embedding_scale": config.count("hidden_size") ** 0.5,
        # A GGUF file holds the weights with the 1 already added.
        "norm_offset": 0.0 if config.flag("norm_offset_folded", False) else 1.0,
    }


def _gemma2_traits(config: Settings) -> dict[str, Any]:
    return {
        **_gemma_traits(config),
        "norms": _SANDWICH,
        "attention_scale": config.number("query_pre_attn_scalar", 256) ** -0.5,
        "attention_softcap": config.optional_number("attn_logit_softcapping"),
        "final_softcap": config.optional_number("final_logit_softcapping"),
    }


def _gemma3_traits(config: Settings) -> dict[str, Any]:
    if config.flag("use_bidirectional_attention", False):
        raise ModelError("config.json: use_bidirectional_attention makes an encoder; only decoders are supported")
    return {**_gemma2_traits(config), "qk_norm": "head"}


def _granite_traits(config: Settings) -> dict[str, Any]:
    return {
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "attention_scale": config.number("attention_multiplier", 1.0),
        "logit_scale": 1.0 / config.number("logits_scaling", 1.0),
    }


def _olmo2_traits(config: Settings) -> dict[str, Any]:
    return {"norms": _POST_ONLY, "qk_norm": "projection"}


def _glm_traits(config: Settings) -> dict[str, Any]:
    return {"rope_interleaved": True}


def _glm4_traits(config: Settings) -> dict[str, Any]:
    return {"rope_interleaved": True, "norms": _GLM4_NORMS}


def _mixtral_moe(config: Settings, layer: int) -> MoeSpec | None:
    return MoeSpec(
        experts=config.count("num_local_experts"),
        active=config.count("num_experts_per_tok"),
        intermediate=config.count("intermediate_size"),
        renormalise=True,
        module="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )


def _qwen3_moe(config: Settings, layer: int) -> MoeSpec | None:
    dense = config.get("mlp_only_layers") or []
    if layer in dense or (layer + 1) % config.count("decoder_sparse_step", 1):
        return None
    return MoeSpec(
        # transformers 5 writes num_local_experts, the published files say num_experts.
        experts=config.count("num_experts", config.get("num_local_experts")),
        active=config.count("num_experts_per_tok"),
        intermediate=config.count("moe_intermediate_size"),
        renormalise=config.flag("norm_topk_prob", False),
    )


def _no_moe(config: Settings, layer: int) -> MoeSpec | None:
    return None


@dataclass(frozen=True, slots=True)
class Family:
    """How one family departs from Llama."""

    traits: Callable[[Settings], dict[str, Any]] = _no_traits  # fields of ModelSpec
    kinds: Callable[[Settings, int], list[str]] = _none_sliding  # attention by layer, when layer_types does not say
    moe: Callable[[Settings, int], MoeSpec | None] = _no_moe
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what a config may leave out


_GEMMA_DEFAULTS = {"tie_word_embeddings": True, "head_dim": 256, "rms_norm_eps": 1e-6}
_GLM_DEFAULTS = {"head_dim": 128, "partial_rotary_factor": 0.5}

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(kinds=_all_sliding),
    "qwen2": Family(kinds=_qwen_kinds),
    "qwen3": Family(_qwen3_traits, _qwen_kinds, defaults={"head_dim": 128}),
    "qwen3_moe": Family(_qwen3_traits, _qwen_kinds, _qwen3_moe),
    "mixtral": Family(kinds=_all_sliding, moe=_mixtral_moe, defaults={"rope_theta": 1e6}),
    "phi3": Family(kinds=_all_sliding),
    "gemma": Family(_gemma_traits, defaults=_GEMMA_DEFAULTS),
    "gemma2": Family(_gemma2_traits, _gemma_kinds(2), defaults=_GEMMA_DEFAULTS),
    "gemma3_text": Family(
        _gemma3_traits,
        _gemma_kinds(6),
        defaults={
            **_GEMMA_DEFAULTS,
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
    ),
    "smollm3": Family(defaults={"rope_theta": 2e6, "tie_word_embeddings": True}),
    "granite": Family(_granite_traits),
    "olmo2": Family(_olmo2_traits),
    "glm": Family(_glm_traits, defaults=_GLM_DEFAULTS),
    "glm4": Family(_glm4_traits, defaults=_GLM_DEFAULTS),
}
"""By `model_type`. SmolLM 1 and 2 and Phi-4-mini are "llama" and "phi3" there."""


def spec_from_config(config: Mapping[str, Any], longest: int | None = None) -> ModelSpec:
    """The numbers of a model. ModelError names what is missing, contradictory or not known.

    `longest` (tokens) is the longest sequence of the run. It matters where RoPE depends on it: longrope has one set of
    frequencies for its original context (used when `longest` is None) and one for longer sequences. The result's
    `context` says how far it goes.
    """
    config = text_part(config)
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        raise _unknown_family(name, config)
    family = FAMILIES[name]
    settings = Settings(config, family.defaults)
    _check_quant_method(settings)
    return _build(name, family, settings, longest)


def _unknown_family(name: str, config: Mapping[str, Any]) -> ModelError:
    known = nearest(name, FAMILIES) or "known are " + ", ".join(FAMILIES)
    if "auto_map" not in config:
        return ModelError(f"config.json: the model family {name!r} is not known", hint=known)
    return ModelError(
        f"config.json: the model family {name!r} is not known, and its folder asks to run code of its own (auto_map)",
        hint=f"specgen runs no code from a model's folder; {known}",
    )


def _build(name: str, family: Family, config: Settings, longest: int | None) -> ModelSpec:
    heads = config.count("num_attention_heads")
    kv_heads = config.count("num_key_value_heads", heads)
    hidden = config.count("hidden_size")
    head_dim = config.count("head_dim", hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise ModelError(f"config.json: {heads} heads over {kv_heads} key-value heads of {head_dim} do not fit")
    ropes = _Ropes(config, head_dim, longest)
    fields: dict[str, Any] = {
        "family": name,
        "vocab": config.count("vocab_size"),
        "hidden": hidden,
        "intermediate": config.count("intermediate_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "context": ropes.context(),
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "layers": _layers(family, config, ropes),
        "tied_head": config.flag("tie_word_embeddings", False),
        "attention_scale": head_dim**-0.5,
        "bos": _token(config.get("bos_token_id")),
        "eos": _tokens(config.get("eos_token_id")),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
    }
    traits = family.traits(config)
    if "activation" not in traits:
        fields["activation"] = _activation(config)
    return ModelSpec(**{**fields, **traits})


def _layers(family: Family, config: Settings, ropes: _Ropes) -> tuple[LayerSpec, ...]:
    count = config.layers()
    kinds = config.per_layer("layer_types", count) or family.kinds(config, count)
    window = config.optional_count("sliding_window") if config.flag("use_sliding_window", True) else None
    rotated = config.per_layer("no_rope_layers", count) or _rotated(config, count)
    layers = []
    for index, kind in enumerate(kinds):
        if kind not in (FULL, SLIDING):
            raise ModelError(f"config.json: the layer type {kind!r} is not known", hint=f"known: {FULL}, {SLIDING}")
        rope = ropes.of(kind) if rotated[index] else None
        layers.append(LayerSpec(window if kind == SLIDING else None, rope, family.moe(config, index)))
    return tuple(layers)


def _rotated(config: Settings, count: int) -> list[bool]:
    """SmolLM 3 leaves RoPE out of every fourth layer (its `no_rope_layers` has a 1 where there *is* RoPE)."""
    if config.get("model_type") != "smollm3":
        return [True] * count
    interval = config.count("no_rope_layer_interval", 4)
    return [(index + 1) % interval != 0 for index in range(count)]


class _Ropes:
    """The rotary settings of a config, by kind of layer."""

    def __init__(self, config: Settings, head_dim: int, longest: int | None) -> None:
        self._config = config
        self._head_dim = head_dim
        self._positions = config.count("max_position_embeddings")
        self._longest = longest
        self._made: dict[str, RopeSpec] = {}

    def of(self, kind: str) -> RopeSpec:
        if kind not in self._made:
            self._made[kind] = rope_spec(self._settings(kind))
        return self._made[kind]

    def context(self) -> int:
        """How many tokens a sequence may have with these frequencies."""
        settings = self._settings(FULL)
        scaling = rope_type(settings.values)
        if scaling == "longrope" and settings.longest <= settings.original_positions:
            return settings.original_positions
        if scaling == "dynamic":
            return max(self._positions, settings.longest)
        if scaling == "yarn":
            stretched = int(settings.original_positions * settings.number("factor", 1.0))
            return max(self._positions, stretched)
        return self._positions

    def _section(self, kind: str) -> Mapping[str, Any]:
        """`rope_parameters` (one for all layers, or one for each kind), or the older `rope_scaling`."""
        nested = self._config.section("rope_parameters")
        if isinstance(nested.get(kind), Mapping):
            inner: Mapping[str, Any] = nested[kind]
            return inner
        if nested.get("rope_theta") is not None or nested.get("rope_type") is not None:
            return nested
        local = kind == SLIDING and self._config.get("rope_local_base_freq") is not None
        return {} if local else self._config.section("rope_scaling")

    def _settings(self, kind: str) -> RopeSettings:
        config, section = self._config, self._section(kind)
        local = config.get("rope_local_base_freq") if kind == SLIDING else None
        theta = section.get("rope_theta") or local or config.number("rope_theta", 10_000.0)
        part = section.get("partial_rotary_factor") or config.number("partial_rotary_factor", 1.0)
        original = config.optional_count("original_max_position_embeddings")
        original = original or section.get("original_max_position_embeddings") or self._positions
        values = Settings({"theta": theta, "part": part, "original": original}, {})
        dims = int(self._head_dim * values.number("part"))
        original = values.count("original")
        if not 0 < dims <= self._head_dim or dims % 2:
            raise ModelError(f"config.json: RoPE over {dims} of {self._head_dim} dimensions makes no sense")
        default = original if rope_type(section) == "longrope" else self._positions
        longest = default if self._longest is None else self._longest
        return RopeSettings(values.number("theta"), dims, self._positions, original, longest, section)


def _activation(config: Settings) -> Activation:
    name = str(config.get("hidden_activation") or config.get("hidden_act") or "silu")
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json: the activation {name!r} is not known", hint=nearest(name, ACTIVATIONS))
    return ACTIVATIONS[name]


def _check_quant_method(config: Settings) -> None:
    method = config.section("quantization_config").get("quant_method")
    if method is not None and method not in QUANT_METHODS:
        known = nearest(str(method), QUANT_METHODS) or "known are " + ", ".join(QUANT_METHODS)
        raise ModelError(f"config.json: the quantisation method {method!r} is not known", hint=known)


def _token(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _tokens(value: Any) -> tuple[int, ...]:
    found = [_token(item) for item in (value if isinstance(value, list) else [value])]
    return tuple(token for token in found if token is not None)
