"""`ModelConfig`: a decoder's architecture and sizes, read from `config.json`."""

from dataclasses import dataclass, field
from typing import NamedTuple

from jaxkv.config.blocks import (
    DeltaConfig,
    GlobalAttentionConfig,
    LatentConfig,
    Mamba1Config,
    MambaConfig,
    MixtureConfig,
    Multipliers,
    QueryGrowth,
    ShortConvConfig,
    TransformerConfig,
)
from jaxkv.config.checks import as_float, as_int, check_fields

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "none")
MAX_LAYERS = 4096
_INT32_MAX = 2**31 - 1
_GROWING = frozenset(("attention", "latent", "gated", "plain", "mixture", "shared"))
"""Blocks of a model whose queries grow with their position: mixers that do it, and those without queries."""

_KV_SHARED = "kv_shared_"
"""Beginning of the names of blocks that attend to keys and values of another layer."""
_NOT_WITH_SHARED = ("qkv_bias", "o_bias", "sinks", "wide_qk_norm", "late_qk_norm", "attention_gate")
"""Fields of attention that these blocks lack."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., RoFormer) and its scaling to longer contexts.

    Attributes:
        theta: base of the geometric sequence of frequencies.
        rotary_dim: leading components of each head that are rotated.
        kind: "default", "linear", "dynamic" (NTK), "yarn" (Peng et al.), "llama3", "longrope" (Ding et al.) or
            "proportional" (Gemma 4); "none" for no rotation.
        factor: scaling factor of the context; its exact meaning depends on the kind.
        original_max_positions: context length of the training before scaling; dynamic, yarn, llama3 and longrope need
            it.
        low_freq_factor, high_freq_factor: llama3 only.
        beta_fast, beta_slow, truncate, mscale, mscale_all_dim: yarn only.
        turning: proportional only. Pairs of components that turn, the first ones; the others stand still.
        attention_factor: factor of cosines and sines, yarn and longrope only; `None` for the method's own.
        short_factors, long_factors: longrope only. Divisors of the frequencies, `rotary_dim / 2` each, for tokens of
            sequences of at most `original_max_positions` tokens, and of longer ones.
    """

    theta: float = 10000.0
    rotary_dim: int
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    turning: int = 0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Raises `ValueError` for values out of range or options that a kind lacks."""
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope kind must be one of {', '.join(ROPE_KINDS)}, got {self.kind!r}")
        check_fields(self, as_float, 2.0, 1e15, "theta")
        check_fields(self, as_int, 2, 2**16, "rotary_dim")
        if self.rotary_dim % 2 or (self.kind == "dynamic" and self.rotary_dim < 4):
            raise ValueError(
                f"rotary_dim must be even, and at least 4 for kind dynamic, got {self.rotary_dim}"
            )
        check_fields(self, as_float, 1.0, 1e6, "factor")
        if self.original_max_positions is not None:
            check_fields(self, as_int, 1, _INT32_MAX, "original_max_positions")
        elif self.kind in ("dynamic", "yarn", "llama3", "longrope"):
            raise ValueError(f"rope kind {self.kind} needs original_max_positions")
        stretches = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        check_fields(self, as_float, 1e-6, 1e6, *stretches)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be above low_freq_factor, got {self.high_freq_factor} and "
                f"{self.low_freq_factor}"
            )
        most = self.rotary_dim // 2 if self.kind == "proportional" else 0
        check_fields(self, as_int, 0, most, "turning")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                check_fields(self, as_float, 0.0, 1e6, name)
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if len(factors) != (self.rotary_dim // 2 if self.kind == "longrope" else 0):
                raise ValueError(
                    f"{name} must have rotary_dim / 2 = {self.rotary_dim // 2} numbers for kind longrope and none for "
                    f"others, got {len(factors)} for {self.kind}"
                )
            for factor in factors:
                as_float(name, factor, 1e-6, 1e6)


class Stage(NamedTuple):
    """A stage of a layer's pattern, such as "transformer>mamba2" or "mamba2+attention".

    Attributes:
        before: block that runs first, on the residual stream as it is, and whose output is added to the input of the
            stage's norm only; empty for none.
        blocks: blocks that run in parallel on the normalised input; the stream gets the sum of their outputs.
    """

    before: str
    blocks: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Stage":
        """Returns the stage that a pattern writes as `text`."""
        before, _, parallel = text.rpartition(">")
        return cls(before, tuple(parallel.split("+")))


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture and sizes of a decoder, checked on construction.

    Attributes:
        family: Hugging Face's `model_type`.
        vocab_size: token ids.
        hidden_size: width of the residual stream.
        num_layers: number of layers.
        heads, kv_heads, head_dim, rope, windows: sizes of attention layers; 1, 1, 2, kind "none" and `None`s for a
            model without attention.
        ffn_size: inner width of the dense feed-forward; 1 if there is none.
        pattern: for each layer, its stages, see `Stage`; ("attention", "gated") if not given.
        owners: for each layer, the layer that stores its shared parameters (`Leaf.is_shared`); empty if no layers share
            any. Layers with the same owner have the same stages.
        key_owners: for each layer, the layer whose keys and values it attends to, itself in most; empty if each layer
            has its own. Blocks named "kv_shared_..." attend to those of another layer.
        windows: for each layer, the sliding window in tokens, or `None` for all tokens.
        max_positions: longest sequence that the model supports, in tokens.
        norm_eps: epsilon of the norms.
        layer_norms: the norms before stages and the final one are LayerNorms without bias (Cohere); otherwise RMSNorms.
        pre_norms: a stage normalises its input; otherwise it only normalises its output, see `post_norms` (OLMo-2).
        activation: name of the feed-forward's activation.
        tie_embeddings: whether the output head is the embedding table.
        eos_ids: token ids that end a sequence.
        assumed_eos: no file of the model names `eos_ids`, and they are Transformers' for the family. Those of the
            tokenizer come before them. Configs that differ here alone are equal.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        qk_norm: per-head RMSNorm on queries and keys before the rotation (Qwen3).
        wide_qk_norm: RMSNorm over all heads of the queries together, and over all of the keys (OLMo-2).
        late_qk_norm: per-head RMSNorm on queries and keys after the rotation (Hunyuan).
        attention_gate: the query projection also yields a gate per component, whose sigmoid multiplies attention's
            output.
        unit_offset: norm weights in the checkpoint are smaller by 1 and are applied in float32; the parameters include
            the 1.
        wide_norms: norm weights are applied in float32.
        post_norms: a stage's output is normalised too before it is added (Gemma).
        attention_scale: factor of attention scores; `None` for `head_dim ** -0.5`.
        query_growth: factor of queries that grows with their position; `None` for none (Ministral 3).
        attention_cap, logit_cap: soft caps `cap * tanh(x / cap)` of attention scores and of logits; `None` for none.
        sinks: each head has a learned logit that takes part in the softmax and has no value (GPT-OSS).
        window_rope: rotary embedding of window layers, where it differs from `rope` (Gemma 3).
        global_attention: sizes of "global_attention" blocks; `kv_heads` and `head_dim` are then those of windows.
        value_norm: per-head RMSNorm without weights on values (Gemma 4).
        layer_embedding_size: width of the embedding that each layer has of each token; 0 for none (Gemma 4 E2B).
        layer_scalars: the residual stream after each layer is multiplied by a learned number (Gemma 4).
        nope_layers: numbers of the attention layers without rotary embedding (SmolLM3).
        wide_residual: the residual stream is float32, independently of the parameters' dtype.
        mamba, mamba1, delta, short_conv, transformer, mixture, latent: sizes of these blocks; `None` if the pattern has
            none of them.
        mtp_layers: layers after the last one that predict further tokens (DeepSeek-V3). Checkpoints hold them, but the
            model does not run them.
        multipliers: constant factors of activations.
        dtype: dtype name of the checkpoint, used by `dtype="auto"`.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    max_positions: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    pattern: tuple[tuple[str, ...], ...] = ()
    owners: tuple[int, ...] = ()
    key_owners: tuple[int, ...] = ()
    norm_eps: float = 1e-6
    layer_norms: bool = False
    pre_norms: bool = True
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    late_qk_norm: bool = False
    attention_gate: bool = False
    unit_offset: bool = False
    wide_norms: bool = False
    post_norms: bool = False
    attention_scale: float | None = None
    query_growth: QueryGrowth | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    sinks: bool = False
    window_rope: RopeConfig | None = None
    global_attention: GlobalAttentionConfig | None = None
    value_norm: bool = False
    layer_embedding_size: int = 0
    layer_scalars: bool = False
    nope_layers: tuple[int, ...] = ()
    wide_residual: bool = False
    mamba: MambaConfig | None = None
    delta: DeltaConfig | None = None
    mamba1: Mamba1Config | None = None
    short_conv: ShortConvConfig | None = None
    transformer: TransformerConfig | None = None
    mixture: MixtureConfig | None = None
    latent: LatentConfig | None = None
    mtp_layers: int = 0
    multipliers: Multipliers = Multipliers()
    eos_ids: tuple[int, ...] = ()
    assumed_eos: bool = field(default=False, compare=False)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Raises `ValueError` for sizes out of range or sizes that contradict each other."""
        check_fields(self, as_int, 1, MAX_LAYERS, "num_layers")
        check_fields(self, as_int, 0, MAX_LAYERS, "mtp_layers")
        check_fields(self, as_int, 1, 2**24, "vocab_size", "ffn_size")
        check_fields(self, as_int, 1, 2**20, "hidden_size")
        check_fields(self, as_int, 0, 2**16, "layer_embedding_size")
        check_fields(self, as_int, 1, 2**16, "heads", "kv_heads", "head_dim")
        check_fields(self, as_int, 1, _INT32_MAX, "max_positions")
        check_fields(self, as_float, 0.0, 1.0, "norm_eps")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        widest = self.global_attention or self
        if self.heads % widest.kv_heads:
            raise ValueError(
                f"heads must be a multiple of global kv_heads, got {self.heads} and {widest.kv_heads}"
            )
        ropes = ((self.rope, widest.head_dim), (self.window_rope or self.rope, self.head_dim))
        for rope, head_dim in ropes:
            if rope.rotary_dim > head_dim:
                raise ValueError(f"rotary_dim {rope.rotary_dim} exceeds head_dim {head_dim}")
        for name in ("attention_cap", "logit_cap"):
            if getattr(self, name) is not None:
                check_fields(self, as_float, 1e-3, 1e6, name)
        if not self.pattern:
            object.__setattr__(self, "pattern", (("attention", "gated"),) * self.num_layers)
        optional = [name for name in ("owners", "key_owners") if getattr(self, name)]
        for name in ("windows", "pattern", *optional):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(
                    f"{name} must have one entry per layer, got {len(getattr(self, name))} for {self.num_layers} layers"
                )
        for window in self.windows:
            if window is not None:
                as_int("windows", window, 1, _INT32_MAX)
        for layer, owner in enumerate(self.owners):
            as_int("owners", owner, 0, self.num_layers - 1)
            if self.owners[owner] != owner or self.pattern[owner] != self.pattern[layer]:
                raise ValueError(
                    f"owners: the owner of layer {layer} must own its own parameters and have the same stages, got "
                    f"layer {owner}, whose owner is {self.owners[owner]} and whose stages are {self.pattern[owner]}"
                )
        self._check_key_owners()
        for token in self.eos_ids:
            as_int("eos_ids", token, 0, _INT32_MAX)
        for layer in self.nope_layers:
            as_int("nope_layers", layer, 0, self.num_layers - 1)
        if self.query_growth is not None and not self.blocks <= _GROWING:
            raise ValueError(
                f"query_growth is for blocks among {', '.join(sorted(_GROWING))}, got {', '.join(sorted(self.blocks))}"
            )
        if not (self.pre_norms or self.post_norms):
            raise ValueError("a stage must normalise its input or its output, got neither")
        if self.qk_norm + self.wide_qk_norm + self.late_qk_norm > 1:
            raise ValueError("queries and keys have at most one norm, got several")
        parts = {
            "mamba2": self.mamba,
            "delta": self.delta and self.delta.gate_rank is None,
            "kimi_delta": self.delta and self.delta.gate_rank,
            "mamba1": self.mamba1,
            "short_conv": self.short_conv,
            "transformer": self.transformer,
            "mixture": self.mixture,
            "dense_and_mixture": self.mixture,
            "global_attention": self.global_attention,
            "kv_shared_global_attention": self.global_attention,
            "latent": self.latent,
            "sparse_latent": self.latent and self.latent.index,
        }
        for block, part in parts.items():
            if not part and block in self.blocks:
                raise ValueError(
                    f"the pattern has {block} blocks, but their sizes are missing, or those of a block like it"
                )

    def _check_key_owners(self) -> None:
        """Raises `ValueError` unless each layer takes the keys of one that has them, by a block that does so."""
        for layer, owner in enumerate(self.key_owners):
            as_int("key_owners", owner, 0, layer)
            if self.key_owners[owner] != owner or self.windows[owner] != self.windows[layer]:
                raise ValueError(
                    f"key_owners: layer {layer} must attend to keys of a layer that has its own, and the same window, "
                    f"got layer {owner}"
                )
        for layer in range(self.num_layers):
            owner, blocks = self.key_owner(layer), self.blocks_of(layer)
            shared = [name for name in blocks if name.startswith(_KV_SHARED)]
            if bool(shared) != (owner != layer):
                raise ValueError(
                    f"key_owners: layer {layer} attends to keys of layer {owner}, and its blocks are "
                    f"{', '.join(blocks)}; those named {_KV_SHARED}... are for keys of another layer"
                )
            needed = {name.removeprefix(_KV_SHARED) for name in shared}
            if not needed <= {*self.blocks_of(owner)}:
                raise ValueError(
                    f"key_owners: layer {layer} takes keys of layer {owner}, whose blocks are "
                    f"{', '.join(self.blocks_of(owner))}, and needs {', '.join(sorted(needed))}"
                )
        if self.key_owners and (
            further := [name for name in _NOT_WITH_SHARED if getattr(self, name)]
        ):
            raise ValueError(
                f"blocks that attend to another layer's keys have no {', '.join(further)}; leave key_owners empty"
            )

    @property
    def query_rows(self) -> int:
        """Output channels of the query projection per head, the gate included."""
        return (1 + self.attention_gate) * self.head_dim

    @property
    def norm_dtype(self) -> str | None:
        """Dtype name of the weights of norms; `None` for that of the other parameters."""
        return "float32" if self.unit_offset or self.wide_norms else None

    @property
    def blocks(self) -> frozenset[str]:
        """Names of all blocks in the pattern, such as "attention" and "gated"."""
        return frozenset(name for layer in range(self.num_layers) for name in self.blocks_of(layer))

    def owner(self, layer: int) -> int:
        """Returns the layer that stores a layer's shared parameters."""
        return self.owners[layer] if self.owners else layer

    def key_owner(self, layer: int) -> int:
        """Returns the layer whose keys and values a layer attends to."""
        return self.key_owners[layer] if self.key_owners else layer

    @property
    def has_layer_embeddings(self) -> bool:
        """Whether each layer has embeddings of its own."""
        return self.layer_embedding_size > 0

    @property
    def double_ffn_size(self) -> int:
        """Inner width of a "double_gated" feed-forward."""
        return 2 * self.ffn_size

    def blocks_of(self, layer: int) -> tuple[str, ...]:
        """Returns the names of a layer's blocks, in the order in which they run."""
        stages = [Stage.parse(stage) for stage in self.pattern[layer]]
        return tuple(name for before, blocks in stages for name in (before, *blocks) if name)
