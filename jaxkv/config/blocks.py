"""Sizes of a decoder's blocks: frozen dataclasses, checked on construction."""

import math
from dataclasses import dataclass

from jaxkv.config.checks import as_float, as_int, check_fields

SCORINGS = ("softmax", "sigmoid")
MAX_EXPERTS = 2**16


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """Sizes of a Mamba-2 mixer (Dao and Gu, Transformers are SSMs).

    Attributes:
        heads, head_dim: heads of the state-space part and components per head; their product is the inner width.
        d_state: size of the state per component of a head.
        d_conv: width of the short convolution, in tokens.
        groups: groups of heads that share B and C.
        chunk_size: tokens of a scan's chunk, counted from the first token of a sequence.
        conv_bias, in_bias, out_bias: whether the convolution and the projections carry a bias.
        norm_groups: groups of channels that are RMS-normalised separately before the output projection; 0 for no norm.
        gate_first: whether the gate is applied before that norm; otherwise after it.
        dt_limit: bounds of the step size after the softplus.
    """

    heads: int
    head_dim: int
    d_state: int
    d_conv: int
    groups: int
    chunk_size: int
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    norm_groups: int = 1
    gate_first: bool = True
    dt_limit: tuple[float, float] = (0.0, math.inf)

    def __post_init__(self) -> None:
        """Raises `ValueError` for sizes out of range or sizes that contradict each other."""
        check_fields(self, as_int, 1, 2**16, "heads", "head_dim", "d_state", "groups", "chunk_size")
        check_fields(self, as_int, 2, 64, "d_conv")
        check_fields(self, as_int, 0, 2**16, "norm_groups")
        if self.heads % self.groups:
            raise ValueError(
                f"mamba heads must be a multiple of groups, got {self.heads} heads and {self.groups} groups"
            )
        if self.norm_groups and self.d_inner % self.norm_groups:
            raise ValueError(
                f"the inner width must be a multiple of norm_groups, got {self.d_inner} and {self.norm_groups}"
            )
        low, high = self.dt_limit
        if not 0.0 <= low < high:
            raise ValueError(
                f"dt_limit must be (low, high) with 0 <= low < high, got {self.dt_limit}"
            )

    @property
    def d_inner(self) -> int:
        """Width of the state-space part's input and output, in channels."""
        return self.heads * self.head_dim

    @property
    def has_norm(self) -> bool:
        """Whether there is a norm before the output projection."""
        return self.norm_groups > 0

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution, in this order: input, B, C."""
        return self.d_inner + 2 * self.groups * self.d_state

    @property
    def in_channels(self) -> int:
        """Output channels of the input projection, in this order: gate, convolution, step sizes."""
        return self.d_inner + self.conv_channels + self.heads


@dataclass(frozen=True, kw_only=True)
class Mamba1Config:
    """Sizes of a Mamba mixer (Gu and Dao, Mamba), whose channels have a state and decay rates each.

    Attributes:
        channels: inner width.
        d_state: size of the state per channel.
        dt_rank: rank of the projection to step sizes.
        d_conv: width of the short convolution, in tokens.
        chunk_size: tokens of a scan's chunk, counted from the first token of a sequence.
        conv_bias, bias: whether the convolution and the input and output projections carry a bias.
        norms: whether step sizes, B and C are RMS-normalised (Jamba).
    """

    channels: int
    d_state: int
    dt_rank: int
    d_conv: int
    chunk_size: int = 64
    conv_bias: bool = True
    bias: bool = False
    norms: bool = False

    def __post_init__(self) -> None:
        """Raises `ValueError` for sizes out of range."""
        check_fields(self, as_int, 1, 2**20, "channels")
        check_fields(self, as_int, 1, 2**16, "d_state", "dt_rank", "chunk_size")
        check_fields(self, as_int, 2, 64, "d_conv")


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Sizes of a gated delta mixer (Yang et al., Gated Delta Networks), or of Kimi Delta Attention (Kimi Team, 2025).

    Attributes:
        key_heads: heads of queries and keys.
        value_heads: heads of values, with one state each; a multiple of the key heads.
        key_dim, value_dim: components per head.
        d_conv: width of the short convolution over queries, keys and values, in tokens.
        chunk_size: tokens of a scan's chunk, counted from the first token of a sequence.
        gate_rank: of Kimi Delta Attention, the inner size of the projections that make decays and output gates; there a
            key head serves one value head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    d_conv: int
    chunk_size: int = 64
    gate_rank: int | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for sizes out of range or sizes that contradict each other."""
        check_fields(self, as_int, 1, 2**16, "key_heads", "value_heads", "key_dim", "value_dim")
        check_fields(self, as_int, 1, 2**16, "chunk_size")
        check_fields(self, as_int, 2, 64, "d_conv")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads must be a multiple of key_heads, got {self.value_heads} and {self.key_heads}"
            )
        if self.gate_rank is not None:
            check_fields(self, as_int, 1, 2**16, "gate_rank")
            if self.value_heads != self.key_heads:
                raise ValueError(
                    f"with gate_rank, value_heads must be key_heads, got {self.value_heads} and {self.key_heads}"
                )

    @property
    def values_per_key(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def width(self) -> int:
        """Components of the values, over all heads."""
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution, in this order: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.width


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig:
    """Sizes of a gated short convolution (Liquid AI, LFM2).

    Attributes:
        channels: channels of the convolution; as many as components of the residual stream.
        d_conv: width of the convolution, in tokens.
        bias: whether the convolution and the two projections have biases.
    """

    channels: int
    d_conv: int
    bias: bool = False

    def __post_init__(self) -> None:
        """Raises `ValueError` for sizes out of range."""
        check_fields(self, as_int, 1, 2**20, "channels")
        check_fields(self, as_int, 2, 64, "d_conv")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes of the low-rank adapters of a transformer block (Glorioso et al., Zamba2); others are in `ModelConfig`.

    Attributes:
        adapter_rank: rank of the adapters.
        adapts_attention: whether queries, keys and values have adapters; gate and up projections always have one.
    """

    adapter_rank: int
    adapts_attention: bool = False

    def __post_init__(self) -> None:
        """Raises `ValueError` for a rank out of range."""
        check_fields(self, as_int, 1, 2**16, "adapter_rank")


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """Sizes of the indexer of sparse attention (DeepSeek-AI, DeepSeek-V3.2), which selects the tokens to attend to.

    Attributes:
        heads: query heads of the indexer.
        head_dim: components of each query head and of the one key per token; the first `rope_dim` are rotated.
        topk: most tokens that a query attends to.
        pairs: rotary pairs are components 2i and 2i + 1 (GLM-5); otherwise i and i + rope_dim / 2.
    """

    heads: int
    head_dim: int
    topk: int
    pairs: bool = False

    def __post_init__(self) -> None:
        """Raises `ValueError` for sizes out of range."""
        check_fields(self, as_int, 1, 2**16, "heads", "head_dim")
        check_fields(self, as_int, 1, 2**24, "topk")


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of multi-head latent attention (DeepSeek-AI, DeepSeek-V2): keys and values come from one latent per token.

    Attributes:
        kv_lora_rank: components of the latent.
        rope_dim: components of the rotary key, which all heads share, and of the rotary part of each query.
        nope_dim: components of each head's query and key that are not rotated.
        value_dim: components of each head's value.
        q_lora_rank: components of the latent that queries are expanded from; `None` if queries are projected directly
            from the hidden state.
        pairs: whether angle i rotates the components 2i and 2i + 1; otherwise i and i + rope_dim / 2.
        index: sizes of the indexer of "sparse_latent" blocks, which needs `q_lora_rank`.
    """

    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_lora_rank: int | None = None
    pairs: bool = True
    index: IndexConfig | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for sizes out of range or sizes that contradict each other."""
        check_fields(self, as_int, 1, 2**16, "kv_lora_rank", "nope_dim", "value_dim")
        check_fields(self, as_int, 2, 2**16, "rope_dim")
        if self.q_lora_rank is not None:
            check_fields(self, as_int, 1, 2**16, "q_lora_rank")
        if self.index is not None and self.q_lora_rank is None:
            raise ValueError(
                "an indexer needs a latent of queries, got q_lora_rank=None; give q_lora_rank"
            )
        if self.index is not None and self.index.head_dim < self.rope_dim:
            raise ValueError(
                f"an indexer's head_dim must be at least rope_dim {self.rope_dim}, got {self.index.head_dim}"
            )

    @property
    def has_query_latent(self) -> bool:
        """Whether queries are expanded from a latent of their own."""
        return self.q_lora_rank is not None

    @property
    def query_dim(self) -> int:
        """Components of each head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def stored(self) -> int:
        """Components stored per token: the latent, then the rotary key."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """Sizes and routing of a mixture of experts.

    Attributes:
        experts: number of routed experts.
        top_k: routed experts per token.
        size: inner width of an expert.
        gated: experts have a gate, like Llama's feed-forward; otherwise they are one activation between two linear
            maps.
        scoring: "softmax" or "sigmoid" of the router's logits.
        correction: a learned bias is added to the scores for the selection of experts, not for their weights
            (DeepSeek-V3).
        groups, top_groups: experts are divided into `groups`; each token selects from its best `top_groups` of them.
        group_votes: the score of a group is the sum of this many of its best expert scores: 1 in DeepSeek-V2, 2 in
            DeepSeek-V3.
        renormalise: the weights of the selected experts are scaled to sum to 1.
        wide_router: the router's weight is float32 in a model of any dtype (ERNIE 4.5).
        sum_eps: number that is added to their sum before it divides them; 1e-6 in LFM2.
        scale: factor of the weights after that.
        latent_size: width of the experts' input and output, between two projections; `None` for the hidden size.
        shared_size: inner width of the shared expert, which every token uses; 0 if there is none.
        shared_gate: the shared expert's output is multiplied by the sigmoid of a learned linear map of each token.
        biases: the router and the experts' two linear maps have biases (GPT-OSS).
        clamp: upper bound of gates, and bound of the magnitude of their factors, in GPT-OSS's activation (see
            `clamped_gate`); `None` for the model's activation.
    """

    experts: int
    top_k: int
    size: int
    gated: bool
    scoring: str = "softmax"
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_votes: int = 2
    renormalise: bool = True
    wide_router: bool = False
    sum_eps: float = 1e-20
    scale: float = 1.0
    latent_size: int | None = None
    shared_size: int = 0
    shared_gate: bool = False
    biases: bool = False
    clamp: float | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` for sizes out of range or sizes that contradict each other."""
        if self.clamp is not None:
            check_fields(self, as_float, 1e-3, 1e6, "clamp")
        check_fields(self, as_int, 1, MAX_EXPERTS, "experts", "groups")
        check_fields(self, as_int, 1, self.experts, "top_k")
        check_fields(self, as_int, 1, self.groups, "top_groups")
        check_fields(self, as_int, 1, 2**24, "size")
        check_fields(self, as_int, 0, 2**24, "shared_size")
        check_fields(self, as_float, 0.0, 1e6, "scale", "sum_eps")
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, got {self.scoring!r}")
        if self.latent_size is not None:
            check_fields(self, as_int, 1, 2**20, "latent_size")
        check_fields(self, as_int, 1, 2, "group_votes")
        per_group, rest = divmod(self.experts, self.groups)
        too_small = self.groups > 1 and per_group < self.group_votes
        if rest or self.top_k > self.top_groups * per_group or too_small:
            raise ValueError(
                f"cannot select {self.top_k} of {self.experts} experts from {self.top_groups} of {self.groups} "
                f"equal groups with at least {self.group_votes} experts each"
            )

    @property
    def has_latent(self) -> bool:
        """Whether experts have an input width of their own."""
        return self.latent_size is not None


@dataclass(frozen=True, kw_only=True)
class GlobalAttentionConfig:
    """Sizes of attention over all tokens, where windows have others (Gemma 4).

    Attributes:
        kv_heads: heads of keys and values.
        head_dim: components of a head.
        keys_are_values: one projection makes both. They differ by their norms and the rotation.
    """

    kv_heads: int
    head_dim: int
    keys_are_values: bool = False

    def __post_init__(self) -> None:
        """Raises `ValueError` for sizes out of range."""
        check_fields(self, as_int, 1, 2**16, "kv_heads", "head_dim")


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """A factor of queries that keeps attention over long contexts sharp (Llama 4, after Nakanishi, Scalable-Softmax).

    A query at position p is multiplied by `1 + beta * log(1 + p // length)`.

    Attributes:
        beta: rate of the growth.
        length: number of positions with one factor; the factor of the first ones is 1.
    """

    beta: float
    length: int

    def __post_init__(self) -> None:
        """Raises `ValueError` for values out of range."""
        check_fields(self, as_float, 0.0, 1e3, "beta")
        check_fields(self, as_int, 1, 2**31 - 1, "length")


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Constant factors of activations (Granite; Falcon-H1, after Yang et al., Tensor Programs V).

    Attributes:
        embedding: factor of the embeddings.
        residual: factor of each stage's output before it is added to the residual stream.
        logits: factor of the logits.
        attention_in, attention_out: factors of attention's input and output.
        gate, down: factors of the feed-forward's gate before its activation, and of its output.
        ssm_in: factors of the five parts of a Mamba-2 input projection: gate, input, B, C, step sizes.
        ssm_out: factor of the Mamba-2 output.
    """

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    gate: float = 1.0
    down: float = 1.0
    ssm_in: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    ssm_out: float = 1.0

    def __post_init__(self) -> None:
        """Raises `ValueError` unless `ssm_in` has five factors."""
        if len(self.ssm_in) != 5:
            raise ValueError(f"ssm_in must hold five numbers, got {self.ssm_in}")
