"""`grouped_matmul` and `gathered_matmul`, as kernels.py compiles them for an H200."""

from functools import partial


def programs():
    """Returns, by name, a function and the shapes of its arguments; the first, x, is donated for nothing."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.fixed_order import fixed_order
    from pallas_kernels.formats.few_bits import CODES, FewBits
    from pallas_kernels.gathered_matmul import mosaic_gpu as gathered_matmul
    from pallas_kernels.gathered_matmul.epilogue import SUMS, Epilogue
    from pallas_kernels.grouped_matmul import mosaic_gpu
    from pallas_kernels.grouped_matmul.cases import CASES
    from tests.pallas_kernels.few_bits import KINDS

    cases = {case.name: case for case in CASES}

    def multiply(name):
        case = cases[name]
        weight = jax.ShapeDtypeStruct(case.weight_shape, jnp.bfloat16)
        x = jax.ShapeDtypeStruct((case.rows, case.inner), jnp.bfloat16)
        sizes = jax.ShapeDtypeStruct((case.groups,), jnp.int32)

        def run(x, weight, sizes):
            # XLA makes no graph of fewer than five kernels.
            return [
                mosaic_gpu.grouped_matmul(
                    weight, x, shared, group_axis=case.group_axis, result=case.result
                )
                for shared in (sizes, sizes[::-1], jnp.roll(sizes, 1))
            ]

        return run, (x, weight, sizes)

    def in_few_bits(name, kind):
        case, (code, group, dtype, has_zeros) = cases[name], KINDS[kind]
        lead = case.weight_shape[:2]
        stored = case.inner * CODES[code].bits // 8
        codes = jax.ShapeDtypeStruct((*lead, stored), CODES[code].stored)
        scales = jax.ShapeDtypeStruct((*lead, case.inner // group), jnp.dtype(dtype))
        zeros = jax.ShapeDtypeStruct(scales.shape, jnp.uint8) if has_zeros else None
        run, (x, _, sizes) = multiply(name)
        return run, (x, FewBits(codes, scales, zeros, None, code), sizes)

    def in_fixed_order(name):
        run, arguments = multiply(name)

        def run_in_order(*arrays):
            with fixed_order():
                return run(*arrays)

        return run_in_order, arguments

    def gathered(kind, epilogue=SUMS):
        name = "qwen3-next-up-t8"
        _, (_, weight, _) = in_few_bits(name, kind) if kind in KINDS else multiply(name)
        x = jax.ShapeDtypeStruct((8, weight.shape[-1]), jnp.bfloat16)
        chosen = jax.ShapeDtypeStruct((8, 10), jnp.int32)
        biases = (jax.ShapeDtypeStruct(weight.shape[:2], jnp.bfloat16),) if epilogue.clamp else ()

        def run(x, weight, chosen, *biases):
            run = partial(gathered_matmul.gathered_matmul, epilogue=epilogue)
            return [run(weight, x, chosen + n, *biases) for n in range(5)]

        return run, (x, weight, chosen, *biases)

    names = ["qwen3-next-up-t8", "gpt-oss-up-t8", "gpt-oss-down-t2048"]
    kinds = {
        "gpt-oss-up-t8": ("mxfp4",),
        "gpt-oss-down-t2048": ("mxfp4",),
        "qwen3-next-up-t8": ("int4 by 64, zeros", "e4m3 by 128"),
        "qwen3-next-down-t2048": ("int4 by 64, zeros", "e4m3 by 128"),
    }
    few = {
        f"{name} {kind}": in_few_bits(name, kind) for name, many in kinds.items() for kind in many
    }
    ordered = {f"{name} in a fixed order": in_fixed_order(name) for name in names[2:]}
    apart = {
        f"gathered {kind}": gathered(kind)
        for kind in ("16 bits", "e4m3 by 128", "int8 by 32", "int4 by 64, zeros", "mxfp4")
    }
    narrow = {"gated": True, "result": jnp.dtype(jnp.bfloat16)}
    gates = {
        "silu gate": Epilogue("silu", **narrow),
        "gelu_tanh gate": Epilogue("gelu_tanh", **narrow),
        "clamped gate": Epilogue(clamp=7.0, **narrow),
        "relu2": Epilogue("relu2", result=jnp.dtype(jnp.float16)),
    }
    ended = {
        f"gathered e4m3 by 128, {name}": gathered("e4m3 by 128", end) for name, end in gates.items()
    }

    def added(kind):
        name = "qwen3-next-down-t2048"
        _, (_, weight, _) = in_few_bits(name, kind) if kind in KINDS else multiply(name)
        x = jax.ShapeDtypeStruct((10, weight.shape[-1]), jnp.bfloat16)
        chosen = jax.ShapeDtypeStruct((1, 10), jnp.int32)
        weights = jax.ShapeDtypeStruct((1, 10), jnp.float32)

        def run(x, weight, chosen, weights):
            run = partial(gathered_matmul.gathered_matmul, group_axis=1, weights=weights)
            return [run(weight, x, chosen + n) for n in range(5)]

        return run, (x, weight, chosen, weights)

    ended |= {
        f"gathered and added, {kind}": added(kind)
        for kind in ("16 bits", "e4m3 by 128", "int4 by 64, zeros")
    }
    return {name: multiply(name) for name in names} | few | ordered | apart | ended
