"""Models of Transformers whose last layer becomes one that predicts further tokens, for each layout of checkpoints."""

from dataclasses import replace

from tests.models.draft_heads.checkpoints import MtpCase
from tests.models.families import cases, hybrid_cases, latent_cases

_AFTER_LAST = ("model.layers.{after}.", "model.layers.{after}.")
_DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")


def _longer(case, **options):
    return replace(case, options=case.options | options)


CASES = {
    "deepseek-v3": MtpCase(
        _longer(latent_cases.CASES["v3"], num_hidden_layers=3), *_AFTER_LAST, _DEEPSEEK
    ),
    "glm-4.5": MtpCase(
        _longer(cases.CASES["glm4-moe"], num_hidden_layers=3),
        *_AFTER_LAST,
        _DEEPSEEK,
        num_nextn_predict_layers=1,
    ),
    "qwen3-next": MtpCase(
        _longer(
            hybrid_cases.CASES["qwen3-next"],
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "full_attention"],
        ),
        "mtp.",
        "mtp.layers.0.",
        _QWEN,
    ),
}
