"""How much the cache holds and in what units, as frozen data that is checked once."""

from dataclasses import dataclass
from typing import Literal

from jaxkv.config.checks import as_float, as_int, dtype_name, settle
from jaxkv.config.vllm_names import accepts_vllm_names
from jaxkv.wording import shown

CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "int8")


@accepts_vllm_names
@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How much is remembered, and in what units.

    Attributes:
        page_size: tokens per page.
        dtype: of keys and values: "float32", "bfloat16", "float16", or "auto" for the parameters' own; "fp8" and
            "int8" keep a byte per number, with one float32 scale per token and head. "fp32", "float", "bf16", "fp16"
            and "half" are accepted as short names.
        max_sequences: sequences in flight at once (entries of the sampling group).
        budget_bytes: memory for the cache; `None` takes what `max_sequences` sequences of
            the longest length need, or the share `memory_share` of the device's memory if that is less.
        memory_share: share of the device's free memory the cache may take.
        checkpoint_bytes: of that, memory for states of recurrent layers that are kept for prompts that begin alike;
            without them such a model reuses nothing. "auto" keeps up to four for each sequence in flight, in at most a
            tenth of `budget_bytes`; `None` or 0 keeps none.
        host_bytes: memory of the host for prefixes that the cache has to give up; they come back when a prompt begins
            like them. It is taken as it fills, pinned where the device allows; on a GPU JAX pins 64 GiB, unless
            XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise before it starts. 0 is none.
        full_hits: keep the last hidden state with each of them, so that a prompt that is known to its end computes
            nothing before its first token.
    """

    page_size: int = 64
    dtype: str = "auto"
    max_sequences: int = 8
    budget_bytes: int | None = None
    memory_share: float = 0.85
    checkpoint_bytes: int | Literal["auto"] | None = "auto"
    host_bytes: int = 0
    full_hits: bool = True

    def __post_init__(self) -> None:
        """Refuses sizes and types that cannot be served."""
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.dtype not in CACHE_DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(CACHE_DTYPES)}, got {shown(self.dtype)}"
            )
        settle(self, as_int, 1, 2**20, "page_size")
        settle(self, as_int, 1, 2**16, "max_sequences")
        settle(self, as_int, 0, 2**62, "host_bytes")
        settle(self, as_float, 0.01, 1.0, "memory_share")
        if self.budget_bytes is not None:
            settle(self, as_int, 1, 2**62, "budget_bytes")
        if self.checkpoint_bytes not in (None, "auto"):
            settle(self, as_int, 0, 2**62, "checkpoint_bytes")
        if not isinstance(self.full_hits, bool):
            raise ValueError(f"full_hits must be True or False, got {self.full_hits!r}")
