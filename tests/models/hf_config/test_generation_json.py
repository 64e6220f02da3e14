"""What generation_config.json recommends is read strictly; what jaxkv has no field for is ignored."""

import pytest

from jaxkv import default_model
from jaxkv.errors import BadCheckpoint
from jaxkv.models.hf_config.generation_json import load_sampling_defaults


def read(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    return load_sampling_defaults(tmp_path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            '{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_length": 9, "new": [1]}',
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ('{"temperature": 1, "top_k": null, "do_sample": null}', {"temperature": 1.0}),
        ('{"do_sample": true}', {"temperature": 1.0}),
        ('{"do_sample": false, "temperature": 0.6}', {"temperature": 0.0}),
        ('{"min_p": 0.05, "repetition_penalty": 1.1}', {"min_p": 0.05, "repetition_penalty": 1.1}),
        ("{}", {}),
    ],
)
def test_what_is_recommended_is_read(tmp_path, text, wanted):
    assert read(tmp_path, text) == wanted


def test_a_directory_that_recommends_nothing_sets_nothing(tmp_path):
    assert load_sampling_defaults(tmp_path) == {}
    assert load_sampling_defaults(default_model.path()) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperature": "0.6"}', "temperature must be a finite number, got '0.6'"),
        ('{"temperature": -1}', r"generation_config.json: temperature must be .* \[0.0, 100.0\]"),
        ('{"top_p": 1.5}', "generation_config.json: top_p must be"),
        ('{"min_p": -0.5}', "generation_config.json: min_p must be"),
        ('{"repetition_penalty": 0}', "generation_config.json: repetition_penalty must be"),
        ('{"top_p": true}', "generation_config.json: top_p must be"),
        ('{"top_k": 2.5}', "generation_config.json: top_k must be an integer"),
        ('{"do_sample": 1}', "generation_config.json: do_sample must be true or false"),
    ],
)
def test_a_wrong_value_is_refused_with_the_name_of_the_file(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, text)


def test_a_file_that_is_no_object_is_refused(tmp_path):
    with pytest.raises(BadCheckpoint, match="wanted an object"):
        read(tmp_path, "[]")
