"""Compiles `skinny_matmul` for an H200 on a machine without a GPU and prints what became of it, as JSON.

Run as a program, like h200_writes.py, whose reports it prints.
"""

from functools import partial

from tests.pallas_kernels.h200_writes import main


def programs():
    """Returns, by name, a function and the shapes of its arguments; x, the first, is donated for nothing."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.skinny_matmul import mosaic_gpu
    from pallas_kernels.skinny_matmul.cases import CASES
    from pallas_kernels.skinny_matmul.mosaic_tail import Norms, layer_tail

    cases = {case.name: case for case in CASES}

    def multiply(name):
        case = cases[name]
        shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        weights = case.out * (2 if case.gated else 1)
        arrays = shape((case.rows, case.inner)), shape((weights, case.inner))
        extras = (shape((case.rows, case.out)),) if case.has_residual else ()
        options = {
            "activation": case.activation,
            "gated": case.gated,
            "result": case.result,
        }

        def run(x, weight, *residual):
            found = dict(zip(("residual",), residual, strict=False))
            return mosaic_gpu.skinny_matmul(weight, x, **found, **options)

        return run, (*arrays, *extras)

    def tail():
        shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        sizes = {"o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
        sizes |= {"qkv": (6144, 4096), "norms": (2, 4096), "next_norms": (2, 4096)}
        weights = {name: shape(size) for name, size in sizes.items()}
        rows, met = shape((8, 4096)), jax.ShapeDtypeStruct((1,), jnp.int32)
        run = partial(layer_tail, activation="silu", norms=Norms(1, 0, 1e-5))
        return lambda x, *others: run(x, *others), (rows, rows, weights, met)

    names = [f"8b-{product}-b{rows}" for product in ("o", "gate-up", "logits") for rows in (1, 64)]
    names += ["0.6b-down-b8", "70b-tp4-qkv-b16"]
    return {name: multiply(name) for name in names} | {"tail": tail()}


if __name__ == "__main__":
    main(programs)
