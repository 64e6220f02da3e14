"""The writing kernels, `page_write` and `rotary_write`, as kernels.py compiles them for an H200."""

from functools import partial

LAYERS = 6  # as many kernels as XLA wants to see before it makes a graph
PAGES, PAGE_SIZE = 2**16 + 1, 64


def page_write(tokens, dtype, pools, values, slots):
    from pallas_kernels.page_write import mosaic_gpu

    return [mosaic_gpu.page_write(pool, values, slots) for pool in pools]


def rotary_write(norm, pools, qkv, cos, sin, slots, weights):
    from pallas_kernels.rotary_write import mosaic_gpu
    from pallas_kernels.rotary_write.arguments import RotaryArrays

    rest = (qkv, cos, sin, slots, weights if norm else None)
    return [mosaic_gpu.rotary_write(RotaryArrays(pool, *rest)) for pool in pools]


def programs():
    """Returns, by name, a function whose first argument is the donated pools, and its arguments."""
    import jax

    def arrays(lead, dtype, kv_heads, head_dim):
        shapes = [((kv_heads, head_dim), dtype)] * 2
        shapes += [((kv_heads,), "float32")] * 2 if dtype != "bfloat16" else []
        return tuple(jax.ShapeDtypeStruct((*lead, *shape), of) for shape, of in shapes)

    def write(tokens, dtype="bfloat16"):
        pools = [arrays((PAGES, PAGE_SIZE), dtype, 8, 128)] * LAYERS
        slots = jax.ShapeDtypeStruct((tokens,), "int32")
        return partial(page_write, tokens, dtype), (pools, arrays((tokens,), dtype, 8, 128), slots)

    def rotate(tokens, dtype="bfloat16", heads=32, kv_heads=8, head_dim=128, half=64, norm=False):
        pools = [arrays((PAGES, PAGE_SIZE), dtype, kv_heads, head_dim)] * LAYERS
        qkv = jax.ShapeDtypeStruct((tokens, heads + 2 * kv_heads, head_dim), "bfloat16")
        angle = jax.ShapeDtypeStruct((tokens, half), "float32")
        slots = jax.ShapeDtypeStruct((tokens,), "int32")
        weights = jax.ShapeDtypeStruct((2, head_dim), "bfloat16")
        return partial(rotary_write, norm), (pools, qkv, angle, angle, slots, weights)

    return {
        "page_write": write(64),
        "page_write many": write(8192),
        "page_write fp8": write(64, "float8_e4m3fn"),
        "rotary_write": rotate(1),
        "rotary_write many": rotate(8192),
        "rotary_write norm int8": rotate(64, "int8", norm=True),
        "rotary_write 64 heads": rotate(64, "float8_e4m3fn", heads=64, norm=True),
        "rotary_write 256 wide": rotate(8, "int8", 8, 1, 256, 128, norm=True),
        "rotary_write odd": rotate(8, "float8_e4m3fn", 15, 5, 80, 40, norm=True),
    }
