"""What users take for a model directory by mistake, and what they are told to do."""

import re

import pytest

from jaxkv.errors import BadCheckpoint
from jaxkv.models.registry import load_config, load_params
from jaxkv.text.tokenizer import load_tokenizer
from jaxkv.weights.safetensors import INDEX, SINGLE

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 12\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>"
FOREIGN = {
    "a git-lfs pointer": (POINTER, "is a pointer of Git LFS .* `git lfs pull`"),
    "an HTML page": (PAGE, "is an HTML page.* download the file again"),
    "an HTML page in capitals": (b"\n  <HTML>\n" + b" " * 600, "is an HTML page"),
    "an XML error": (b'<?xml version="1.0"?><Error/>', "is an HTML page"),
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(100), "is in GGUF, which jaxkv does not read"),
    "a PyTorch archive": (
        b"PK\x03\x04" + bytes(100),
        "is a zip archive.* convert it to safetensors",
    ),
}


def told_by(read, path):
    with pytest.raises(BadCheckpoint) as caught:
        read()
    told = str(caught.value)
    assert "\n" not in told
    assert str(path) in told
    return told


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("name", [SINGLE, INDEX, "config.json", "tokenizer.json"])
def test_another_format_under_the_name_of_a_file_is_told_with_what_to_do(tmp_path, kit, case, name):
    content, wanted = FOREIGN[case]
    (tmp_path / name).write_bytes(content)

    def read():
        if name == "config.json":
            load_config(tmp_path)
        elif name == "tokenizer.json":
            load_tokenizer(tmp_path)
        else:
            load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float32", progress=False)

    assert re.search(wanted, told_by(read, tmp_path / name))


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (
            ["model-Q4_K_M.gguf", "README.md"],
            r"model-Q4_K_M\.gguf is in GGUF, which jaxkv does not",
        ),
        (
            ["adapter_config.json", "adapter_model.safetensors"],
            r"holds an adapter.*merge it into its model with `python -c .*merge_and_unload\(\)",
        ),
        (
            ["model_index.json", "unet"],
            "pipeline of diffusers, and jaxkv runs language models alone",
        ),
        (["snapshots", "refs", "blobs"], "Hugging Face cache: give snapshots/<revision>"),
        (["params.json", "consolidated.safetensors"], "converted for Transformers"),
        ([], "holds no config.json; wanted a folder with config.json and weights"),
    ],
)
def test_a_directory_without_a_config_is_told_what_it_is(tmp_path, names, wanted):
    for name in names:
        (tmp_path / name).touch()
    assert re.search(wanted, told_by(lambda: load_config(tmp_path), tmp_path))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "model.gguf",
            r"model\.gguf is in GGUF, which jaxkv .*gguf_file='model\.gguf'\)\.save_pretrained",
        ),
        ("pytorch_model.bin", r"pytorch_model\.bin is never read.* `python -c .*save_pretrained"),
        ("model.fp16.safetensors", r"fp16\.safetensors under another name.*call it model\.safe"),
        ("model-00001-of-00002.safetensors model-00002-of-00002.safetensors", "with the index"),
        ("notes.txt", "copy or download the model's weights in safetensors too"),
    ],
)
def test_a_directory_without_safetensors_is_told_what_its_files_are(tmp_path, kit, name, wanted):
    for file in name.split():
        (tmp_path / file).touch()

    def read():
        load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float32", progress=False)

    assert re.search(wanted, told_by(read, tmp_path))


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        (
            "/nowhere/at/all.gguf",
            r"all\.gguf is in GGUF.* M\.from_pretrained\('/nowhere/at', gguf_file=",
        ),
        (
            "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main",
            "give the name of the model, Qwen/Qwen3-0.6B$",
        ),
        ("hf://Qwen/Qwen3-0.6B", "give the name of the model, Qwen/Qwen3-0.6B$"),
        ("Qwen3-0.6B", "with its owner, such as Qwen/Qwen3-0.6B$"),
        (__file__, r"give the folder of this file, .*weights$"),
        ("/nowhere/at/all", "wanted one with config.json and weights$"),
    ],
)
def test_a_path_that_is_no_directory_is_told_what_to_give(path, wanted):
    assert re.search(wanted, told_by(lambda: load_config(path), path))
