"""The engine's programs of a small Llama, and what compiles programs for an H200 on a machine without a GPU.

`h200_programs.py` runs it. It prints the properties of each program as JSON, or {"skipped": reason} where JAX's CUDA
plugin is not installed. Nothing is executed.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from tests.programs.command_buffers import read_command_buffers

# The programs whose names on disk are reported too, each of which takes another trace.
STORED = ("decode_best", "hybrid_experts_decode_mosaic_gpu")
ROWS, PAGES, PAGE_SIZE, WIDTH, LAYERS, DEEP = 8, 128, 64, 8, 2, 4


def sequence_runner(
    implementation,
    pages=PAGES,
    rows=ROWS,
    layers=LAYERS,
    *,
    devices=1,
    mailboxes=False,
    keeps_outputs=False,
    cache_dtype="bfloat16",
    logits_processors=None,
    drafts=0,
    of=lambda decoder: decoder,
    **changes,
):
    """Returns an engine for a small Llama that hands out what it would have compiled; its cache lies on the host.

    `changes` are fields of its config that make another model of it; with `keeps_outputs` it may answer full hits.
    Several `devices` compute the model together, with sums of ours if they have `mailboxes`.
    `logits_processors` are those of an `LLM`, and `drafts` those that the device makes itself. `of` makes another model
    of the decoder.

    The host would choose "xla", so the model is told what to run after the engine was made.
    """
    from jaxkv.cache.spec import LayerSpec, group_layers
    from jaxkv.cache.variants import outputs, sampling
    from jaxkv.config.model import ModelConfig, RopeConfig
    from jaxkv.models.registry import build_model
    from jaxkv.models.tensor_parallel import TensorParallel, tensor_mesh
    from jaxkv.runner.model_runner import ModelRunner
    from jaxkv.runner.sequence_runner import SequenceRunner
    from jaxkv.sampling.register_processors import register_processors

    class Recorder:
        def get(self, key, build):
            return build()

    llama = {
        "family": "llama",
        "vocab_size": 4096,
        "hidden_size": 1024,
        "num_layers": layers,
        "heads": 16,
        "kv_heads": 4,
        "head_dim": 128,
        "ffn_size": 2048,
        "max_positions": 4096,
        "rope": RopeConfig(rotary_dim=128),
        "windows": (None,) * layers,
    }
    config = ModelConfig(**(llama | changes))
    whole = of(build_model(config))
    model = whole if devices == 1 else TensorParallel(whole, tensor_mesh(devices))
    specs = model.cache_specs(page_size=PAGE_SIZE, dtype=cache_dtype)
    longest = WIDTH * PAGE_SIZE
    processors = register_processors(
        logits_processors, vocab_size=config.vocab_size, max_tokens=longest
    )
    choices = sampling(
        config.vocab_size,
        penalties=True,
        bias_entries=8,
        history_tokens=longest,
        processor_words=processors.num_words,
        drafts=drafts,
    )
    specs = [*specs, LayerSpec(layers, choices)]
    if keeps_outputs:
        specs.append(LayerSpec(layers, outputs(config.hidden_size, dtype="bfloat16")))
    layout = group_layers(specs)
    counts = {group.name: pages if group.unit == "page" else rows + 1 for group in layout.groups}
    made = SequenceRunner(
        ModelRunner(model, model.param_shapes("bfloat16"), layout, counts, Recorder(), processors),
        max_tokens=longest,
        max_rows=rows,
    )
    made.runner.model = model.running(implementation)
    if devices > 1:
        made.runner.model = TensorParallel(whole.running(implementation), mesh(devices))
    if mailboxes:
        give_peers(made.runner.owner, devices)
    return made


def give_peers(owner, devices):
    """Gives a cache on the host the table that GPUs would have, of which only the type counts."""
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxkv.models.tensor_parallel import AXIS, tensor_mesh
    from pallas_kernels.peer_sum.api import peers_shape

    place = NamedSharding(tensor_mesh(devices), PartitionSpec(AXIS))
    peers = jnp.zeros(peers_shape(devices), jnp.int32, device=place)
    owner.put(dataclasses.replace(owner.take(), peers=peers))


def lowerings():
    """Returns, by name, functions that describe what to compile; those after `one_page` are bad on purpose."""
    import jax
    import jax.numpy as jnp

    from jaxkv.config.lora import LoraConfig
    from jaxkv.models.draft_heads.head import DraftHead
    from jaxkv.programs.manifest import Lowering
    from jaxkv.runner.adapter_stacks import AdapterStacks
    from jaxkv.runner.cache_programs import AdmitSpec, CopySpec
    from jaxkv.runner.draft_programs import CatchUpSpec, DraftSpec, HiddenPool, PutDraftsSpec
    from jaxkv.runner.program_specs import StepSpec
    from jaxkv.sampling.features import Features
    from jaxkv.step.text_drafter import NgramLookup
    from tests.sampling.processors import FUNCTIONS

    chosen = Features(
        draws=True, filters=True, penalties=True, min_tokens=True, grammar=True, logprobs=5
    )
    step = StepSpec(tokens=ROWS, rows=ROWS, table_widths=(WIDTH,), decode=True)
    many = StepSpec(tokens=64, rows=64, table_widths=(WIDTH,), decode=True)
    sharing = dataclasses.replace(many, shares=True)
    drawn = dataclasses.replace(step, features=Features(draws=True, filters=True))
    processed = dataclasses.replace(step, features=Features(draws=True, processors=True))
    adapted = dataclasses.replace(step, features=Features(lora=True))
    weighed = dataclasses.replace(step, features=dataclasses.replace(chosen, grammar=False))
    forward = dataclasses.replace(step, forward_only=True)
    several = dataclasses.replace(step, steps=4)
    mixed = StepSpec(tokens=512, rows=ROWS, table_widths=(WIDTH,))
    prompt = StepSpec(tokens=128, rows=ROWS, table_widths=(WIDTH,))
    verify = StepSpec(tokens=64, rows=ROWS, table_widths=(WIDTH,), drafts=4)
    alone = StepSpec(tokens=1, rows=1, table_widths=(1,), decode=True)
    decode = sequence_runner("xla", layers=1).runner.program(step)

    def processing(*arguments, **changes):
        return sequence_runner(*arguments, **changes, logits_processors=FUNCTIONS).runner

    def adapting(*arguments, **changes):
        runner = sequence_runner(*arguments, **changes).runner
        runner.adapters = AdapterStacks(
            runner.model, LoraConfig(max_adapters=2, max_rank=16), "bfloat16"
        )
        return runner

    def invariant(spec):
        made = sequence_runner("mosaic_gpu", layers=1).runner
        made.model = dataclasses.replace(made.model, batch_invariant=True)
        return made.program(spec)

    def keeping(spec):
        """Returns a step of a model that keeps three hidden states of each token, in a second group of pages."""
        several = dataclasses.replace(spec, table_widths=(WIDTH, WIDTH))
        reads = functools.partial(dataclasses.replace, keeps_hidden=(0, 1, 2))
        return sequence_runner("mosaic_gpu", layers=1, of=reads).runner.program(several)

    def heading(spec):
        """Returns a program of an EAGLE-3 head."""
        head = functools.partial(
            DraftHead, reads=(0, 1, 2), read_size=3 * 1024, is_mtp=False, draft_vocab=1024
        )
        pattern = {"pattern": (("eagle_attention", "gated"),)}
        return sequence_runner("mosaic_gpu", layers=1, of=head, **pattern).runner.program(spec)

    kept, texts = HiddenPool(PAGES, PAGE_SIZE, 3 * 1024, "bfloat16"), (ROWS + 1, WIDTH * PAGE_SIZE)

    def swapped(params, cache, *packed):
        cache, out = decode.function(params, cache, *packed)
        layer = cache.layer(0)
        return cache.with_layer(0, {"key": layer["value"], "value": layer["key"]}), out

    def read_late(params, cache, *packed):
        before = cache.layer(0)["key"]
        cache, out = decode.function(params, cache, *packed)
        # The tokens decide which of the old pages are read, so they must outlive the new ones.
        return cache, (out, before[out[:, 0] % PAGES])

    def scanned():
        """One step of a model whose layers are stacked and scanned, with the cache as the scan's xs and ys."""

        def run(weights, cache, hidden, slots):
            def layer(hidden, weights_and_cache):
                weight, pool = weights_and_cache
                pool = pool.at[slots].set(hidden, mode="drop", unique_indices=True)
                return jnp.tanh(pool[slots] @ weight), pool

            hidden, cache = jax.lax.scan(layer, hidden, (weights, cache))
            return cache, hidden

        shapes = (LAYERS, 512, 512), (LAYERS, 8192, 512), (ROWS, 512)
        arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        return Lowering(run, (*arguments, jax.ShapeDtypeStruct((ROWS,), jnp.int32)))

    return {
        "decode": lambda: decode,
        "decode_best": lambda: sequence_runner("mosaic_gpu", layers=DEEP).runner.program(step),
        "generate": lambda: generated(sequence_runner("mosaic_gpu", layers=1), prompt),
        # The loop alone; `generate` has kernels. Prompts of one token have the step of those after it.
        "generate_short": lambda: generated(sequence_runner("xla", layers=1), step),
        "decode_64_rows": lambda: sequence_runner("mosaic_gpu", rows=64).runner.program(many),
        "decode_sharing": lambda: sequence_runner("mosaic_gpu", rows=64).runner.program(sharing),
        "multi_step_sharing": lambda: sequence_runner("mosaic_gpu", rows=64).runner.program(
            dataclasses.replace(sharing, steps=4)
        ),
        "decode_drawn": lambda: sequence_runner("mosaic_gpu", layers=1).runner.program(drawn),
        "decode_weighed": lambda: sequence_runner("mosaic_gpu", layers=1).runner.program(weighed),
        # The two programs of a step that has rows with a grammar.
        "forward": lambda: sequence_runner("mosaic_gpu", layers=1).runner.program(forward),
        "sample": lambda: sampling(sequence_runner("mosaic_gpu", layers=1), chosen),
        "decode_processed": lambda: processing("mosaic_gpu", layers=1).program(processed),
        "multi_step_processed": lambda: processing("mosaic_gpu", layers=1).program(
            dataclasses.replace(processed, steps=4)
        ),
        "readmit_processed": lambda: processing("xla").program(AdmitSpec(1, 64, returning=True)),
        "decode_adapted": lambda: adapting("mosaic_gpu", layers=1).program(adapted),
        # The loop is the same around kernels, which lengthen the compile; `multi_step_processed` has them.
        "multi_step": lambda: sequence_runner("xla", layers=1).runner.program(several),
        "prefill": lambda: sequence_runner("mosaic_gpu").runner.program(mixed),
        "prefill_invariant": lambda: invariant(mixed),
        "verify": lambda: sequence_runner("mosaic_gpu", layers=1).runner.program(verify),
        "verify_weighed": lambda: processing("mosaic_gpu", layers=1).program(
            dataclasses.replace(
                verify, features=dataclasses.replace(chosen, processors=True), masks=4
            )
        ),
        # The drafts of the next step are made in it, and those before are taken from the device.
        "verify_followed": lambda: sequence_runner("mosaic_gpu", layers=1, drafts=4).runner.program(
            # Kernels run on few tokens too, which make fewer drafts a shorter step.
            dataclasses.replace(verify, tokens=8, rows=1, drafter=NgramLookup(4, 2))
        ),
        "draft": lambda: sequence_runner("mosaic_gpu", layers=1).runner.program(
            DraftSpec(step, 4, texts)
        ),
        "decode_keeping": lambda: keeping(step),
        "verify_keeping": lambda: keeping(verify),
        "draft_head": lambda: heading(DraftSpec(step, 4, texts, kept)),
        "catch_up_head": lambda: heading(CatchUpSpec(mixed, kept)),
        "put_drafts": lambda: sequence_runner("xla", drafts=4).runner.program(
            PutDraftsSpec(ROWS, 4)
        ),
        "one_page": lambda: sequence_runner("xla", pages=1, rows=1).runner.program(alone),
        "copy": lambda: sequence_runner("xla").runner.program(CopySpec()),
        "readmit": lambda: sequence_runner("xla").runner.program(AdmitSpec(1, 64, returning=True)),
        "swapped": lambda: dataclasses.replace(decode, function=swapped),
        "read_late": lambda: dataclasses.replace(decode, function=read_late),
        "scanned": scanned,
    }


def sampling(made, features):
    """Returns the lowering of the program that samples after the forward pass of a step."""
    import jax

    from jaxkv.runner.sample_spec import SampleSpec

    # The type of hidden states comes from a trace of a step, whose kernels ask the default device.
    with jax.default_device(device()):
        return made.runner.program(SampleSpec(ROWS, features, 4))


def generated(made, shape):
    """Returns the lowering of a prompt step and the decode steps after it, as `jaxkv.generate` runs them."""
    import jax
    import jax.numpy as jnp

    from jaxkv.programs.manifest import Lowering
    from jaxkv.sampling.fields import STOP_WIDTH
    from jaxkv.step.loop import Limits, generate_loop

    def ints(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.int32)

    def run(params, cache, limits, packed):
        batch = made.runner.packed_layout.unpack(shape, packed)
        sizes = {"page_sizes": (PAGE_SIZE,), "max_tokens": 64}
        return generate_loop(made.runner.model, params, cache, batch, limits, **sizes)

    rows = shape.rows
    limits = Limits(max_tokens=ints(rows), min_tokens=ints(rows), stop_ids=ints(rows, STOP_WIDTH))
    params, cache, packed = made.runner.program(shape).arguments
    return Lowering(run, (params, cache, limits, packed))


@functools.cache
def described(count):
    """Returns H200s of one host, linked by NVLink, that can be compiled for."""
    from jax.experimental import topologies

    from pallas_kernels.device import DESCRIBED_H200

    # Without links XLA would leave the sums over devices to NCCL.
    links = "gpu_device_info {\n  device_interconnect_info { active_links: 18 }"
    config = DESCRIBED_H200 if count == 1 else DESCRIBED_H200.replace("gpu_device_info {", links)
    return topologies.get_topology_desc(
        "h200", "cuda", target_config=config, topology=f"1x1x{count}"
    ).devices


def device():
    """Returns an H200 that can be compiled for."""
    return described(1)[0]


def mesh(count):
    """Returns the mesh of several described H200s."""
    import numpy as np
    from jax.sharding import Mesh

    from jaxkv.models.tensor_parallel import AXIS

    return Mesh(np.asarray(described(count)), (AXIS,))


def placed(array, devices):
    """Returns the type of an argument on the described devices in place of the host's."""
    import jax
    from jax.sharding import NamedSharding

    place = None
    if devices == 1:
        place = jax.sharding.SingleDeviceSharding(device())
    elif isinstance(getattr(array, "sharding", None), NamedSharding):
        place = NamedSharding(mesh(devices), array.sharding.spec)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)


@dataclasses.dataclass(frozen=True)
class Named:
    """Stands for a program's spec, which is asked for its name alone."""

    name: str


def report(name, lowering, dump):
    """Compiles one program for the H200 the way the engine does and returns the facts about it."""
    import jax

    from jaxkv.programs.fingerprint import name_traced
    from jaxkv.programs.lowering import argument_types, trace
    from jaxkv.programs.manifest import compile_program

    spec = Named(name)
    places = [leaf.sharding for leaf in jax.tree.leaves(lowering.arguments[0])]
    devices = max((len(place.device_set) for place in places if place is not None), default=1)
    arguments = jax.tree.map(lambda array: placed(array, devices), lowering.arguments)
    # Kernels ask the default device whether they can run on it.
    with jax.default_device(device()):
        lowering = dataclasses.replace(lowering, arguments=arguments)
        program = compile_program(spec, lowering, audited=False)
        stored_as = None
        if name in STORED:
            traced, types = trace(name, lowering), argument_types(lowering)
            # The described device belongs to no client that could tell its versions.
            stored_as = name_traced(name, traced, types, jax.devices()[:1], {})
    # XLA writes the sequence after its passes only if they changed it; that name sorts last.
    thunks = sorted(Path(dump).glob(f"*jit_{spec.name}.thunk_sequence*.txt"))[-1]
    buffers = read_command_buffers(thunks.read_text().splitlines())
    found, text = program.report, program.compiled.as_text()
    return {
        "seconds": round(program.seconds, 2),
        "stored_as": stored_as,
        "backend": found.backend,
        "cache_bytes": found.cache_bytes,
        "alias_bytes": found.alias_bytes,
        "temp_bytes": found.temp_bytes,
        "sum_bytes": found.sum_bytes,
        "copies": [copy.line for copy in found.copies],
        "problems": found.problems,
        "command_buffers": buffers.count,
        "captured": buffers.captured,
        "outside": buffers.outside,
        "sums_inside": buffers.inside.count("kCollectiveKernel"),
        "turns": re.findall(r'known_trip_count":{"n":"(\d+)"', text),
        "collectives": re.findall(r" (all-[a-z-]+|collective-[a-z-]+|reduce-scatter)\(", text),
        "custom_calls": re.findall(r'custom_call_target="([^"]+)"', text),
        "early_weights": early_weights(text),
        "peer_sums": peer_sums(text),
    }


def peer_sums(text):
    """Returns for each sum over the devices by our kernel, in order, how many others it needs the results of."""
    from jaxkv.programs.hlo import parse_module

    calls = set(re.findall(r"%([\w.\-]+) = [^\n]* custom-call\([^\n]*/peer_sum/", text))
    found = []
    for instructions in parse_module(text).computations.values():
        needed = {}
        for one in instructions:
            before = set().union(*(needed.get(name, set()) for name in one.operands))
            if one.name in calls:
                found.append(len(before))
                before |= {one.name}
            needed[one.name] = before
    return found


def early_weights(text):
    """Returns where the weights come from that kernels copy while the previous kernel runs.

    That is "argument" for one of the program, "argument of a loop" for one that a loop is given, and otherwise the
    opcode of the instruction that makes it.
    """
    from jaxkv.programs.hlo import parse_module
    from pallas_kernels.argument_weights import EARLY

    module = parse_module(text)
    lines = {
        name: {one.name: one for one in module.computations[name]} for name in module.computations
    }
    loops = {
        callee: (name, one)
        for name, instructions in lines.items()
        for one in instructions.values()
        if one.opcode == "while"
        for callee in one.callees
    }

    def source(computation, name):
        one = lines[computation][name]
        if one.opcode == "bitcast":
            return source(computation, one.operands[0])
        if one.opcode == "parameter" and computation == module.entry:
            return "argument"
        if one.opcode != "get-tuple-element" or computation not in loops:
            return one.opcode
        if lines[computation][one.operands[0]].opcode != "parameter":
            return lines[computation][one.operands[0]].opcode
        outside, loop = loops[computation]
        given = lines[outside][loop.operands[0]]
        if given.opcode != "tuple":
            return given.opcode
        found = source(outside, given.operands[one.index])
        return "argument of a loop" if found.startswith("argument") else found

    calls = re.findall(rf"%([\w.\-]+) = [^\n]* custom-call\([^\n]*{EARLY}/", text)
    return sorted(
        {
            source(computation, lines[computation][call].operands[0])
            for call in calls
            for computation in lines
            if call in lines[computation]
        }
    )


def has_plugin():
    """Finds JAX's CUDA plugin, also where the set-up keeps it apart on machines without a GPU."""
    sys.path.append(str(Path(sys.prefix) / "cuda13-plugin"))
    names = "jax_plugins", "jax_plugins.xla_cuda13"
    return all(importlib.util.find_spec(name) for name in names)


def main(names, lowerings):
    """Prints what became of the programs with these names; `lowerings()` returns what makes each."""
    if not has_plugin():
        reason = "needs jax-cuda13-plugin and jax-cuda13-pjrt, which compile for CUDA"
        print(json.dumps({"skipped": reason}))
        return
    with tempfile.TemporaryDirectory() as dump:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump}"
        start = time.perf_counter()
        programs = lowerings()
        found = {name: report(name, programs[name](), dump) for name in names}
        print(json.dumps(found | {"seconds": time.perf_counter() - start}))
