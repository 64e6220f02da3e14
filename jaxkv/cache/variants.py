"""One spec per way of remembering, and the only place that knows how a token's or a state's axes are ordered.

Keys and values lie in pages `[pages, page_size, kv_heads, head_dim]`. Byte formats are named here, not coded.
"""

from collections.abc import Iterable

from jaxkv.cache.spec import ArraySpec, LayerSpec, PagedSpec, StateSpec

QUANTISED = {"fp8": "float8_e4m3fn", "int8": "int8"}
"""Byte formats of keys and values by name, and the dtype of what they store beside their scales."""

_ANY_NUMBER = 2**31 - 1
_GROUP = 128  # values that share one float32 scale in the quantised records


def place(
    specs: Iterable[PagedSpec | StateSpec], *, layer_offset: int = 0
) -> tuple[LayerSpec, ...]:
    """Puts the i-th spec at the absolute layer `layer_offset + i`."""
    return tuple(LayerSpec(layer_offset + index, spec) for index, spec in enumerate(specs))


def _key_value(
    kv_heads: int, head_dim: int, dtype: str, quantised: str | None
) -> tuple[ArraySpec, ...]:
    if quantised not in (None, *QUANTISED):
        names = ", ".join(map(repr, QUANTISED))
        raise ValueError(f"quantised must be None or one of {names}, got {quantised!r}")
    stored = QUANTISED[quantised] if quantised else dtype
    arrays = tuple(ArraySpec(role, (kv_heads, head_dim), stored) for role in ("key", "value"))
    if quantised is None:
        return arrays
    scales = (ArraySpec(role, (kv_heads,), "float32") for role in ("key_scale", "value_scale"))
    return (*arrays, *scales)


def gqa(
    kv_heads: int, head_dim: int, *, dtype: str, page_size: int, quantised: str | None = None
) -> PagedSpec:
    """Keys and values of every token, for multi-head, multi-query and grouped-query attention.

    Args:
        kv_heads: heads that keys and values have (fewer than query heads when grouped).
        head_dim: components per head.
        dtype: dtype name of keys and values; ignored when quantised. A name of `QUANTISED` asks for that.
        page_size: tokens per page.
        quantised: "fp8" stores float8_e4m3fn, "int8" int8, each with one float32 scale per token and head.
    """
    quantised = dtype if dtype in QUANTISED else quantised
    arrays = _key_value(kv_heads, head_dim, dtype, quantised)
    return PagedSpec("gqa", arrays, page_size, codec=quantised)


def window(
    kv_heads: int,
    head_dim: int,
    *,
    window: int,
    dtype: str,
    page_size: int,
    quantised: str | None = None,
) -> PagedSpec:
    """Like `gqa`, for layers whose queries see only the last `window` tokens, their own included."""
    quantised = dtype if dtype in QUANTISED else quantised
    arrays = _key_value(kv_heads, head_dim, dtype, quantised)
    return PagedSpec("window", arrays, page_size, window=window, codec=quantised)


def mla(
    kv_lora_rank: int, rope_dim: int, *, dtype: str, page_size: int, quantised: str | None = None
) -> PagedSpec:
    """The latent of multi-head latent attention and its rotary key, one head wide; values are read from the latent.

    Args:
        kv_lora_rank: components of the latent, which come first.
        rope_dim: components of the rotary key, which follow.
        dtype: dtype name.
        page_size: tokens per page.
        quantised: has no effect but a note; `dsa` has the quantised record.
    """
    notes = () if quantised is None else (f"quantised={quantised!r} was ignored: kept as {dtype}",)
    arrays = (ArraySpec("key", (1, kv_lora_rank + rope_dim), dtype),)
    return PagedSpec("mla", arrays, page_size, expands=_ANY_NUMBER, notes=notes)


def dsa(
    kv_lora_rank: int,
    rope_dim: int,
    index_head_dim: int,
    *,
    page_size: int,
    dtype: str | None = None,
    plain: bool = False,
    power_of_two: bool = False,
    topk: int = 0,
) -> PagedSpec:
    """Quantised latent records and indexer keys of DeepSeek sparse attention, all bytes.

    A record is the latent in fp8, a float32 scale per 128 of it, and the rotary key in bfloat16. The indexer's
    bytes are planar in a page: `page_size * index_head_dim` fp8 keys, then one float32 scale per token.

    Args:
        kv_lora_rank: components of the latent, a multiple of 128 unless plain.
        rope_dim: components of the rotary key.
        index_head_dim: components of an indexer key, a multiple of 128 unless plain.
        page_size: tokens per page.
        dtype: of the plain layout. The records are uint8 whatever is asked for, and a note says so.
        plain: keep latents, rotary keys and indexer keys unquantised in `dtype`, as Transformers does.
        power_of_two: scales are powers of two, as FlashMLA's quantiser has them, instead of amax / 448.
        topk: tokens that a query attends to; among so few it attends to all, and needs no indexer.
    """
    if plain:
        if dtype is None or power_of_two:
            raise ValueError(
                f"a plain layout needs a dtype and has no scales, got dtype={dtype!r} and "
                f"power_of_two={power_of_two}"
            )
        whole = ArraySpec("key", (1, kv_lora_rank + rope_dim), dtype)
        arrays = (whole, ArraySpec("indexer", (index_head_dim,), dtype))
        return PagedSpec("dsa", arrays, page_size, expands=topk)
    if kv_lora_rank % _GROUP or index_head_dim % _GROUP:
        raise ValueError(
            f"kv_lora_rank and index_head_dim must be multiples of {_GROUP}, "
            f"got {kv_lora_rank} and {index_head_dim}"
        )
    record = kv_lora_rank + 4 * (kv_lora_rank // _GROUP) + 2 * rope_dim
    indexer = index_head_dim + 4
    arrays = (ArraySpec("key", (1, record), "uint8"), ArraySpec("indexer", (indexer,), "uint8"))
    ignored = dtype not in (None, "uint8")
    notes = (f"dtype {dtype!r} was ignored: the records are uint8",) if ignored else ()
    codec = "dsa_fp8_pow2" if power_of_two else "dsa_fp8"
    return PagedSpec("dsa", arrays, page_size, codec=codec, expands=topk, notes=notes)


def mamba2(
    *,
    heads: int,
    head_dim: int,
    d_state: int,
    d_conv: int,
    groups: int,
    dtype: str,
    state_dtype: str = "float32",
    chunk_size: int = 1,
) -> StateSpec:
    """Mamba-2: the last `d_conv - 1` inputs of the short convolution, and the state-space state.

    Args:
        heads: heads of the state-space layer; `heads * head_dim` is d_inner.
        head_dim: components per head.
        d_state: size of the state per component.
        d_conv: width of the convolution.
        groups: groups that share B and C.
        dtype: dtype name of the convolution's inputs `[d_conv - 1, d_inner + 2 * groups * d_state]`.
        state_dtype: dtype name of the state `[heads, head_dim, d_state]`.
        chunk_size: tokens that a scan takes at a time.
    """
    channels = heads * head_dim + 2 * groups * d_state
    arrays = (
        ArraySpec("conv", (d_conv - 1, channels), dtype),
        ArraySpec("ssm", (heads, head_dim, d_state), state_dtype),
    )
    return StateSpec("mamba2", arrays, chunk_size=chunk_size)


def delta(
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    d_conv: int,
    dtype: str,
    state_dtype: str = "float32",
    chunk_size: int = 1,
) -> StateSpec:
    """Gated delta rule: the last inputs of the short convolution over q, k, v, and one matrix per value head.

    Args:
        key_heads: heads of queries and keys.
        value_heads: heads of values.
        key_dim: components per query and key head.
        value_dim: components per value head.
        d_conv: width of the convolution.
        dtype: dtype name of the inputs `[d_conv - 1, 2 * key_heads * key_dim + value_heads * value_dim]`.
        state_dtype: dtype name of the matrices `[value_heads, key_dim, value_dim]`.
        chunk_size: tokens that a scan takes at a time.
    """
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    arrays = (
        ArraySpec("conv", (d_conv - 1, channels), dtype),
        ArraySpec("delta", (value_heads, key_dim, value_dim), state_dtype),
    )
    return StateSpec("delta", arrays, chunk_size=chunk_size)


def outputs(hidden_size: int, *, dtype: str) -> StateSpec:
    """The hidden state of a sequence's last token, from which the next is chosen. Placed after the last layer.

    Only of use beside recurrent groups whose states are kept: whoever begins at such a state may compute nothing.

    Args:
        hidden_size: its components.
        dtype: dtype name of the model's hidden states.
    """
    return StateSpec("outputs", (ArraySpec("hidden", (hidden_size,), dtype),))


def sampling(vocab_size: int, *, penalties: bool = False, bias_entries: int = 0) -> StateSpec:
    """What choosing tokens remembers per sequence in flight. It is placed after the model's last layer.

    Args:
        vocab_size: token ids that are counted when penalties are on.
        penalties: keep counts of the output's tokens and marks of the prompt's.
        bias_entries: most (token id, bias) pairs of a sequence; 0 keeps none.
    """
    arrays = [ArraySpec("last_token", (), "int32")]
    if penalties:
        arrays.append(ArraySpec("output_counts", (vocab_size,), "int32"))
        arrays.append(ArraySpec("prompt_seen", (vocab_size,), "uint8"))
    if bias_entries:
        arrays.append(ArraySpec("bias_ids", (bias_entries,), "int32"))
        arrays.append(ArraySpec("bias_values", (bias_entries,), "float32"))
    return StateSpec("sampling", tuple(arrays), in_place=True)
