"""What a user may choose, as frozen data that is checked once, when it is made. Knows no arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

MAX_LOGPROBS = 20
MAX_STOP_IDS = 64
MAX_BIAS_ENTRIES = 1024
_INT32_MAX = 2**31 - 1


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an int in [{low}, {high}], got {value!r}")


def _check_float(name: str, value: float, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # NaN compares as false, and the bounds are finite.
    if not (number and low <= value <= high):
        raise ValueError(f"{name} must be a finite number in [{low}, {high}], got {value!r}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    The order of operations on a row's logits: penalties, `logit_bias`, the block on stop ids before
    `min_tokens`, temperature, `top_k`, `top_p` (over what `top_k` left), `min_p`.

    Attributes:
        temperature: 0 chooses the most likely token (greedy, ties to the lowest id).
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; 1.0 keeps all.
        min_p: keep tokens at least this times as likely as the most likely one; 0.0 keeps all.
        repetition_penalty: divides (multiplies, if negative) the logits of tokens seen in prompt or output; 1.0 is off.
        presence_penalty: subtracted from the logits of tokens in the output; 0.0 is off.
        frequency_penalty: subtracted once per occurrence in the output; 0.0 is off.
        logit_bias: token id -> number added to its logit, in [-100, 100].
        seed: 64-bit seed of this request's random numbers, which depend on it and the position alone;
            `None` draws one.
        n: number of samples of the same prompt.
        max_tokens: most tokens to generate.
        min_tokens: stop ids cannot be chosen before this many tokens.
        stop_token_ids: ids that end the request, besides the model's own end ids.
        ignore_eos: the model's own end ids do not end the request.
        logprobs: `None`, or how many of the most likely tokens to report beside the chosen one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot be served, naming the field, the value and the range."""
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, 0, _INT32_MAX)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ValueError("top_p must be above 0 (it would keep no token), use temperature=0")
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check_float("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        _check_int("n", self.n, 1, 1024)
        _check_int("max_tokens", self.max_tokens, 1, _INT32_MAX)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be a bool, got {self.ignore_eos!r}")
        self._check_ids()

    def _check_ids(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_int("the number of stop_token_ids", len(self.stop_token_ids), 0, MAX_STOP_IDS)
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, _INT32_MAX)
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))
        _check_int("the number of logit_bias entries", len(self.logit_bias), 0, MAX_BIAS_ENTRIES)
        for token, bias in self.logit_bias.items():
            _check_int("logit_bias token ids", token, 0, _INT32_MAX)
            _check_float("logit_bias values", bias, -100.0, 100.0)

    def check_vocab(self, vocab_size: int) -> None:
        """Raises `ValueError` if an id of this request lies outside the model's logits."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            outside = [token for token in ids if token >= vocab_size]
            if outside:
                raise ValueError(
                    f"{name} holds {outside[0]}, but the model has {vocab_size} token ids"
                )

    @property
    def uses_penalties(self) -> bool:
        """Whether the row needs counts of the tokens it has seen."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def uses_filters(self) -> bool:
        """Whether the row restricts the tokens that may be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
MAX_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., RoFormer) and how its angles are stretched.

    Attributes:
        theta: base of the geometric sequence of frequencies.
        rotary_dim: leading components of each head that are rotated.
        kind: "default", "linear", "dynamic" (NTK), "yarn" (Peng et al.) or "llama3".
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
        _check_float("rope theta", self.theta, 2.0, 1e15)
        _check_int("rotary_dim", self.rotary_dim, 2, 2**16)
        if self.rotary_dim % 2 or (self.kind == "dynamic" and self.rotary_dim < 4):
            raise ValueError(
                f"rotary_dim must be even (and at least 4 if dynamic), got {self.rotary_dim}"
            )
        _check_float("rope factor", self.factor, 1.0, 1e6)
        if self.original_max_positions is not None:
            _check_int("original_max_positions", self.original_max_positions, 1, _INT32_MAX)
        elif self.kind in ("dynamic", "yarn", "llama3"):
            raise ValueError(f"rope kind {self.kind} needs original_max_positions")
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            _check_float(name, getattr(self, name), 1e-6, 1e6)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor must be above low_freq_factor, got {self.high_freq_factor} and "
                f"{self.low_freq_factor}"
            )
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if getattr(self, name) is not None:
                _check_float(name, getattr(self, name), 0.0, 1e6)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder as data: what `config.json` says, in our words.

    Attributes:
        family: Hugging Face's `model_type`.
        pattern: per layer, the names of its mixer and of its feed-forward; attention and a gated one if not given.
        windows: per layer, the sliding window in tokens, or `None` for all tokens.
        max_positions: longest sequence the model is meant for.
        eos_ids: ids that end a text.
        qkv_bias, o_bias, mlp_bias: which projections carry a bias.
        qk_norm: per-head RMSNorm on queries and keys before the rotation (Qwen3).
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
    pattern: tuple[tuple[str, str], ...] = ()
    norm_eps: float = 1e-6
    activation: str = "silu"
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuses sizes that no machine holds and that do not fit each other."""
        _check_int("num_layers", self.num_layers, 1, MAX_LAYERS)
        for name, high in (
            ("vocab_size", 2**24),
            ("hidden_size", 2**20),
            ("heads", 2**16),
            ("kv_heads", 2**16),
            ("head_dim", 2**16),
            ("ffn_size", 2**24),
            ("max_positions", _INT32_MAX),
        ):
            _check_int(name, getattr(self, name), 1, high)
        _check_float("norm_eps", self.norm_eps, 0.0, 1.0)
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} kv_heads evenly")
        if self.rope.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim {self.rope.rotary_dim} exceeds head_dim {self.head_dim}")
        if not self.pattern:
            object.__setattr__(self, "pattern", (("attention", "gated"),) * self.num_layers)
        for name in ("windows", "pattern"):
            if len(getattr(self, name)) != self.num_layers:
                raise ValueError(
                    f"{name} names {len(getattr(self, name))} layers, the model has {self.num_layers}"
                )
        for window in self.windows:
            if window is not None:
                _check_int("windows", window, 1, _INT32_MAX)
        for token in self.eos_ids:
            _check_int("eos_ids", token, 0, _INT32_MAX)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How much is remembered, and in what units.

    Attributes:
        page_size: tokens per page.
        dtype: dtype name of keys and values; "auto" takes the parameters' dtype.
        max_sequences: sequences in flight at once (entries of the sampling group).
        budget_bytes: memory for the cache; `None` takes what `max_sequences` sequences of
            the longest length need, or the share `memory_share` of the device's memory if that is less.
        memory_share: share of the device's free memory the cache may take.
    """

    page_size: int = 64
    dtype: str = "auto"
    max_sequences: int = 8
    budget_bytes: int | None = None
    memory_share: float = 0.85

    def __post_init__(self) -> None:
        """Refuses sizes that cannot be served."""
        _check_int("page_size", self.page_size, 1, 2**20)
        _check_int("max_sequences", self.max_sequences, 1, 2**16)
        _check_float("memory_share", self.memory_share, 0.01, 1.0)
        if self.budget_bytes is not None:
            _check_int("budget_bytes", self.budget_bytes, 1, 2**62)
