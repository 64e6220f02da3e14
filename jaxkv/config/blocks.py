"""The sizes of a decoder's blocks, as frozen data that is checked once. Knows no arrays."""

import math
from dataclasses import dataclass

from jaxkv.config.checks import as_float, as_int, settle

SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class MambaConfig:
    """A Mamba-2 mixer (Dao and Gu, Transformers are SSMs).

    Attributes:
        heads, head_dim: of the state-space part; their product is the inner width.
        d_state: size of the state per component of a head.
        d_conv: width of the short convolution.
        groups: groups of heads that share B and C.
        chunk_size: tokens that a scan takes at a time, counted from a sequence's first.
        conv_bias, in_bias, out_bias: whether the convolution and the projections carry a bias.
        norm_groups: groups whose root mean square is normalised before the output projection; 0 for no norm.
        gate_first: the gate is applied before that norm, not after it.
        dt_limit: least and most step size, after the softplus.
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
        """Refuses sizes that do not fit each other."""
        settle(self, as_int, 1, 2**16, "heads", "head_dim", "d_state", "groups", "chunk_size")
        settle(self, as_int, 2, 64, "d_conv")
        settle(self, as_int, 0, 2**16, "norm_groups")
        if self.heads % self.groups:
            raise ValueError(f"{self.heads} mamba heads cannot share {self.groups} groups evenly")
        if self.norm_groups and self.d_inner % self.norm_groups:
            raise ValueError(
                f"an inner width of {self.d_inner} has no {self.norm_groups} equal groups to normalise"
            )
        low, high = self.dt_limit
        if not 0.0 <= low < high:
            raise ValueError(f"dt_limit must be a rising pair from 0 on, got {self.dt_limit}")

    @property
    def d_inner(self) -> int:
        """Width of the state-space part's input and output."""
        return self.heads * self.head_dim

    @property
    def has_norm(self) -> bool:
        """Whether anything is normalised before the output projection."""
        return self.norm_groups > 0

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: the input, then B, then C."""
        return self.d_inner + 2 * self.groups * self.d_state

    @property
    def in_channels(self) -> int:
        """Rows of the input projection: gate, convolution, step sizes."""
        return self.d_inner + self.conv_channels + self.heads


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """A gated delta mixer (Yang et al., Gated Delta Networks).

    Attributes:
        key_heads: heads of queries and keys.
        value_heads: heads of values, each of which has a state; a multiple of the key heads.
        key_dim, value_dim: components per head.
        d_conv: width of the short convolution over queries, keys and values.
        chunk_size: tokens that a scan takes at a time, counted from a sequence's first.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    d_conv: int
    chunk_size: int = 64

    def __post_init__(self) -> None:
        """Refuses sizes that do not fit each other."""
        settle(self, as_int, 1, 2**16, "key_heads", "value_heads", "key_dim", "value_dim")
        settle(self, as_int, 1, 2**16, "chunk_size")
        settle(self, as_int, 2, 64, "d_conv")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly"
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
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_heads * self.key_dim + self.width


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """The indexer of sparse attention (DeepSeek-AI, DeepSeek-V3.2): it chooses which tokens latent attention reads.

    Attributes:
        heads: its query heads.
        head_dim: components of each, and of the one key that is kept of a token; the first `rope_dim` are rotated.
        topk: most tokens that a query attends to.
    """

    heads: int
    head_dim: int
    topk: int

    def __post_init__(self) -> None:
        """Refuses sizes that no machine holds."""
        settle(self, as_int, 1, 2**16, "heads", "head_dim")
        settle(self, as_int, 1, 2**24, "topk")


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-AI, DeepSeek-V2), whose keys and values are made of one latent a token.

    Attributes:
        kv_lora_rank: components of the latent.
        rope_dim: components of the rotary key, which all heads share, and of each query's part that meets it.
        nope_dim: components of each head's query and key that carry no position.
        value_dim: components of each head's value.
        q_lora_rank: components of the latent that queries are expanded from; `None` if they come straight from the
            hidden state.
        pairs: angle i turns components 2i and 2i + 1, not i and i + rope_dim / 2.
        index: sizes of the indexer of "sparse_latent" blocks; it needs a latent of queries.
    """

    kv_lora_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    q_lora_rank: int | None = None
    pairs: bool = True
    index: IndexConfig | None = None

    def __post_init__(self) -> None:
        """Refuses sizes that no machine holds."""
        settle(self, as_int, 1, 2**16, "kv_lora_rank", "nope_dim", "value_dim")
        settle(self, as_int, 2, 2**16, "rope_dim")
        if self.q_lora_rank is not None:
            settle(self, as_int, 1, 2**16, "q_lora_rank")
        if self.index is not None and self.q_lora_rank is None:
            raise ValueError("an indexer needs a latent of queries: give q_lora_rank")
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
        """Numbers that are kept of a token: its latent, then its rotary key."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class MixtureConfig:
    """A mixture of experts, of which each token asks a few.

    Attributes:
        experts: how many there are.
        top_k: how many a token asks.
        size: inner width of an expert.
        gated: experts have a gate, as Llama's feed-forward has; otherwise they are one activation between two maps.
        scoring: "softmax" or "sigmoid" of the router's logits.
        correction: a learnt bias is added to the scores for the choice of experts alone (DeepSeek-V3).
        groups, top_groups: experts are chosen from the best groups alone.
        group_votes: how many of its best scores a group is judged by; DeepSeek-V2 takes one, DeepSeek-V3 two.
        renormalise: the chosen experts' weights are made to sum to one.
        scale: what the weights are multiplied by in the end.
        latent_size: width that experts work in, between two projections; `None` for the hidden size.
        shared_size: inner width of the expert that every token asks; 0 if there is none.
        shared_gate: what it says is multiplied by the sigmoid of a number that each token makes for it.
        biases: the router and the experts' two maps carry biases (GPT-OSS).
        clamp: bound of gates from above, and of what they multiply from both sides, in the experts' own activation
            (GPT-OSS, see `clamped_gate`); `None` for the model's activation.
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
    scale: float = 1.0
    latent_size: int | None = None
    shared_size: int = 0
    shared_gate: bool = False
    biases: bool = False
    clamp: float | None = None

    def __post_init__(self) -> None:
        """Refuses sizes that do not fit each other."""
        if self.clamp is not None:
            settle(self, as_float, 1e-3, 1e6, "clamp")
        settle(self, as_int, 1, 2**16, "experts", "groups")
        settle(self, as_int, 1, self.experts, "top_k")
        settle(self, as_int, 1, self.groups, "top_groups")
        settle(self, as_int, 1, 2**24, "size")
        settle(self, as_int, 0, 2**24, "shared_size")
        settle(self, as_float, 0.0, 1e6, "scale")
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring must be one of {', '.join(SCORINGS)}, got {self.scoring!r}")
        if self.latent_size is not None:
            settle(self, as_int, 1, 2**20, "latent_size")
        settle(self, as_int, 1, 2, "group_votes")
        per_group, rest = divmod(self.experts, self.groups)
        too_small = self.groups > 1 and per_group < self.group_votes
        if rest or self.top_k > self.top_groups * per_group or too_small:
            raise ValueError(
                f"{self.top_k} of {self.experts} experts cannot be chosen from {self.top_groups} of "
                f"{self.groups} equal groups of {self.group_votes} or more"
            )

    @property
    def has_latent(self) -> bool:
        """Whether experts work in a width of their own."""
        return self.latent_size is not None


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Constants that a family multiplies its activations by (Granite; Falcon-H1, after Yang et al., Tensor Programs V).

    Attributes:
        embedding: of the embeddings.
        residual: of what each stage adds to the residual stream.
        logits: of the logits.
        attention_in, attention_out: before the projections of attention and after the last of them.
        gate, down: of the feed-forward's gate before its activation, and of its output.
        ssm_in: of what a Mamba-2 mixer is given, by what it becomes: gate, input, B, C, step sizes.
        ssm_out: of its output.
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
        """Refuses another number of parts than a Mamba-2 projection has."""
        if len(self.ssm_in) != 5:
            raise ValueError(f"ssm_in must hold five numbers, got {self.ssm_in}")
