"""Steps of models with latent attention, which h200_programs.py compiles for an H200."""

from dataclasses import replace

from tests.engine import h200


def lowerings():
    """Returns, by name, functions that describe what to compile: a model of DeepSeek-V2-Lite's heads and latents."""
    from jaxkv.config.blocks import IndexConfig, LatentConfig, MixtureConfig
    from jaxkv.config.model import RopeConfig
    from jaxkv.runner.program_specs import StepSpec

    options = {
        "pattern": (("latent", "gated"), ("latent", "mixture+shared")),
        "latent": LatentConfig(kv_lora_rank=512, rope_dim=64, nope_dim=128, value_dim=128),
        "mixture": MixtureConfig(experts=16, top_k=4, size=512, gated=True, shared_size=512),
        "rope": RopeConfig(rotary_dim=64),
        "kv_heads": 16,
        "head_dim": 192,
    }
    index = IndexConfig(heads=16, head_dim=128, topk=256)
    sparse = options | {
        "pattern": (("sparse_latent", "gated"),) * 2,
        "latent": replace(options["latent"], q_lora_rank=512, index=index),
    }

    def step(implementation, tokens, rows, *, changes=options, dtype="bfloat16", **kind):
        shape = StepSpec(tokens=tokens, rows=rows, table_widths=(h200.WIDTH,), **kind)

        def make():
            made = h200.sequence_runner(implementation, rows=rows, cache_dtype=dtype, **changes)
            return made.runner.program(shape)

        return make

    made = {}
    for implementation in ("xla", "mosaic_gpu"):
        made |= {
            f"decode_{implementation}": step(implementation, 8, 8, decode=True),
            f"decode_one_{implementation}": step(implementation, 1, 1, decode=True),
            f"absorbed_{implementation}": step(implementation, 512, 8),
            f"expanded_{implementation}": step(implementation, 512, 8, fresh=True),
        }
        for name, dtype in {"records": "fp8", "plain": "bfloat16"}.items():
            kept = {"changes": sparse, "dtype": dtype}
            made |= {
                f"sparse_decode_{name}_{implementation}": step(
                    implementation, 8, 8, decode=True, **kept
                ),
                f"sparse_decode_one_{name}_{implementation}": step(
                    implementation, 1, 1, decode=True, **kept
                ),
                f"sparse_prefill_{name}_{implementation}": step(implementation, 512, 8, **kept),
                f"sparse_expanded_{name}_{implementation}": step(
                    implementation, 256, 8, fresh=True, **kept
                ),
            }
    return made
