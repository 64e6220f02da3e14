"""The kinds of caches: one function per kind that returns its spec, with the order of the axes per token or state.

Pages of keys and of values are `[pages, page_size, kv_heads, head_dim]`. The code of byte formats is in
`pallas_kernels/formats`; here are only their names.
"""

from collections.abc import Iterable

from jaxkv.cache.spec import ArraySpec, LayerSpec, PagedSpec, StateSpec

QUANTISED = {"fp8": "float8_e4m3fn", "int8": "int8"}
"""Byte formats of keys and values: name -> dtype of the stored numbers, which have float32 scales beside them."""

_ANY_NUMBER = 2**31 - 1
_GROUP = 128  # Values that share one float32 scale in the quantised records.


def place(
    specs: Iterable[PagedSpec | StateSpec], *, layer_offset: int = 0
) -> tuple[LayerSpec, ...]:
    """Returns the specs with absolute layer numbers: the i-th one is at layer `layer_offset + i`."""
    return tuple(LayerSpec(layer_offset + index, spec) for index, spec in enumerate(specs))


def _key_value(
    kv_heads: int, head_dim: int, dtype: str, quantised: str | None
) -> tuple[ArraySpec, ...]:
    if quantised not in (None, *QUANTISED):
        names = ", ".join(map(repr, QUANTISED))
        raise ValueError(f"quantised must be None or one of {names}, got {quantised!r}")
    stored = QUANTISED[quantised] if quantised else dtype
    arrays = tuple(
        ArraySpec(role, (kv_heads, head_dim), stored, split=0) for role in ("key", "value")
    )
    if quantised is None:
        return arrays
    roles = ("key_scale", "value_scale")
    scales = (ArraySpec(role, (kv_heads,), "float32", split=0) for role in roles)
    return (*arrays, *scales)


def gqa(
    kv_heads: int, head_dim: int, *, dtype: str, page_size: int, quantised: str | None = None
) -> PagedSpec:
    """Returns the spec of keys and values for multi-head, multi-query and grouped-query attention.

    Args:
        kv_heads: number of key and value heads.
        head_dim: components per head.
        dtype: dtype name of keys and values, ignored if quantised; a name of `QUANTISED` acts as `quantised`.
        page_size: tokens per page.
        quantised: "fp8" stores float8_e4m3fn and "int8" stores int8, with one float32 scale per token and head.

    Raises:
        ValueError: an unknown format, or a size below 1.
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
    """Returns the spec of `gqa` for queries that see only the last `window` tokens, their own included."""
    quantised = dtype if dtype in QUANTISED else quantised
    arrays = _key_value(kv_heads, head_dim, dtype, quantised)
    return PagedSpec("window", arrays, page_size, window=window, codec=quantised)


def mla(
    kv_lora_rank: int, rope_dim: int, *, dtype: str, page_size: int, quantised: str | None = None
) -> PagedSpec:
    """Returns the spec of multi-head latent attention: per token the latent and the rotary key, as one head.

    Args:
        kv_lora_rank: components of the latent, which come first; values are read from them.
        rope_dim: components of the rotary key, after the latent.
        dtype: dtype name.
        page_size: tokens per page.
        quantised: ignored, with a note in the spec; only `dsa` has a quantised record.
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
    """Returns the spec of DeepSeek sparse attention: quantised latent records and indexer keys, both uint8.

    A record is the latent in fp8, one float32 scale per 128 of its values, and the rotary key in bfloat16. A page of
    the indexer is planar: `page_size * index_head_dim` fp8 keys, then one float32 scale per token.

    Args:
        kv_lora_rank: components of the latent, a multiple of 128 unless plain.
        rope_dim: components of the rotary key.
        index_head_dim: components of an indexer key, a multiple of 128 unless plain.
        page_size: tokens per page.
        dtype: dtype name of the plain layout; ignored otherwise, with a note in the spec.
        plain: store latents, rotary keys and indexer keys unquantised in `dtype`, as Transformers does.
        power_of_two: round scales to powers of two, as FlashMLA's quantiser does, instead of amax / 448.
        topk: tokens that a query attends to. With at most this many tokens it attends to all, without the indexer.

    Raises:
        ValueError: a plain layout without dtype or with `power_of_two`, or sizes that are no multiples of 128.
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
    """Returns the spec of Mamba-2: the last `d_conv - 1` inputs of the convolution, and the state-space state.

    Args:
        heads: heads of the state-space layer; d_inner is `heads * head_dim`.
        head_dim: components per head.
        d_state: size of the state per component.
        d_conv: width of the convolution, in tokens.
        groups: groups of heads that share B and C.
        dtype: dtype name of the convolution's inputs `[d_conv - 1, d_inner + 2 * groups * d_state]`.
        state_dtype: dtype name of the state `[heads, head_dim, d_state]`.
        chunk_size: tokens that a scan takes at a time.
    """
    channels = heads * head_dim + 2 * groups * d_state
    arrays = (
        ArraySpec("conv", (d_conv - 1, channels), dtype, split=1),
        ArraySpec("ssm", (heads, head_dim, d_state), state_dtype, split=0),
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
    """Returns the spec of the gated delta rule: the last `d_conv - 1` inputs of the convolution, a matrix per head.

    Args:
        key_heads: heads of queries and keys.
        value_heads: heads of values.
        key_dim: components per query and key head.
        value_dim: components per value head.
        d_conv: width of the convolution over queries, keys and values, in tokens.
        dtype: dtype name of the inputs `[d_conv - 1, 2 * key_heads * key_dim + value_heads * value_dim]`.
        state_dtype: dtype name of the matrices `[value_heads, key_dim, value_dim]`.
        chunk_size: tokens that a scan takes at a time.
    """
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    arrays = (
        ArraySpec("conv", (d_conv - 1, channels), dtype, split=1),
        ArraySpec("delta", (value_heads, key_dim, value_dim), state_dtype, split=0),
    )
    return StateSpec("delta", arrays, chunk_size=chunk_size)


def mamba1(
    channels: int,
    *,
    d_state: int,
    d_conv: int,
    dtype: str,
    state_dtype: str = "float32",
    chunk_size: int = 1,
) -> StateSpec:
    """Returns the spec of a Mamba layer: the last `d_conv - 1` inputs of the convolution, and the state.

    Args:
        channels: inner width.
        d_state: size of the state per channel.
        d_conv: width of the convolution, in tokens.
        dtype: dtype name of the convolution's inputs `[d_conv - 1, channels]`.
        state_dtype: dtype name of the state `[channels, d_state]`.
        chunk_size: tokens that a scan takes at a time.
    """
    arrays = (
        ArraySpec("conv", (d_conv - 1, channels), dtype, split=1),
        ArraySpec("ssm", (channels, d_state), state_dtype, split=0),
    )
    return StateSpec("mamba1", arrays, chunk_size=chunk_size)


def short_conv(channels: int, *, d_conv: int, dtype: str) -> StateSpec:
    """Returns the spec of a short convolution without further state: its last `d_conv - 1` inputs.

    Args:
        channels: channels of the convolution.
        d_conv: width of the convolution, in tokens.
        dtype: dtype name of its inputs `[d_conv - 1, channels]`.
    """
    return StateSpec("short_conv", (ArraySpec("conv", (d_conv - 1, channels), dtype, split=1),))


def outputs(hidden_size: int, *, dtype: str) -> StateSpec:
    """Returns the spec of the last token's hidden state, placed after the model's last layer.

    With it, a sequence that begins at a checkpoint of all its tokens samples its next token without computing any.

    Args:
        hidden_size: components of the hidden state.
        dtype: dtype name of the model's hidden states.
    """
    return StateSpec("outputs", (ArraySpec("hidden", (hidden_size,), dtype),))


def routed_experts(layers: int, top_k: int, *, page_size: int) -> PagedSpec:
    """Returns the spec of the experts that each token's routers chose, placed after the model's last layer.

    In pages, they go wherever keys and values go: to samples of the same prompt, to later prompts, to the host.

    Args:
        layers: layers with a mixture of experts.
        top_k: experts per token and layer.
        page_size: tokens per page.
    """
    return PagedSpec("experts", (ArraySpec("experts", (layers, top_k), "int16"),), page_size)


def hidden_states(width: int, *, dtype: str, page_size: int) -> PagedSpec:
    """Returns the spec of hidden states of each token, which a `DraftHead` reads, placed after the model's last layer.

    In pages, they go wherever keys and values go, as `routed_experts` do.

    Args:
        width: components of all of a token's hidden states together.
        dtype: dtype name.
        page_size: tokens per page.
    """
    return PagedSpec("hidden_states", (ArraySpec("hidden_states", (width,), dtype),), page_size)


def sampling(
    vocab_size: int,
    *,
    penalties: bool = False,
    bias_entries: int = 0,
    history_tokens: int = 0,
    processor_words: int = 0,
    drafts: int = 0,
) -> StateSpec:
    """Returns the spec of the sampler's state per sequence in flight, placed after the model's last layer.

    Args:
        vocab_size: number of token ids.
        penalties: store `[vocab_size]` int32 counts of output tokens and `[vocab_size]` uint8 marks of prompt tokens.
        bias_entries: most (token id, bias) pairs of a sequence; 0 for no logit bias.
        history_tokens: most token ids of a sequence, which logits processors and drafters read.
        processor_words: `LogitsProcessors.num_words`; 0 for no logits processors.
        drafts: most drafts of a sequence, which the device makes itself; 0 for none. Token ids are stored for logits
            processors and for drafts.
    """
    arrays = [ArraySpec("last_token", (), "int32")]
    if penalties:
        arrays.append(ArraySpec("output_counts", (vocab_size,), "int32"))
        arrays.append(ArraySpec("prompt_seen", (vocab_size,), "uint8"))
    if bias_entries:
        arrays.append(ArraySpec("bias_ids", (bias_entries,), "int32"))
        arrays.append(ArraySpec("bias_values", (bias_entries,), "float32"))
    if processor_words or drafts:
        arrays.append(ArraySpec("token_history", (history_tokens,), "int32"))
    if processor_words:
        arrays.append(ArraySpec("processor_words", (processor_words,), "int32"))
    if drafts:
        arrays.append(ArraySpec("text_length", (), "int32"))
        arrays.append(ArraySpec("drafts", (drafts,), "int32"))
    return StateSpec("sampling", tuple(arrays), in_place=True)
