"""Steps of models with windows, like Gemma 3 and 4 and GPT-OSS, which h200_programs.py compiles for an H200."""

from tests.engine.h200 import PAGE_SIZE, ROWS, WIDTH, sequence_runner


def lowerings():
    """Returns, by name, functions that describe what to compile."""
    from jaxkv.config.blocks import GlobalAttentionConfig, MixtureConfig
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
    # Of the layer without a window XLA attends: its heads are too wide for our kernels.
    gemma4 = {
        "family": "gemma4_text",
        "heads": 8,
        "head_dim": 256,
        "global_attention": GlobalAttentionConfig(kv_heads=2, head_dim=512, keys_are_values=True),
        "rope": RopeConfig(rotary_dim=512, theta=1e6, kind="proportional", turning=64),
        "window_rope": RopeConfig(rotary_dim=256),
        "windows": (2 * PAGE_SIZE, None),
        "pattern": (
            ("attention", "dense_and_mixture"),
            ("global_attention", "dense_and_mixture"),
        ),
        "mixture": MixtureConfig(experts=8, top_k=2, size=512, gated=True),
        "attention_scale": 1.0,
        "logit_cap": 30.0,
        "qk_norm": True,
        "value_norm": True,
        "wide_norms": True,
        "post_norms": True,
        "layer_scalars": True,
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
        for family, changes in (("gemma", gemma), ("gemma4", gemma4), ("gpt_oss", oss))
        for kind, shape in (("decode", step), ("prefill", mixed))
    }
