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

    def with_ahead(name, following):
        _, arrays = multiply(name)
        ahead = multiply(following)[1][1]
        gated = cases[following].gated

        def run_ahead(x, weight, ahead):
            return mosaic_gpu.skinny_matmul(weight, x, ahead=ahead, ahead_gated=gated)

        return run_ahead, (*arrays[:2], ahead)

    names = [f"8b-{product}-b{rows}" for product in ("o", "gate-up", "logits") for rows in (1, 64)]
    names += ["0.6b-down-b8", "70b-tp4-qkv-b16"]
    return {name: multiply(name) for name in names} | {
        "8b-o-b8, ahead": with_ahead("8b-o-b8", "8b-gate-up-b8"),
        "8b-o-b64, ahead": with_ahead("8b-o-b64", "8b-gate-up-b64"),
    }


if __name__ == "__main__":
    main(programs)
