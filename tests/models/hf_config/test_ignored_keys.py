"""`ignore_config_keys` ignores unknown keys with a warning, and is refused for any other key."""

import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings

from jaxkv import LLM, cli, default_model, load_model
from jaxkv.config.cache import CacheConfig
from jaxkv.errors import UnknownConfig
from jaxkv.models.registry import load_config, read_config
from jaxkv.plan import explain_plan
from tests.example_counts import examples
from tests.models.hf_config.test_config_json import LLAMA_3_1, TINY
from tests.models.hf_config.test_config_json_window import GEMMA_3
from tests.models.hf_config.test_known_keys import NAMES, VALUES


@pytest.fixture
def directory(tmp_path):
    """The default model with an unknown key."""
    for entry in default_model.path().iterdir():
        if entry.is_file():
            (tmp_path / entry.name).write_bytes(entry.read_bytes())
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"flux_capacity": 1.21}))
    return tmp_path


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_an_unknown_key_is_refused_with_the_way_on():
    with pytest.raises(UnknownConfig, match=r"flux = 1, .*may be named in ignore_config_keys"):
        read_config(TINY | {"flux": 1})


def test_a_named_key_is_ignored_with_one_warning(caplog):
    assert read_config(TINY | {"flux": 1.21}, ("flux",)) == read_config(TINY)
    (told,) = warnings_of(caplog)
    assert "flux = 1.21 is ignored" in told


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    deadline=None,
    max_examples=examples(100),
)
@given(key=NAMES, value=VALUES)
def test_a_random_unknown_key_can_be_ignored(caplog, key, value):
    raw = TINY | {f"q{key}": value}
    try:
        read_config(raw)
    except UnknownConfig as error:
        if "ignore_config_keys" not in str(error):
            return
        caplog.clear()
        assert read_config(raw, (f"q{key}",)) == read_config(TINY)
        assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("flax",), r"'flax', which config.json does not have; did you mean 'flux'"),
        (("nonesuch",), "which config.json does not have"),
        (("hidden_size",), "knows and reads"),
        (("attention_bias",), "is known to change the result \\(biases\\)"),
        (("rope_scaling",), "knows and reads"),
        (("rope_scaling.factor",), "knows and reads"),
        (("use_cache",), "cannot change the logits .*needs no option"),
        (("sliding_window",), r"sliding_window = 9, which changes the result and is not supp"),
        (("nothing",), "is null"),
        (("model_type",), "needs no option"),
    ],
)
def test_any_other_key_cannot_be_ignored(names, told):
    raw = LLAMA_3_1 | {"flux": 1, "nothing": None, "sliding_window": 9}
    if names != ("sliding_window",):
        del raw["sliding_window"]
    with pytest.raises(UnknownConfig, match=told):
        read_config(raw, (*names, "flux"))


@pytest.mark.parametrize("names", ["flux", ("",)])
def test_names_are_a_sequence_of_strings(names):
    with pytest.raises(ValueError, match="must be a sequence of names"):
        read_config(TINY | {"flux": 1}, names)


def test_one_of_two_unknown_keys_is_still_refused():
    with pytest.raises(UnknownConfig, match="sets flow = 2, which"):
        read_config(TINY | {"flux": 1, "flow": 2}, ("flux",))


def test_keys_of_nested_objects_have_the_name_that_the_message_gives(caplog):
    rope = {"type": "linear", "factor": 2.0}
    raw = TINY | {"rope_scaling": rope | {"flux": 3}}
    with pytest.raises(UnknownConfig, match=r"ignore_config_keys as 'rope_scaling\.flux'"):
        read_config(raw)
    assert read_config(raw, ("rope_scaling.flux",)) == read_config(TINY | {"rope_scaling": rope})
    assert "rope_scaling.flux = 3 is ignored" in warnings_of(caplog)[0]
    kinds = {
        kind: {"rope_type": "default", "rope_theta": 1e4}
        for kind in ("full_attention", "sliding_attention")
    }
    plain = {key: value for key, value in GEMMA_3.items() if not key.startswith("rope")}
    strange = {kind: part | {"flux": 3} for kind, part in kinds.items()}
    got = read_config(plain | {"rope_parameters": strange}, ("rope_parameters.flux",))
    assert got == read_config(plain | {"rope_parameters": kinds})


def test_a_contradicting_name_may_be_ignored():
    assert read_config(TINY | {"n_positions": 64}, ("n_positions",)) == read_config(TINY)


def test_a_directory_is_read_with_the_option_and_only_with_it(directory, caplog):
    with pytest.raises(UnknownConfig, match="flux_capacity"):
        load_model(directory)
    assert load_config(directory, ignore_config_keys=["flux_capacity"]) == load_config(
        default_model.path()
    )
    _, model = load_model(directory, ignore_config_keys=("flux_capacity",))
    assert model.config == load_config(default_model.path())
    assert len(warnings_of(caplog)) == 2


def test_the_engine_takes_the_option(directory):
    with LLM(directory, max_model_len=64, ignore_config_keys=["flux_capacity"]) as llm:
        assert llm.model.config == load_config(default_model.path())


def test_plan_says_what_is_ignored(directory):
    told = explain_plan(
        directory,
        dtype="auto",
        max_model_len=64,
        cache=CacheConfig(),
        free_bytes=None,
        ignore_config_keys=("flux_capacity",),
    )
    assert "config.json: ignored on request: flux_capacity = 1.21\n" in told


def test_the_command_has_the_option(directory, capsys):
    call = ["plan", "--model", str(directory), "--max-model-len", "64"]
    assert cli.main(call) == 2
    assert "may be named in --ignore-config-key" in capsys.readouterr().err
    assert cli.main([*call, "--ignore-config-key", "flux_capacity"]) == 0
    said = capsys.readouterr()
    assert "ignored on request: flux_capacity = 1.21" in said.out
    assert said.err.count("flux_capacity = 1.21 is ignored") == 1
