"""`skinny_matmul`, as kernels.py compiles it for an H200."""

from functools import partial


def programs():
    """Returns, by name, a function and the shapes of its arguments; x, the first, is donated for nothing."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.fixed_order import fixed_order
    from pallas_kernels.formats.few_bits import CODES, FewBits
    from pallas_kernels.skinny_matmul import mosaic_gpu
    from pallas_kernels.skinny_matmul.arguments import MatmulArrays, MatmulOptions
    from pallas_kernels.skinny_matmul.cases import CASES
    from tests.pallas_kernels.few_bits import KINDS

    cases = {case.name: case for case in CASES}

    def multiply(name, rows=None):
        case = cases[name]
        count = rows or case.rows
        shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        weights = case.out * (2 if case.gated else 1)
        arrays = shape((count, case.inner)), shape((weights, case.inner))
        extras = (shape((count, case.out)),) if case.has_residual else ()
        options = MatmulOptions(case.activation, case.gated, result=case.result)

        def run(x, weight, residual=None):
            return mosaic_gpu.skinny_matmul(MatmulArrays(weight, x, residual=residual), options)

        return run, (*arrays, *extras)

    def in_fixed_order(name, rows):
        """Returns the product of any number of rows between two norms, under the fixed order of sums.

        Norms of few rows are in float32.
        """
        _, (x, weight, *residual) = multiply(name, rows)
        case = cases[name]
        squares = jax.ShapeDtypeStruct((64, rows), jnp.float32)
        norms = jax.ShapeDtypeStruct((2, case.out), jnp.bfloat16 if rows > 64 else jnp.float32)

        def run(x, weight, squares, norms, residual=None):
            after = norms if case.has_residual else None
            arrays = MatmulArrays(weight, x, residual=residual, squares=squares, next_norm=after)
            options = MatmulOptions(case.activation, case.gated, norm_eps=1e-6, norm_row=1)
            with fixed_order():
                return mosaic_gpu.skinny_matmul(arrays, options)

        return run, (x, weight, squares, norms, *residual)

    def in_few_bits(name, kind, rows=None):
        """Returns the product with a weight in 8 or 4 bits; "rows too" rounds those of x."""
        kind, *rounds = kind.split(", rows ")
        case, (code, group, scales, has_zeros) = cases[name], KINDS[kind]
        weights = case.out * (2 if case.gated else 1)
        groups = case.inner // (group or case.inner)
        shape = partial(jax.ShapeDtypeStruct, (weights, groups))
        octets = case.inner * CODES[code].bits // 8
        weight = FewBits(
            jax.ShapeDtypeStruct((weights, octets), CODES[code].stored),
            shape(jnp.dtype(scales)),
            shape(jnp.uint8) if has_zeros else None,
            None,
            code,
            rounds_rows=bool(rounds),
        )
        x = jax.ShapeDtypeStruct((rows or case.rows, case.inner), jnp.bfloat16)
        options = MatmulOptions(case.activation, case.gated)
        return lambda x, weight: mosaic_gpu.skinny_matmul(MatmulArrays(weight, x), options), (
            x,
            weight,
        )

    products = ("o", "gate-up", "down", "logits")
    names = [f"8b-{product}-b{rows}" for product in products for rows in (1, 64)]
    names += ["0.6b-down-b8", "70b-tp4-qkv-b16"]
    # Eight rows at a time, and halves of a cluster that end unequal numbers of rows.
    odd = {f"8b-{product}-b64": 37 for product in ("gate-up", "down")}
    uneven = {f"{name}, {rows} rows": multiply(name, rows) for name, rows in odd.items()}
    ordered = {
        f"8b-{product}, {rows} rows in a fixed order": in_fixed_order(f"8b-{product}-b64", rows)
        for product, rows in (("o", 1), ("o", 300), ("gate-up", 300), ("down", 2048))
    }
    few = {
        f"{name} {kind}": in_few_bits(name, kind)
        for name, kind in (
            ("8b-gate-up-b1", "e4m3 by row"),
            ("8b-o-b16", "e4m3 by 128"),
            ("8b-down-b64", "int8 by row"),
            ("8b-down-b64", "int4 by 128"),
            ("8b-gate-up-b64", "int4 by 128, zeros"),
            ("8b-o-b1", "int4 by 32"),
            ("8b-o-b16", "mxfp4"),
        )
    }
    many = {
        f"{name} {kind}, {rows} rows": in_few_bits(name, kind, rows)
        for name, kind, rows in (
            ("8b-down-b64", "e4m3 by row", 2048),
            ("8b-gate-up-b64", "e4m3 by row, rows too", 2048),
            ("8b-down-b64", "int8 by 32", 320),
            ("8b-gate-up-b64", "int4 by 128, zeros", 2048),
            ("8b-o-b64", "mxfp4", 96),
        )
    }
    return {name: multiply(name) for name in names} | uneven | ordered | few | many
