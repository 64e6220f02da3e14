"""Errors about config.json are one short line, however much the file holds."""

import pytest

from jaxkv.errors import UnknownConfig
from jaxkv.models.registry import read_config
from tests.models.hf_config import (
    test_config_json,
    test_config_json_hybrid,
    test_config_json_latent,
    test_config_json_window,
)

BASES = {
    "llama": test_config_json.LLAMA_3_1,
    "mistral": test_config_json.MISTRAL,
    "qwen2": test_config_json.QWEN_2_5,
    "qwen3": test_config_json.QWEN_3,
    "mamba2": test_config_json_hybrid.MAMBA2,
    "bamba": test_config_json_hybrid.BAMBA,
    "granite": test_config_json_hybrid.GRANITE,
    "nemotron": test_config_json_hybrid.NEMOTRON,
    "falcon": test_config_json_hybrid.FALCON,
    "qwen3_next": test_config_json_hybrid.QWEN3_NEXT,
    "gemma2": test_config_json_window.GEMMA_2,
    "gemma3": test_config_json_window.GEMMA_3,
    "gemma4": test_config_json_window.GEMMA_4,
    "gpt_oss": test_config_json_window.GPT_OSS,
    "deepseek_v2": test_config_json_latent.V2_LITE,
    "deepseek_v3": test_config_json_latent.V3,
    "deepseek_v32": test_config_json_latent.V32,
    "glm4_moe_lite": test_config_json_latent.GLM_4_7_FLASH,
}
LARGE = ("x" * 9000, ["y"] * 3000, {f"z{at}": at for at in range(3000)}, 10**4000)
LONGEST = 1500


def refusal(raw):
    """Returns the message of a refusal; empty if the file is accepted."""
    try:
        read_config(raw)
    except ValueError as error:
        return str(error)
    return ""


def test_many_unknown_keys_are_counted_and_the_first_are_named():
    """200,000 of them were a line of 3.4 MB."""
    unknown = {f"key_{at}": at for at in range(200_000)}
    with pytest.raises(UnknownConfig) as caught:
        read_config(test_config_json.LLAMA_2 | unknown)
    told = str(caught.value)
    assert "key_0 = 0, key_1 = 1, " in told
    assert "and 199,994 more" in told
    assert len(told) < 500


@pytest.mark.parametrize("key", ["n" * 10**6, "auto_map" + "n" * 10**6])
def test_a_long_key_is_clipped(key):
    told = refusal(test_config_json.LLAMA_2 | {key: "v" * 10**6})
    assert "nnn..." in told
    assert len(told) < 600


@pytest.mark.parametrize("family", BASES)
def test_large_values_of_any_key_do_not_come_back_whole(family):
    base = BASES[family]
    assert refusal(base) == ""
    for key, held in base.items():
        for value in LARGE:
            changes = [value]
            if isinstance(held, dict):
                changes += [held | {inner: value} for inner in held]
            for change in changes:
                told = refusal(base | {key: change})
                assert len(told) < LONGEST, (key, told[:2000])
                assert "\n" not in told
