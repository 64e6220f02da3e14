"""`grouped_matmul`, as kernels.py compiles it for an H200."""


def programs():
    """Returns, by name, a function and the shapes of its arguments; the first, x, is donated for nothing."""
    import jax
    import jax.numpy as jnp

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

    names = ["qwen3-next-up-t8", "gpt-oss-up-t8", "gpt-oss-down-t2048"]
    return {name: multiply(name) for name in names}
