"""Chains of `peer_sum`, as kernels.py compiles them for one of several H200s."""

LAYERS = 6  # as many kernels as XLA wants to see before it makes a graph


def chain(part, peers):
    from pallas_kernels.peer_sum.api import peer_sum

    for _ in range(LAYERS):
        part = peer_sum(part, peers)
    return part


def joined_chain(hidden, peers, norms):
    from pallas_kernels.peer_sum.api import peer_sum_weighed

    weighed, totals = hidden, []
    for row in range(LAYERS):
        given = {"residual": hidden, "norms": norms, "norm_row": row % 2}
        hidden, weighed, squares = peer_sum_weighed(weighed, peers, **given)
        totals.append(squares)
    return hidden, weighed, totals


def programs():
    """Returns, by name, a function and its arguments, the first of which is donated."""
    import jax

    from pallas_kernels.peer_sum.api import peers_shape

    def sums(devices, rows, width, dtype="bfloat16", *, joins=False):
        part = jax.ShapeDtypeStruct((rows, width), dtype)
        peers = jax.ShapeDtypeStruct((1, peers_shape(devices)[1]), "int32")
        norms = jax.ShapeDtypeStruct((2, width), dtype)
        return (joined_chain, (part, peers, norms)) if joins else (chain, (part, peers))

    return {
        "2 devices, 1 row": sums(2, 1, 4096),
        "2 devices, 64 rows": sums(2, 64, 8192),
        "2 devices, 64 rows joined": sums(2, 64, 8192, joins=True),
        "2 devices, 512 rows": sums(2, 512, 4096),
        "4 devices, 64 rows joined": sums(4, 64, 8192, joins=True),
        "8 devices, 3 rows joined, float32": sums(8, 3, 4096, "float32", joins=True),
        "8 devices, 256 rows, float16": sums(8, 256, 8192, "float16"),
    }
