"""`grouped_matmul`, as kernels.py compiles it for an H200."""


def programs():
    """Returns, by name, a function and the shapes of its arguments; the first, x, is donated for nothing."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.fixed_order import fixed_order
    from pallas_kernels.formats.few_bits import FewBits
    from pallas_kernels.grouped_matmul import mosaic_gpu
    from pallas_kernels.grouped_matmul.cases import CASES

    cases = {case.name: case for case in CASES}

    def multiply(name):
        case = cases[name]
        weight = jax.ShapeDtypeStruct(case.weight_shape, jnp.bfloat16)
        x = jax.ShapeDtypeStruct((case.rows, case.inner), jnp.bfloat16)
        sizes = jax.ShapeDtypeStruct((case.groups,), jnp.int32)

        def run(x, weight, sizes):
            return mosaic_gpu.grouped_matmul(
                weight, x, sizes, group_axis=case.group_axis, result=case.result
            )

        return run, (x, weight, sizes)

    def in_mxfp4(name):
        case = cases[name]
        lead = case.weight_shape[:2]
        codes = jax.ShapeDtypeStruct((*lead, case.inner // 2), jnp.uint8)
        scales = jax.ShapeDtypeStruct((*lead, case.inner // 32), jnp.float8_e8m0fnu)
        run, (x, _, sizes) = multiply(name)
        return run, (x, FewBits(codes, scales, None, None, "float4_e2m1fn"), sizes)

    def in_fixed_order(name):
        run, arguments = multiply(name)

        def run_in_order(*arrays):
            with fixed_order():
                return run(*arrays)

        return run_in_order, arguments

    names = ["qwen3-next-up-t8", "gpt-oss-up-t8", "gpt-oss-down-t2048"]
    few = {f"{name} mxfp4": in_mxfp4(name) for name in ("gpt-oss-up-t8", "gpt-oss-down-t2048")}
    ordered = {f"{name} in a fixed order": in_fixed_order(name) for name in names[2:]}
    return {name: multiply(name) for name in names} | few | ordered
