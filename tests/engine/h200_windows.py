"""Steps of models with windows, Gemma-like and GPT-OSS-like, which h200_programs.py compiles for an H200."""

from tests.engine.h200 import PAGE_SIZE, ROWS, WIDTH, sequence_runner


def lowerings():
    """Returns, by name, functions that describe what to compile."""
    from jaxkv.config.blocks import MixtureConfig
    from jaxkv.config.model import RopeConfig
    from jaxkv.runner.program_specs import StepSpec

    gemma = {
        "family": "gemma3_text",
        "heads": 8,
        "head_dim": 256,
        "rope": RopeConfig(rotary_dim=256, theta=1e6),
        "window_rope": RopeConfig(rotary_dim=256),
        "windows": (2 * PAGE_SIZE, None),
        "attention_cap": 50.0,
        "logit_cap": 30.0,
        "qk_norm": True,
        "unit_offset": True,
        "post_norms": True,
        "tie_embeddings": True,
    }
    oss = {
        "family": "gpt_oss",
        "head_dim": 64,
        "rope": RopeConfig(rotary_dim=64),
        "windows": (2 * PAGE_SIZE, None),
        "pattern": (("attention", "mixture"),) * 2,
        "qkv_bias": True,
        "o_bias": True,
        "sinks": True,
        "wide_norms": True,
        "mixture": MixtureConfig(experts=8, top_k=2, size=512, gated=True, biases=True, clamp=7.0),
    }
    step = StepSpec(tokens=ROWS, rows=ROWS, table_widths=(WIDTH,) * 2, decode=True)
    mixed = StepSpec(tokens=512, rows=ROWS, table_widths=(WIDTH,) * 2)
    return {
        f"{family}_{kind}": lambda changes=changes, shape=shape: sequence_runner(
            "mosaic_gpu", **changes
        ).runner.program(shape)
        for family, changes in (("gemma", gemma), ("gpt_oss", oss))
        for kind, shape in (("decode", step), ("prefill", mixed))
    }
