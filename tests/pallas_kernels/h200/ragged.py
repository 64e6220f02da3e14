"""The prefill kernel, as kernels.py compiles it for an H200."""

from functools import partial

LAYERS = 2


def step(options, lse, donated, q, pools, page_table, seq_lens, cu_q_lens, sinks, scales):
    from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
    from pallas_kernels.ragged_attention import mosaic_gpu

    tables, options = (page_table, seq_lens, cu_q_lens), ScoreOptions(0.1, **options)
    calls = [AttentionArrays(q, pool, pool, *tables, sinks, scales, scales) for pool in pools]
    return [mosaic_gpu.ragged_attention(call, options, return_lse=lse) for call in calls]


def programs():
    """Returns, by name, a function of several layers and the shapes of its arguments; it is donated nothing."""
    import jax

    shape = jax.ShapeDtypeStruct

    def attend(
        heads=32,
        kv_heads=8,
        head_dim=128,
        page_size=16,
        stored="bfloat16",
        sinks=False,
        lse=False,
        **options,
    ):
        pool = (2**16 + 1, page_size, kv_heads, head_dim)
        tables = (
            shape((8, 4096 // page_size + 1), "int32"),
            shape((8,), "int32"),
            shape((9,), "int32"),
        )
        arguments = (
            (),
            shape((2048, heads, head_dim), "bfloat16"),
            [shape(pool, stored)] * LAYERS,
            *tables,
            shape((heads,), "float32") if sinks else None,
            shape(pool[:3], "float32") if stored != "bfloat16" else None,
        )
        return partial(step, options, lse), arguments

    return {
        "llama": attend(),
        "gpt-oss": attend(64, head_dim=64, window=128, sinks=True, lse=True),
        "gemma": attend(8, 4, 256, window=512, soft_cap=50.0),
        "fp8": attend(stored="float8_e4m3fn", lse=True),
    }
