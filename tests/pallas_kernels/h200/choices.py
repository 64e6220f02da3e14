"""The kernels that choose keys, tokens and experts, as kernels.py compiles them for an H200.

Their first argument is the pool that must not be copied.
"""

from functools import partial

from tests.pallas_kernels.h200.writes import PAGES


def choose(topk, tokens_of_rows, pages, q, weights, table, seq_lens):
    from pallas_kernels.index_topk import mosaic_gpu
    from pallas_kernels.index_topk.arguments import IndexArrays

    bounds = None if tokens_of_rows is None else seq_lens[: len(seq_lens) // 2 + 1]
    rows = seq_lens if bounds is None else seq_lens[: len(bounds) - 1]
    layers = [
        mosaic_gpu.index_topk(
            IndexArrays(q, weights, pages, table, rows + layer, bounds), topk=topk
        )
        for layer in range(6)
    ]
    return pages, layers


def bound(logits, top_k, top_p, min_p, temperature):
    from pallas_kernels.filter_bounds import mosaic_gpu

    arrays = (top_p, min_p, temperature)
    return logits, [mosaic_gpu.filter_bounds(logits, top_k + layer, *arrays) for layer in range(6)]


def route(count, x, scores):
    from pallas_kernels.group_rows import mosaic_gpu as group_rows
    from pallas_kernels.grouped_matmul.mosaic_schedule import Geometry, Schedule
    from pallas_kernels.grouped_matmul.mosaic_visits import table
    from pallas_kernels.row_topk import mosaic_gpu as row_topk

    groups = scores.shape[1]
    geometry = Geometry(count * len(x), groups, 1024, x.shape[1], 0, x.dtype, x.dtype)
    layers = []
    # XLA makes no graph of fewer than five kernels.
    for layer in range(2):
        _, chosen = row_topk.row_topk(scores + layer, count=count, softmax=layer == 1)
        *found, sizes = group_rows.group_rows(x, chosen, groups=groups)
        layers.append((found, table(sizes, geometry, Schedule.by_rule(geometry))))
    return x, layers


def programs():
    """Returns, by name, a function whose first argument is donated, and its arguments."""
    import jax

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    def topk(tokens, width, dtype, packed=None):
        pool = array("uint8", PAGES, 64, 132)
        q, weights = array(dtype, tokens, 64, 128), array("float32", tokens, 64)
        rows = tokens if packed is None else packed
        lengths = array("int32", rows if packed is None else 2 * rows)
        arguments = (pool, q, weights, array("int32", rows, width), lengths)
        return partial(choose, 2048, packed), arguments

    def bounds(rows, vocab):
        floats = [array("float32", rows)] * 3
        return bound, (array("float32", rows, vocab), array("int32", rows), *floats)

    return {
        "index_topk": topk(32, 512, "float8_e4m3fn"),
        "index_topk 131072": topk(32, 2048, "float8_e4m3fn"),
        "index_topk packed": topk(256, 64, "float8_e4m3fn", packed=3),
        "filter_bounds": bounds(64, 128256),
        "row_topk and group_rows": (
            partial(route, 10),
            (array("bfloat16", 64, 2048), array("float32", 64, 512)),
        ),
        "row_topk and group_rows, most": (
            partial(route, 16),
            (array("bfloat16", 8192, 16376), array("float32", 8192, 1024)),
        ),
    }
