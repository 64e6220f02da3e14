"""Steps of models with recurrent layers, which h200_programs.py compiles for an H200."""

from dataclasses import replace

from tests.engine import h200


def _shape(decode, checkpoints=0):
    from jaxkv.runner.program_specs import StepSpec

    tokens = h200.ROWS if decode else 512
    return StepSpec(
        tokens=tokens,
        rows=h200.ROWS,
        table_widths=(h200.WIDTH,),
        decode=decode,
        pending_checkpoints=checkpoints,
    )


def _sequence_runner(implementation, *pattern, keeps_outputs=False):
    from jaxkv.config.blocks import DeltaConfig, MambaConfig, MixtureConfig

    mamba = MambaConfig(heads=32, head_dim=64, d_state=128, d_conv=4, groups=1, chunk_size=256)
    is_kimi = any("kimi_delta" in stages for stages in pattern)
    sizes = {"key_heads": 16, "gate_rank": 128} if is_kimi else {"key_heads": 8}
    delta = DeltaConfig(value_heads=16, key_dim=128, value_dim=128, d_conv=4, **sizes)
    mixture = MixtureConfig(experts=16, top_k=4, size=512, gated=True, shared_size=512)
    parts = {"mamba": mamba, "delta": delta, "mixture": mixture}
    return h200.sequence_runner(
        implementation, layers=len(pattern), keeps_outputs=keeps_outputs, pattern=pattern, **parts
    )


def lowerings():
    """Returns, by name, functions that describe what to compile."""
    falcon = ("mamba2+attention", "gated")
    granite = (("mamba2", "mixture+shared"), ("attention", "mixture+shared"))
    qwen = (("delta", "gated"), ("attention", "gated"))
    kimi = (("kimi_delta", "gated"), ("attention", "gated"))

    one = replace(_shape(False), tokens=8, rows=1, drafts=3)

    def program(shape, implementation, *pattern):
        return lambda: _sequence_runner(implementation, *pattern).runner.program(shape)

    def step(decode, implementation, *pattern):
        return program(_shape(decode), implementation, *pattern)

    def keeping(implementation, shape):
        return lambda: _sequence_runner(
            implementation, *granite, keeps_outputs=True
        ).runner.program(shape)

    made = {
        "keeping_decode_mosaic_gpu": keeping("mosaic_gpu", _shape(True)),
        "keeping_prefill_mosaic_gpu": keeping("mosaic_gpu", _shape(False, checkpoints=16)),
        # States are written after the drafts were accepted.
        "keeping_verify_mosaic_gpu": keeping(
            "mosaic_gpu", replace(_shape(False), tokens=32, drafts=3)
        ),
        "verify_one_xla": program(one, "xla", *granite),
        "delta_verify_one_mosaic_gpu": program(one, "mosaic_gpu", *qwen),
        # XLA computes their recurrence in every family.
        "kimi_decode_mosaic_gpu": program(_shape(True), "mosaic_gpu", *kimi),
        "kimi_prefill_mosaic_gpu": program(_shape(False), "mosaic_gpu", *kimi),
        "kimi_verify_one_mosaic_gpu": program(one, "mosaic_gpu", *kimi),
    }
    for implementation in ("xla", "mosaic_gpu"):
        made |= {
            f"decode_{implementation}": step(True, implementation, falcon, falcon),
            f"prefill_{implementation}": step(False, implementation, falcon, falcon),
            f"experts_decode_{implementation}": step(True, implementation, *granite),
            f"delta_decode_{implementation}": step(True, implementation, *qwen),
            f"delta_prefill_{implementation}": step(False, implementation, *qwen),
            f"experts_prefill_{implementation}": step(False, implementation, *granite),
        }
    return made
