"""CPU seconds that tracing and lowering the programs of a warm-up take for an H200, without one.

    python -m tests.engine.h200_start llama-3.1-8b

It prints for each program the seconds of its trace, of its name in the store, and of its lowering, first of greedy
steps, then of the same ones with random draws. Nothing is compiled.
"""

import argparse
import dataclasses
import os
import time
from itertools import pairwise

from tests.engine import h200

LONGEST, ROWS, TOKEN_BUDGET = 4096, 256, 2048


def warmed_up(shape):
    """Returns the runner of a model of `SHAPES`, with a cache of a few pages, and the shapes of its steps."""
    from jaxkv.bench.shapes import SHAPES
    from jaxkv.runner.step_shapes import COARSE, StepShapes

    config = SHAPES[shape]
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    h200.WIDTH = LONGEST // h200.PAGE_SIZE
    layers = fields.pop("num_layers")
    made = h200.sequence_runner("mosaic_gpu", pages=16, rows=ROWS, layers=layers, **fields)
    shapes = StepShapes(
        made.runner.layout,
        max_tokens=LONGEST,
        max_rows=ROWS,
        token_budget=TOKEN_BUDGET,
        whole_prompts=False,
        grain=COARSE,
    )
    return made.runner, shapes


def seconds_of(name, lowering):
    """Returns the CPU seconds of one program's trace, name and lowering."""
    import jax

    from jaxkv.programs.fingerprint import name_traced
    from jaxkv.programs.lowering import argument_types, trace
    from pallas_kernels.lowering import quick_lowering

    times = [time.process_time()]
    traced = trace(name, lowering)
    times.append(time.process_time())
    # The described device belongs to no client that could tell its versions.
    name_traced(name, traced, argument_types(lowering), jax.devices()[:1], {})
    times.append(time.process_time())
    with quick_lowering():
        traced.lower(lowering_platforms=("cuda",))
    times.append(time.process_time())
    return [after - before for before, after in pairwise(times)]


def main():
    """Prints the seconds of each program, and of all together."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", nargs="?", default="llama-3.1-8b")
    options = parser.parse_args()
    if not h200.has_plugin():
        parser.error("needs jax-cuda13-plugin and jax-cuda13-pjrt, which describe an H200")
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    import jax

    from jaxkv.memory import without_garbage_collection
    from jaxkv.sampling.features import Features

    runner, shapes = warmed_up(options.shape)
    for features in (Features(), Features(draws=True)):
        specs, total = shapes.declare_all(features), [0.0, 0.0, 0.0]
        with jax.default_device(h200.device()), without_garbage_collection():
            for spec in specs:
                lowering = runner.program(spec)
                arguments = jax.tree.map(lambda array: h200.placed(array, 1), lowering.arguments)
                found = seconds_of(spec.name, dataclasses.replace(lowering, arguments=arguments))
                total = [sum(pair) for pair in zip(total, found, strict=True)]
                print(
                    f"{spec.name:24s} trace {found[0]:6.2f}  name {found[1]:6.2f}  lower {found[2]:6.2f}"
                )
        print(
            f"{len(specs)} programs, {features}: trace {total[0]:.1f}  name {total[1]:.1f}  lower {total[2]:.1f}  "
            f"sum {sum(total):.1f} s"
        )


if __name__ == "__main__":
    main()
