"""The kernels with recurrent states, as kernels.py compiles them for an H200."""

from tests.pallas_kernels.h200.writes import LAYERS, PAGES

ROWS, HEADS, HEAD_DIM, CHANNELS = 40, 8, 64, 4352


def causal_conv(packed, pools, weight, bias, x, ids, bounds, snapshots):
    from pallas_kernels.causal_conv import mosaic_gpu
    from pallas_kernels.causal_conv.arguments import ConvArrays

    tables = (bounds, *snapshots) if packed else ()
    calls = [ConvArrays(weight, bias, pool, x, *ids, *tables) for pool in pools]
    return [mosaic_gpu.causal_conv(call, first_channel=4096) for call in calls]


def ssd_update(pools, layer, xbc, dt, ids):
    from pallas_kernels.arguments.ssd import SsdArrays
    from pallas_kernels.ssd_update import mosaic_gpu

    return [mosaic_gpu.ssd_update(SsdArrays(*layer, pool, xbc, dt), *ids) for pool in pools]


def delta_update(pools, layer, qkv, gates, ids):
    from pallas_kernels.arguments.delta import DeltaArrays
    from pallas_kernels.delta_update import mosaic_gpu

    return [mosaic_gpu.delta_update(DeltaArrays(*layer, pool, qkv, *gates), *ids) for pool in pools]


def ssd_scan(pools, layer, xbc, dt, bounds, lengths, ids, snapshots):
    from pallas_kernels.arguments.ssd import SsdArrays
    from pallas_kernels.arguments.states import StateTables
    from pallas_kernels.ssd_scan import mosaic_gpu

    tables = StateTables(bounds, lengths, *ids, *snapshots)
    layers = [SsdArrays(*layer, pool, xbc, dt) for pool in pools]
    return [mosaic_gpu.ssd_scan(each, tables, chunk_size=256) for each in layers]


def delta_scan(pools, layer, qkv, gates, bounds, lengths, ids, snapshots):
    from pallas_kernels.arguments.delta import DeltaArrays
    from pallas_kernels.arguments.states import StateTables
    from pallas_kernels.delta_scan import mosaic_gpu

    tables = StateTables(bounds, lengths, *ids, *snapshots)
    layers = [DeltaArrays(*layer, pool, qkv, *gates) for pool in pools]
    return [mosaic_gpu.delta_scan(each, tables, chunk_size=64) for each in layers]


def programs():
    """Returns, by name, a function whose first argument is the donated pools, and its arguments."""
    from functools import partial

    import jax

    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    ints = partial(array, dtype="int32")
    floats = partial(array, dtype="float32")
    # Rows enough for two consumers in a block of the scan.
    ids, bounds, snapshots = (ints(ROWS), ints(ROWS)), ints(ROWS + 1), (ints(12), ints(12))
    layer = (floats(HEADS),) * 3

    def conv(tokens, packed):
        pools = [array(PAGES, 3, CHANNELS)] * LAYERS
        weight, bias, x = array(4, CHANNELS), array(CHANNELS), array(tokens, 2 * 4352)
        rows = ids if packed else (ints(tokens), ints(tokens))
        return partial(causal_conv, packed), (pools, weight, bias, x, rows, bounds, snapshots)

    def states(d_state, stored="float32"):
        wide = HEADS * HEAD_DIM + 2 * d_state
        return [array(PAGES, HEADS, HEAD_DIM, d_state, dtype=stored)] * LAYERS, wide

    def update(d_state, stored="float32"):
        pools, wide = states(d_state, stored)
        rows = (ints(64), ints(64))
        return ssd_update, (pools, layer, array(64, wide), array(64, HEADS), rows)

    def scan(d_state, dtype="bfloat16"):
        pools, wide = states(d_state)
        inputs = (array(4096, wide, dtype=dtype), array(4096, HEADS, dtype=dtype))
        return ssd_scan, (pools, layer, *inputs, bounds, ints(ROWS), ids, snapshots)

    def delta(tokens, stored="float32"):
        pools = [array(PAGES, HEADS, 128, 128, dtype=stored)] * LAYERS
        inputs = (array(tokens, 2 * 4 * 128 + HEADS * 128), (array(tokens, HEADS),) * 2)
        return pools, layer[:2], *inputs

    return {
        "causal_conv": conv(4096, True),
        "causal_conv one token each": conv(64, False),
        "ssd_update": update(128),
        "ssd_update bfloat16": update(128, "bfloat16"),
        "ssd_update 256": update(256),
        "delta_update": (delta_update, (*delta(64), (ints(64), ints(64)))),
        "delta_update bfloat16": (delta_update, (*delta(64, "bfloat16"), (ints(64), ints(64)))),
        "delta_scan": (delta_scan, (*delta(4096), bounds, ints(ROWS), ids, snapshots)),
        "ssd_scan": scan(128),
        "ssd_scan 256": scan(256),
        "ssd_scan float16": scan(128, "float16"),
    }
