"""A model as frozen data that is checked once: what a `config.json` says, in our words. Knows no arrays."""

from dataclasses import dataclass

from jaxkv.config.blocks import DeltaConfig, LatentConfig, MambaConfig, MixtureConfig, Multipliers
from jaxkv.config.checks import as_float, as_int, settle

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "none")
MAX_LAYERS = 4096
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., RoFormer) and how its angles are stretched.

    Attributes:
        theta: base of the geometric sequence of frequencies.
        rotary_dim: leading components of each head that are rotated.
        kind: "default", "linear", "dynamic" (NTK), "yarn" (Peng et al.) or "llama3"; "none" turns nothing.
        factor: stretch of the context; meaning depends on the kind.
        original_max_positions: context the model was trained on before stretching; dynamic, yarn and llama3 need it.
        low_freq_factor, high_freq_factor: llama3 only.
        beta_fast, beta_slow, truncate, attention_factor, mscale, mscale_all_dim: yarn only.
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

    def __post_init__(self) -> None:
        """Refuses angles that cannot be computed."""
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"rope kind must be one of {', '.join(ROPE_KINDS)}, got {self.kind!r}")
        settle(self, as_float, 2.0, 1e15, "theta")
        settle(self, as_int, 2, 2**16, "rotary_dim")
        if self.rotary_dim % 2 or (self.kind == "dynamic" and self.rotary_dim < 4):
            raise ValueError(
                f"rotary_dim must be even, 4 or more if dynamic, got {self.rotary_dim}"
            )
        settle(self, as_float, 1.0, 1e6, "factor")
        if self.original_max_positions is not None:
            settle(self, as_int, 1, _INT32_MAX, "original_max_positions")
        elif self.kind in ("dynamic", "yarn", "llama3"):
            raise ValueError(f"rope kind {self.kind} needs original_max_positions")
        stretches = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        settle(self, as_float, 1e-6, 1e6, *stretches)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be above low_freq_factor, got {self.high_freq_factor} and "
                f"{self.low_freq_factor}"
            )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                settle(self, as_float, 0.0, 1e6, name)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder as data.

    Attributes:
        family: Hugging Face's `model_type`.
        heads, kv_heads, head_dim, rope, windows: of the layers that attend; 1, 1, 2 and no angles if none does.
        ffn_size: inner width of the dense feed-forward; 1 if there is none.
        pattern: per layer, its stages; attention and a gated feed-forward if not given. A stage normalises the
            residual stream, lets its blocks work on that side by side ("mamba2+attention"), and adds what they say.
        windows: per layer, the sliding window in tokens, or `None` for all tokens.
        max_positions: longest sequence the model is meant for.
        eos_ids: ids that end a text.
        qkv_bias, o_bias, mlp_bias: which projections carry a bias.
        qk_norm: per-head RMSNorm on queries and keys before the rotation (Qwen3).
        attention_gate: queries come with a gate of as many components, whose sigmoid multiplies what attention says.
        unit_offset: norms weigh in float32, by one more than the file says; the parameters include the one.
        wide_norms: norms weigh in float32.
        post_norms: what a stage says is normalised too before it is added (Gemma).
        attention_scale: what scores are multiplied by; `head_dim ** -0.5` if `None`.
        attention_cap, logit_cap: bounds of the scores and of the logits by `cap * tanh(x / cap)`; `None` for none.
        sinks: each head has a logit that joins its softmax and brings no value (GPT-OSS).
        window_rope: the angles of layers with a window, where theirs are others than `rope` (Gemma 3).
        wide_residual: the residual stream is float32, whatever the parameters are.
        mamba, delta, mixture, latent: sizes of the blocks that need them.
        mtp_layers: layers past the last that guess further tokens (DeepSeek-V3); checkpoints hold them, and the model
            runs without.
        multipliers: constants on the way.
        dtype: the checkpoint's dtype name, used by `dtype="auto"`.
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
    norm_eps: float = 1e-6
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    attention_gate: bool = False
    unit_offset: bool = False
    wide_norms: bool = False
    post_norms: bool = False
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    sinks: bool = False
    window_rope: RopeConfig | None = None
    wide_residual: bool = False
    mamba: MambaConfig | None = None
    delta: DeltaConfig | None = None
    mixture: MixtureConfig | None = None
    latent: LatentConfig | None = None
    mtp_layers: int = 0
    multipliers: Multipliers = Multipliers()
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuses sizes that no machine holds and that do not fit each other."""
        settle(self, as_int, 1, MAX_LAYERS, "num_layers")
        settle(self, as_int, 0, MAX_LAYERS, "mtp_layers")
        settle(self, as_int, 1, 2**24, "vocab_size", "ffn_size")
        settle(self, as_int, 1, 2**20, "hidden_size")
        settle(self, as_int, 1, 2**16, "heads", "kv_heads", "head_dim")
        settle(self, as_int, 1, _INT32_MAX, "max_positions")
        settle(self, as_float, 0.0, 1.0, "norm_eps")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} kv_heads evenly")
        for rope in (self.rope, self.window_rope or self.rope):
            if rope.rotary_dim > self.head_dim:
                raise ValueError(f"rotary_dim {rope.rotary_dim} exceeds head_dim {self.head_dim}")
        for name in ("attention_cap", "logit_cap"):
            if getattr(self, name) is not None:
                settle(self, as_float, 1e-3, 1e6, name)
        if not self.pattern:
            object.__setattr__(self, "pattern", (("attention", "gated"),) * self.num_layers)
        for name in ("windows", "pattern"):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(
                    f"{name} names {len(getattr(self, name))} layers, the model has {self.num_layers}"
                )
        for window in self.windows:
            if window is not None:
                as_int("windows", window, 1, _INT32_MAX)
        for token in self.eos_ids:
            as_int("eos_ids", token, 0, _INT32_MAX)
        parts = {
            "mamba2": self.mamba,
            "delta": self.delta,
            "mixture": self.mixture,
            "latent": self.latent,
            "sparse_latent": self.latent and self.latent.index,
        }
        for block, part in parts.items():
            if part is None and block in self.blocks:
                raise ValueError(f"the pattern has {block} blocks, whose sizes are missing")

    @property
    def query_rows(self) -> int:
        """Rows that a head's query takes in its projection, its gate included."""
        return (1 + self.attention_gate) * self.head_dim

    @property
    def blocks(self) -> frozenset[str]:
        """Names of all blocks in the pattern."""
        return frozenset(name for layer in range(self.num_layers) for name in self.blocks_of(layer))

    def blocks_of(self, layer: int) -> tuple[str, ...]:
        """Returns the names of a layer's blocks, in the order in which they run."""
        return tuple(name for stage in self.pattern[layer] for name in stage.split("+"))
