"""`paged_attention` by NVIDIA's cuDNN, through a private module of JAX. It runs only when it is named.

It meets the op's contract except for reproducibility: the last bits of a row sometimes differ from run to run, within
rounding (NOTES.md). Its programs must not be compiled in parallel threads, because cuDNN captures a CUDA graph during
compilation.
"""

import importlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
from pallas_kernels.device import gpu_arch

# A private module, and the JAX versions (major, minor) whose arguments it is given.
_MODULE, _KNOWN = "jax._src.cudnn.fused_attention_stablehlo", ((0, 11), (0, 12))
# The first cuDNN version with paged attention, as major * 10000 + minor * 100.
_OLDEST_VERSION = 90500
_OLDEST_ARCH = 80


def why_not(arrays: AttentionArrays, options: ScoreOptions) -> str | None:
    """Returns why cuDNN cannot run, or `None` if it can; structs may stand for arrays."""
    return _why_not_here() or _refusal(arrays, options)


def _refusal(arrays: AttentionArrays, options: ScoreOptions) -> str | None:
    """Returns why cuDNN cannot run with these arguments, or `None` if it can."""
    q, head_dim, page_size = arrays.q, arrays.q.shape[-1], arrays.k_pages.shape[1]
    # JAX would pass a window on, but cuDNN aligns it differently and the results are wrong.
    for name, given in (
        ("window", options.window),
        ("soft cap", options.soft_cap),
        ("sinks", arrays.sinks),
        ("scales", arrays.k_scales),
    ):
        if given is not None:
            return f"does not support {name} in decode over pages"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"q and the pages must be bfloat16 or float16, got {q.dtype}"
    if head_dim % 8 or head_dim > 256:
        return f"head_dim must be a multiple of 8 up to 256, got {head_dim}"
    if page_size & (page_size - 1):
        return f"page_size must be a power of two, got {page_size}"
    return None


def _why_not_here() -> str | None:
    """Returns why cuDNN cannot run on this device with this JAX, or `None` if it can."""
    arch = gpu_arch()
    if arch is None or arch < _OLDEST_ARCH:
        found = "no NVIDIA GPU" if arch is None else f"sm{arch}"
        return f"needs an sm{_OLDEST_ARCH} GPU or newer, found {found}"
    if jax.__version_info__[:2] not in _KNOWN:
        known = " and ".join(".".join(map(str, version)) for version in _KNOWN)
        return f"uses a private module of jax {known}, found {jax.__version__}"
    versions = importlib.import_module(_MODULE).cuda_versions
    if versions is None:
        return "needs cuDNN, which JAX did not find"
    version = versions.cudnn_get_version()
    if version < _OLDEST_VERSION:
        return f"needs cuDNN {_OLDEST_VERSION} or newer, found {version}"
    return None


def paged_attention(
    arrays: AttentionArrays,
    options: ScoreOptions,
    *,
    return_lse: bool = False,
) -> (
    Float[Array, "rows heads head_dim"]
    | tuple[Float[Array, "rows heads head_dim"], Float[Array, "rows heads"]]
):
    """Implements `api.paged_attention` without window, soft cap, sinks and scales."""
    fused = importlib.import_module(_MODULE)
    q, k_pages, v_pages, page_table, seq_lens, *_ = arrays
    absent = jnp.zeros(0, q.dtype)
    # JAX 0.12 also takes a function of the scores, and its arguments before it.
    takes_function = jax.__version_info__ >= (0, 12)
    table = page_table[:, None, :, None]
    # JAX's public function requires pools of exactly rows * table_width pages, so the private one below it is called.
    result = fused._dot_product_attention(
        q[:, None],
        k_pages,
        v_pages,
        absent,  # bias
        jnp.ones_like(seq_lens),
        seq_lens,
        absent,  # offsets of queries and keys
        absent,
        table,
        table,
        *([()] if takes_function else []),
        options.scale,
        0,  # seed
        0.0,  # dropout
        (False, False),  # no bias, no gradient of one
        fused.MaskType.PADDING,
        fused.AttentionLayout.BTNH.value,
        None,  # window
        *([None] if takes_function else []),
        fused.check_cudnn_version(),
        return_lse,
    )
    if not return_lse:
        return result[:, 0]
    out, lse = result
    return out[:, 0], lse[:, :, 0]
