"""The decode kernel, as kernels.py compiles it for an H200."""

from functools import partial

FP8 = "float8_e4m3fn"


def programs():
    """Returns, by name, a function and the shapes of its arguments; q, the first, is donated for nothing."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.arguments.attention import AttentionArrays, ScoreOptions
    from pallas_kernels.paged_attention import mosaic_gpu
    from pallas_kernels.paged_attention.mosaic_schedule import Geometry, Schedule
    from pallas_kernels.shared_keys import SharedKeys

    def attend(
        rows, keys, heads=32, kv_heads=8, head_dim=128, page=16, stored="bfloat16", **options
    ):
        shape = jax.ShapeDtypeStruct
        width = keys // page
        pool = (rows * width, page, kv_heads, head_dim)
        q, pages = shape((rows, heads, head_dim), jnp.bfloat16), shape(pool, stored)
        tables = shape((rows, width), jnp.int32), shape((rows,), jnp.int32)
        scales = (shape(pool[:3], jnp.float32),) * 2 if stored != "bfloat16" else ()
        geometry = Geometry.of(q, pages)
        schedule = Schedule.by_rule(geometry, rows, keys, options.get("window"))

        def run(q, pages, values, table, lens, *scales, shared=None):
            call = partial(mosaic_gpu.attend, options=ScoreOptions(head_dim**-0.5, **options))
            scales = scales or (None, None)
            arrays = AttentionArrays(q, pages, values, table, lens, None, None, *scales)
            return call(arrays, shared, schedule=schedule, want_lse=False)

        return run, (q, pages, pages, *tables, *scales)

    def attend_shared(rows, keys, **sizes):
        run, arguments = attend(rows, keys, **sizes)
        ints = [jax.ShapeDtypeStruct((count,), jnp.int32) for count in (2 * rows, rows, rows // 4)]

        def run_shared(q, pages, values, table, lens, *shared):
            return run(q, pages, values, table, lens, shared=SharedKeys(*shared))

        return run_shared, (*arguments, *ints)

    return {
        "batch 1": attend(1, 1152, page=64),
        "batch 64": attend(64, 4096),
        "shared": attend_shared(256, 4096, page=64),
        "shared, head_dim 256": attend_shared(128, 4096, heads=16, head_dim=256, page=64),
        "shared, one key head": attend_shared(128, 4096, kv_heads=1, page=64),
        "one key head": attend(64, 4096, 32, 1, page=64),
        "fp8": attend(64, 4096, stored=FP8),
        "int8": attend(64, 4096, page=64, stored="int8"),
        "fp8 head_dim 64": attend(64, 4096, 64, 8, 64, stored=FP8),
        "fp8 head_dim 256": attend(64, 1024, 16, 4, 256, stored=FP8),
    }
