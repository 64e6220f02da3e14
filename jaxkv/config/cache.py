"""`CacheConfig`: size and format of the KV cache."""

from dataclasses import dataclass
from typing import Literal

from jaxkv.config.checks import as_float, as_int, check_fields, dtype_name
from jaxkv.config.vllm_names import accepts_vllm_names
from jaxkv.wording import shown

CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "int8")


@accepts_vllm_names
@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Size and format of the KV cache, checked on construction.

    Attributes:
        page_size: tokens per page.
        dtype: dtype of keys and values: "float32", "bfloat16", "float16", or "auto" for the parameters' own. "fp8" and
            "int8" store one byte per number and one float32 scale per token and head. The short names "fp32", "float",
            "bf16", "fp16" and "half" are accepted.
        max_sequences: most sequences in flight at once.
        budget_bytes: bytes of device memory for the cache. `None` takes the bytes that `max_sequences` sequences of the
            longest length need, at most the share `memory_share` of the device's free memory.
        memory_share: largest share of the device's free memory for the cache, between 0.01 and 1.
        checkpoint_bytes: bytes of the budget for cached states of recurrent layers. Without them, models with such
            layers reuse no prefix. "auto" keeps up to four checkpoints per sequence in flight, in at most a tenth of
            `budget_bytes`; `None` or 0 keeps none.
        host_bytes: bytes of host memory for evicted prefixes, which are swapped in when a prompt needs them; 0 for
            none, else at least those of the shortest prefix on each device: a page of each group of layers, and a
            checkpoint. The memory is pinned where the device allows it. On a GPU it is reserved when the engine is
            made, by JAX, whose pool doubles until it is large enough; elsewhere it is allocated as it fills. JAX pins
            at most 64 GiB; the environment variable XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB changes this limit at start.
        full_hits: store the last hidden state with each checkpoint, so that a prompt whose tokens are all cached
            computes no token before its first output.
        routed_experts: store the experts that the routers of a mixture chose for each token, in pages beside keys and
            values; outputs then have them (`SampleOutput.routed_experts`), for routing replay in training.
    """

    page_size: int = 64
    dtype: str = "auto"
    max_sequences: int = 8
    budget_bytes: int | None = None
    memory_share: float = 0.85
    checkpoint_bytes: int | Literal["auto"] | None = "auto"
    host_bytes: int = 0
    full_hits: bool = True
    routed_experts: bool = False

    def __post_init__(self) -> None:
        """Raises `ValueError` for values out of range or of the wrong type."""
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        if self.dtype not in CACHE_DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(CACHE_DTYPES)}, got {shown(self.dtype)}"
            )
        check_fields(self, as_int, 1, 2**20, "page_size")
        check_fields(self, as_int, 1, 2**16, "max_sequences")
        check_fields(self, as_int, 0, 2**62, "host_bytes")
        check_fields(self, as_float, 0.01, 1.0, "memory_share")
        if self.budget_bytes is not None:
            check_fields(self, as_int, 1, 2**62, "budget_bytes")
        if self.checkpoint_bytes not in (None, "auto"):
            check_fields(self, as_int, 0, 2**62, "checkpoint_bytes")
        for name in ("full_hits", "routed_experts"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
