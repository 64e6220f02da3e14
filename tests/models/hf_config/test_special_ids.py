"""Ids that end a text, of files that name none: those of Transformers' config classes."""

import json

import pytest

from jaxkv.models.families import multimodal
from jaxkv.models.hf_config.config_json import ConfigJson
from jaxkv.models.hf_config.special_ids import DEFAULTS, take_special_ids
from jaxkv.models.registry import FAMILIES, load_config, read_config
from tests.models.hf_config.test_config_json_dense import GEMMA_3, MISTRAL_3, OLMO_2
from tests.models.hf_config.test_config_json_hybrid import MAMBA2, NEMOTRON
from tests.models.hf_config.test_config_json_latent import V3

MULTIMODAL = {family.model_type for family in multimodal.FAMILIES}


def without_ids(file):
    return {
        key: value for key, value in file.items() if key not in ("eos_token_id", "bos_token_id")
    }


def test_every_family_of_text_has_its_row():
    assert set(DEFAULTS) == set(FAMILIES) - MULTIMODAL


@pytest.mark.torch
@pytest.mark.parametrize("family", sorted(set(DEFAULTS) - {"kimi_k2"}))
def test_the_defaults_are_those_of_transformers(family):
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    theirs = auto.CONFIG_MAPPING[family]()
    # The class of Qwen3-VL's text part declares none.
    ids = {name: getattr(theirs, name, None) for name in ("eos_token_id", "bos_token_id")}
    keys = ConfigJson(ids)
    named = take_special_ids(keys, family, 2**24)
    assert take_special_ids(ConfigJson({}), family, 2**24) == named | {"assumed_eos": True}
    assert not named["assumed_eos"]


@pytest.mark.parametrize(
    ("file", "eos"),
    [
        (OLMO_2, (50279,)),
        (GEMMA_3, (1,)),
        (MISTRAL_3, (2,)),
        (V3, (1,)),
        (MAMBA2 | {"vocab_size": 2}, ()),
        (NEMOTRON, (2,)),
    ],
    ids=["olmo2", "gemma3", "mistral3", "deepseek_v3", "past-the-vocabulary", "nemotron_h"],
)
def test_a_file_that_names_no_ids_has_those_of_its_class(file, eos):
    config = read_config(without_ids(file))
    assert (config.eos_ids, config.assumed_eos) == (eos, True)


def test_null_is_no_id_and_no_assumption():
    config = read_config(OLMO_2 | {"eos_token_id": None, "bos_token_id": None})
    assert (config.eos_ids, config.assumed_eos) == ((), False)


def test_an_assumed_id_makes_no_other_model_than_the_same_id_in_the_file():
    assumed, named = (
        read_config(without_ids(OLMO_2) | part) for part in ({}, {"eos_token_id": 50279})
    )
    assert (assumed.assumed_eos, named.assumed_eos) == (True, False)
    assert assumed == named
    assert hash(assumed) == hash(named)


def test_end_ids_of_a_generation_config_are_not_assumed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(without_ids(OLMO_2)))
    assert load_config(tmp_path).assumed_eos
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 100257}')
    config = load_config(tmp_path)
    assert (config.eos_ids, config.assumed_eos) == ((100257,), False)
