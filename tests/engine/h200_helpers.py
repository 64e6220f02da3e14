"""Lowers the kernels of programs for an H200 in other processes and in this one: `python h200_helpers.py decode ...`.

It prints for each program the names of its kernels, each with whether the two are the same, or {"skipped": reason}. The
other processes have no GPU and are told of none; this one lowers for an H200 that is described to it.
"""

import dataclasses
import json
import os
import sys

from tests.engine import h200, h200_programs


def traced(name, lowering):
    """Returns the trace of a program for the described device."""
    import jax

    from jaxkv.programs.lowering import trace

    arguments = jax.tree.map(lambda array: h200.placed(array, 1), lowering.arguments)
    return trace(name, dataclasses.replace(lowering, arguments=arguments))


def are_the_same(trace):
    """Returns for each kernel of a trace its name, and whether another process makes the same one."""
    import jax
    from jax.extend.mlir import ir
    from jax.interpreters import mlir

    from pallas_kernels import lowering_helpers
    from pallas_kernels.deferred import instances

    def text(module):
        with mlir.make_ir_context():
            return str(ir.Module.parse(module))

    compiled = []
    lowering_helpers._KERNELS_EACH = 1
    lowering_helpers.LoweringHelpers._load = lambda self, answer: compiled.append(answer.compiled)
    found = instances(trace.jaxpr.jaxpr, ("cuda",))
    with lowering_helpers.LoweringHelpers(2) as helpers:
        helpers.request(trace, ("cuda",))
        theirs = [helpers._lowered[instance].result(60) for instance in found]
    # JAX 0.11 would compile them again.
    compiled = [one for one in compiled if one is not None]
    assert len(compiled) == (len(found) if jax.__version_info__[:2] >= (0, 12) else 0)
    assert sorted(one.operands for one in compiled) == sorted(len(one.operands) for one in found)
    # Another kernel of the same sizes would be equal here, and so would one that is not told from others.
    own = [text(instance.lowered()) for instance in found]
    assert len(set(own)) == len(own)
    return [
        (one.name, text(module) == here)
        for one, module, here in zip(found, theirs, own, strict=True)
    ]


def main(names):
    """Prints what is described above."""
    if not h200.has_plugin():
        print(json.dumps({"skipped": "needs jax-cuda13-plugin and jax-cuda13-pjrt"}))
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    import jax

    programs = h200_programs.lowerings()
    found = {}
    for name in names:
        lowering = programs[name]()
        with jax.default_device(h200.device()):
            found[name] = are_the_same(traced(name, lowering))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
