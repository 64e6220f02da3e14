"""Steps of a model that several H200s compute together, which h200_programs.py compiles for described ones."""

from dataclasses import replace

from tests.engine.h200 import PAGE_SIZE, ROWS, WIDTH, sampling, sequence_runner

DEVICES = (2, 8)


def lowerings():
    """Returns, by name, functions that describe what to compile."""
    from jaxkv.config.blocks import MixtureConfig
    from jaxkv.config.model import RopeConfig
    from jaxkv.runner.program_specs import StepSpec
    from jaxkv.sampling.features import Features

    drawn = Features(draws=True, penalties=True, logprobs=5)
    filtered = replace(drawn, filters=True)
    step = StepSpec(tokens=ROWS, rows=ROWS, table_widths=(WIDTH,), decode=True)
    prompts = StepSpec(tokens=512, rows=ROWS, table_widths=(WIDTH,))
    several = StepSpec(tokens=ROWS, rows=ROWS, table_widths=(WIDTH,), decode=True, steps=4)
    experts = {
        "family": "gpt_oss",
        "head_dim": 64,
        "rope": RopeConfig(rotary_dim=64),
        "windows": (2 * PAGE_SIZE, None),
        "pattern": (("attention", "mixture"),) * 2,
        "sinks": True,
        "mixture": MixtureConfig(experts=8, top_k=2, size=512, gated=True, biases=True, clamp=7.0),
    }
    ours = {"mailboxes": True}
    both = StepSpec(tokens=ROWS, rows=ROWS, table_widths=(WIDTH,) * 2, decode=True)

    def lowering(devices, spec, changes):
        made = sequence_runner("mosaic_gpu", devices=devices, **changes)
        return made.runner.program(spec)

    programs = {
        "decode_2": (2, step, {}),
        # Four heads of keys and values for eight devices.
        "decode_8": (8, step, {}),
        "decode_drawn_2": (2, replace(step, features=drawn), {}),
        "decode_filtered_2": (2, replace(step, features=filtered), {}),
        # Logits of more bytes than one sum may put together.
        "decode_searched_2": (2, replace(step, features=filtered), {"vocab_size": 2**19}),
        "decode_sharing_2": (2, replace(step, tokens=64, rows=64, shares=True), {"rows": 64}),
        "prefill_2": (2, prompts, {}),
        "multi_step_2": (2, several, {}),
        "experts_decode_2": (2, both, experts),
        "decode_peers_2": (2, step, ours),
        "decode_peers_8": (8, step, ours),
        "prefill_peers_2": (2, prompts, ours),
        "multi_step_peers_2": (2, several, ours),
        "experts_decode_peers_2": (2, both, experts | ours),
    }
    sampled = replace(drawn, grammar=True)
    return {
        "sample_2": lambda: sampling(sequence_runner("mosaic_gpu", devices=2), sampled),
        **{name: lambda args=args: lowering(*args) for name, args in programs.items()},
    }
