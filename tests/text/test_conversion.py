"""Tokenizers in other forms than tokenizer.json that Transformers converts, and what is refused."""

import importlib.util
import json
import re

import pytest
from tokenizers import pre_tokenizers

from jaxkv.errors import BadCheckpoint
from jaxkv.text import conversion, conversion_process
from jaxkv.text.tokenizer import load_tokenizer

CANARY = "import pathlib; pathlib.Path(__file__).with_name('CANARY').write_text('ran')\n"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def directory(tmp_path):
    """A byte-level tokenizer as vocab.json and merges.txt, beside code that must not run."""
    vocab = {piece: at for at, piece in enumerate([*ALPHABET, "ab", "Ġab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ ab\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 300}')
    for name in ("tokenization_evil.py", "transformers.py", "tokenizers.py", "sitecustomize.py"):
        (tmp_path / name).write_text(CANARY)
    return tmp_path


def assert_converted(directory, caplog):
    tokenizer = load_tokenizer(directory)
    ab, spaced, end = range(len(ALPHABET), len(ALPHABET) + 3)
    assert tokenizer.encode("ab ab<|endoftext|>") == [ab, spaced, end]
    assert tokenizer.decode([ab, spaced]) == "ab ab"
    assert tokenizer.eos_ids == (end,)
    assert not (directory / "CANARY").exists()
    assert not (directory / "tokenizer.json").exists()
    [record] = caplog.records
    assert f"AutoTokenizer.from_pretrained('{directory}').save_pretrained" in record.getMessage()


# The two tests below have its parts: a process takes ten seconds to import what converts.
@pytest.mark.slow
@pytest.mark.torch
def test_vocab_and_merges_are_converted_without_running_code(directory, monkeypatch, caplog):
    monkeypatch.chdir(directory)
    assert_converted(directory, caplog)


@pytest.mark.torch
def test_transformers_converts_vocab_and_merges(directory, monkeypatch, caplog):
    def run(source, target):
        conversion_process.convert(str(source), str(target), conversion._FEWEST_TOKENS)

    monkeypatch.setattr(conversion, "_run", run)
    assert_converted(directory, caplog)


TELLS_WHERE = """
import importlib.util, json
print(json.dumps({"error": importlib.util.find_spec("transformers").origin}))
"""


@pytest.mark.torch
def test_the_process_of_a_conversion_finds_no_code_in_the_directory(
    directory, monkeypatch, tmp_path_factory
):
    program = tmp_path_factory.mktemp("program") / "program.py"
    program.write_text(TELLS_WHERE)
    monkeypatch.setattr(conversion, "_PROGRAM", str(program))
    installed = importlib.util.find_spec("transformers").origin
    monkeypatch.chdir(directory)
    with pytest.raises(BadCheckpoint, match=re.escape(f"cannot convert it: {installed};")):
        load_tokenizer(directory)
    assert not (directory / "CANARY").exists()


NOT_UNDERSTOOD = r"tiktoken\.model but no tokenizer\.json, and Transformers cannot convert it: "


def odd_files(folder):
    (folder / "tiktoken.model").write_text("no base64\n")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.mark.slow
@pytest.mark.torch
def test_files_that_are_not_understood_are_refused(tmp_path):
    with pytest.raises(BadCheckpoint, match=NOT_UNDERSTOOD) as caught:
        load_tokenizer(odd_files(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.torch
def test_a_failed_conversion_says_why_and_what_it_may_need(tmp_path, monkeypatch):
    monkeypatch.setattr(conversion, "_run", lambda *_: "ValueError: no\nbase64")
    with pytest.raises(BadCheckpoint, match=NOT_UNDERSTOOD + "ValueError: no.*base64") as caught:
        load_tokenizer(odd_files(tmp_path))
    assert "pip install 'transformers>=5' sentencepiece protobuf tiktoken" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_transformers_the_error_says_what_to_install(directory, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        BadCheckpoint, match=r"is not installed; run: pip install 'transformers>=5'"
    ):
        load_tokenizer(directory)


def test_a_tokenizer_that_is_code_is_refused(directory, monkeypatch):
    monkeypatch.setattr(conversion, "_run", lambda *_: pytest.fail("a process was started"))
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(BadCheckpoint, match="only Python code of its authors reads that"):
        load_tokenizer(directory)


def test_qwens_first_form_is_refused(tmp_path):
    (tmp_path / "qwen.tiktoken").write_text("IQ== 0\n")
    with pytest.raises(
        BadCheckpoint, match=r"qwen\.tiktoken but no tokenizer\.json.*serve token ids alone"
    ):
        load_tokenizer(tmp_path)


def test_links_out_of_the_directory_are_not_followed(directory):
    outside = directory.parent / "outside.json"
    outside.write_text("{}")
    (directory / "vocab.json").unlink()
    (directory / "vocab.json").symlink_to(outside)
    with pytest.raises(BadCheckpoint, match="link out of the model directory"):
        load_tokenizer(directory)
