"""Models by name: what is asked of the hub, which files come, what the cache gives without it, and what errors say."""

import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

import jaxkv
from jaxkv import default_model
from jaxkv.errors import BadCheckpoint, UnknownConfig
from jaxkv.models.registry import load_config, load_params
from jaxkv.weights.hub import fetch_weights, resolve_model
from jaxkv.weights.safetensors import INDEX, SINGLE
from tests.fake_hub import Model, files_in, serving, write_cache

ROOT = Path(jaxkv.__file__).parents[1]
NAME = "owner/Small-0.1B"
SMALL = {
    name: content
    for name, content in files_in(default_model.path()).items()
    if name.endswith((".json", ".safetensors")) and name != "training.json"
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def filled(names):
    """Returns files of different contents."""
    return {name: f"content of {name}".encode() for name in names}


SHARDED = {
    "config.json": b"{}",
    INDEX: json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode(),
    **filled(SHARDS),
}
UNUSED = (
    "README.md",
    ".gitattributes",
    "pytorch_model.bin",
    "model.gguf",
    "onnx/model.onnx",
    "consolidated.safetensors",
    "original/consolidated.00.pth",
    "modeling_custom.py",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


@pytest.fixture(scope="module")
def server():
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(server, tmp_path, monkeypatch):
    """The hub of `huggingface_hub`, with an empty cache in `tmp_path / "hub"` and no token."""
    server.models, server.status = {}, None
    server.asked.clear()
    server.downloaded.clear()
    url = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    huggingface_hub.close_session()
    yield server
    huggingface_hub.close_session()


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "hub"


def resolve(name=NAME, revision=None):
    folder = resolve_model(name, revision, progress=False)
    fetch_weights(name, folder, revision, progress=False)
    return folder


def told_by(error, name=NAME, revision=None):
    with pytest.raises(error) as caught:
        resolve(name, revision)
    told = str(caught.value)
    assert "\n" not in told
    return told


def test_a_model_is_downloaded_by_name_and_read(hub, cache):
    hub.models[NAME] = Model(SMALL | filled(UNUSED))
    folder = resolve()
    assert folder.is_relative_to(cache)
    assert files_in(folder) == SMALL
    assert sorted(hub.downloaded) == sorted(SMALL)
    params, model = jaxkv.load_model(NAME, dtype="float32")
    wanted, _ = jaxkv.load_model(dtype="float32")
    assert model.config == load_config(default_model.path())
    assert (params["embed"] == wanted["embed"]).all()
    assert sorted(hub.downloaded) == sorted(SMALL)


def test_of_a_sharded_model_only_the_shards_of_its_index_come(hub):
    more = filled([*UNUSED, "model-00003-of-00003.safetensors", "tokenizer.json"])
    hub.models[NAME] = Model(SHARDED | more)
    resolve()
    assert sorted(hub.downloaded) == sorted([*SHARDED, "tokenizer.json"])


def test_without_a_tokenizer_json_comes_what_it_is_made_from(hub):
    hub.models[NAME] = Model(filled(["config.json", SINGLE, *UNUSED]))
    resolve()
    assert {"tokenizer.model", "vocab.json", "merges.txt"} <= set(hub.downloaded)


def test_named_templates_come_and_other_forms_of_a_tokenizer_if_needed(hub):
    names = ["chat_templates/rag.jinja", "chat_templates/notes.txt", "chat_templates/a/b.jinja"]
    hub.models[NAME] = Model(SMALL | filled([*names, "tekken.json"]))
    resolve()
    assert sorted(hub.downloaded) == sorted([*SMALL, "chat_templates/rag.jinja"])


def test_the_weights_come_last(hub):
    hub.models[NAME] = Model(SMALL)
    folder = resolve_model(NAME, progress=False)
    assert sorted([*hub.downloaded, SINGLE]) == sorted(SMALL)
    assert load_config(folder) == load_config(default_model.path())
    assert resolve() == folder
    assert files_in(folder) == SMALL
    assert sorted(hub.downloaded) == sorted(SMALL)


def test_what_is_cached_is_asked_for_once_and_not_downloaded_again(hub, cache):
    hub.models[NAME] = Model(SMALL)
    folder = resolve()
    hub.downloaded.clear()
    hub.asked.clear()
    assert resolve() == folder
    assert len(hub.asked) == 1
    # Of a commit nothing can have changed.
    assert resolve(NAME, hub.models[NAME].commit) == folder
    assert len(hub.asked) == 1
    assert hub.downloaded == []


def test_a_new_revision_is_downloaded_and_the_old_one_stays(hub):
    hub.models[NAME] = Model(SMALL)
    old, commit = resolve(), hub.models[NAME].commit
    hub.models[NAME] = Model(SMALL | {"generation_config.json": b'{"temperature": 0.5}'})
    hub.downloaded.clear()
    new = resolve()
    assert new != old
    assert hub.downloaded == ["generation_config.json"]
    assert resolve(NAME, commit) == old


@pytest.mark.parametrize("branch", [None, "main"])
def test_a_plan_of_a_newer_commit_leaves_the_older_one_to_work_without_a_network(
    hub, cache, monkeypatch, branch
):
    """A plan needs no weights, so that the cache has those of the older commit alone."""
    old = write_cache(cache, NAME, SMALL)
    hub.models[NAME] = Model(SMALL | {"generation_config.json": b'{"temperature": 0.5}'})
    new = resolve_model(NAME, branch, progress=False)
    assert new.name == hub.models[NAME].commit
    hub.asked.clear()
    assert resolve_model(NAME, branch, progress=False) == new
    assert len(hub.asked) == 1
    hub.status = 503
    assert resolve_model(NAME, branch, progress=False) == resolve(NAME, branch) == old
    hub.status = None
    assert resolve(NAME, branch) == new
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(NAME, branch, progress=False) == resolve(NAME, branch) == new


def test_a_plan_works_again_without_a_network_if_the_cache_has_no_weights(hub, monkeypatch):
    hub.models[NAME] = Model(SMALL)
    folder = resolve_model(NAME, progress=False)
    hub.models[NAME] = Model(SMALL | {"generation_config.json": b'{"temperature": 0.5}'})
    newer = resolve_model(NAME, progress=False)
    assert newer != folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(NAME, progress=False) == newer
    assert "it holds those of" not in told_by(OSError)


def test_a_commit_that_was_downloaded_by_itself_is_used_once_its_branch_is_there(hub, monkeypatch):
    hub.models[NAME] = Model(SMALL)
    resolve()
    hub.models[NAME] = Model(SMALL | {"generation_config.json": b'{"temperature": 0.5}'})
    new = resolve(NAME, hub.models[NAME].commit)
    assert resolve() == new
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve() == new


def test_a_cache_that_cannot_be_written_is_read(hub, cache, monkeypatch):
    hub.models[NAME] = Model(SMALL)
    resolve()
    hub.models[NAME] = Model(SMALL | {"generation_config.json": b'{"temperature": 0.5}'})
    new = resolve(NAME, hub.models[NAME].commit)
    [branch] = cache.glob("models--*/refs/main")

    def refuse(path, text):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    assert resolve() == new
    assert branch.read_text() != new.name


@pytest.mark.parametrize("has_config", [True, False])
def test_a_branch_that_another_program_moved_is_told_with_a_commit_that_is_complete(
    hub, cache, monkeypatch, has_config
):
    old = write_cache(cache, NAME, SMALL)
    hub.models[NAME] = Model(SMALL | {"generation_config.json": b"{}"})
    file = "config.json" if has_config else "generation_config.json"
    huggingface_hub.hf_hub_download(NAME, file)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    told = told_by(OSError)
    assert f"it holds those of revision {old.name}, which may be named; or run `hf download" in told
    assert resolve(NAME, old.name) == old


def test_a_download_that_was_cut_off_goes_on_with_the_missing_files(hub):
    hub.models[NAME] = Model(SHARDED)
    folder = resolve()
    (folder / SHARDS[1]).resolve().unlink()
    (folder / SHARDS[1]).unlink()
    hub.downloaded.clear()
    assert resolve() == folder
    assert files_in(folder) == SHARDED
    assert hub.downloaded == [SHARDS[1]]


def test_a_commit_of_which_another_program_has_cached_the_config_alone_is_completed(hub):
    hub.models[NAME] = Model(SMALL)
    commit = hub.models[NAME].commit
    huggingface_hub.hf_hub_download(NAME, "config.json", revision=commit)
    assert files_in(resolve(NAME, commit)) == SMALL


def test_a_folder_of_that_name_takes_precedence(hub, tmp_path):
    hub.models[NAME] = Model(SMALL)
    folder = tmp_path / NAME
    shutil.copytree(default_model.path(), folder)
    assert resolve() == Path(NAME)
    assert hub.asked == []
    assert "revision 'main' is one of a name on the Hugging Face Hub" in told_by(
        ValueError, NAME, "main"
    )


PATHS = (
    "./x ../x/y /x /x/y x/y/z ~/x x x/ x/y/ .x/y x/y.gguf x/y.bin x//y x/-y a--b/c x/.. hf://x/y"
)


@pytest.mark.parametrize("path", [*PATHS.split(), "x y/z", Path("x/y")], ids=str)
def test_what_looks_like_a_path_is_never_asked_of_the_hub(hub, path):
    told = told_by(BadCheckpoint, path)
    assert "is not a directory" in told
    assert hub.asked == []


def test_the_home_folder_may_be_written_as_a_tilde(monkeypatch, tmp_path):
    (tmp_path / "x").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/x") == tmp_path / "x"


def test_no_name_is_the_small_model_which_has_no_revisions():
    assert resolve(None) == default_model.path()
    assert "the small model inside the package" in told_by(ValueError, None, "main")


@pytest.mark.parametrize("shared", [(), (SINGLE, "config.json")], ids=["own blobs", "shared"])
def test_offline_a_cached_name_is_read_without_a_request(hub, cache, monkeypatch, caplog, shared):
    folder = write_cache(cache, NAME, SMALL, shared=shared)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with caplog.at_level(logging.WARNING):
        assert resolve() == folder
        params, model = jaxkv.load_model(NAME, dtype="float32")
    assert params["embed"].shape == (model.vocab_size, model.config.hidden_size)
    assert hub.asked == []
    assert caplog.messages == []


def test_unreachable_the_cached_revision_is_read_with_a_warning_that_names_it(hub, cache, caplog):
    folder = write_cache(cache, NAME, SMALL)
    hub.status = 503
    assert resolve() == folder
    [told] = caplog.messages
    assert re.fullmatch(
        rf"{hub.endpoint} cannot be reached \(status 503\); {NAME} is read from the cache, at revision {folder.name}",
        told,
    )


def test_a_closed_port_counts_as_unreachable(hub, cache, caplog, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    told = told_by(OSError)
    assert "http://127.0.0.1:9 cannot be reached (ConnectError: " in told
    assert f"run `hf download {NAME}` where there is a network" in told
    folder = write_cache(cache, NAME, SMALL)
    assert resolve() == folder
    assert f"at revision {folder.name}" in caplog.messages[-1]


def test_messages_do_not_show_the_password_of_a_mirror(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:secret@127.0.0.1:9")
    told = told_by(OSError)
    assert "http://127.0.0.1:9 cannot be reached" in told
    assert "secret" not in told


@pytest.mark.parametrize("missing", ["config.json", SHARDS[0], INDEX])
def test_offline_a_cache_that_lacks_a_file_counts_as_none(hub, cache, monkeypatch, missing):
    folder = write_cache(cache, NAME, SHARDED)
    (folder / missing).unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    told = told_by(OSError, NAME, "main")
    assert "HF_HUB_OFFLINE is set" in told
    assert f"{cache}, does not hold all files" in told
    revision = "main" if missing == "config.json" else folder.name
    assert f"run `hf download {NAME} --revision {revision}`" in told


def test_another_branch_is_not_answered_with_the_cached_one(hub, cache, monkeypatch):
    folder = write_cache(cache, NAME, SMALL, ref="v2")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(NAME, "v2") == folder
    assert "HF_HUB_OFFLINE is set" in told_by(OSError)


def test_a_name_that_does_not_exist_is_told_with_a_folder_that_may_be_meant(hub, tmp_path):
    told = told_by(BadCheckpoint)
    assert f"{NAME} is no folder here, and {hub.endpoint} shows no model of this name; " in told
    assert f"{hub.endpoint}/models?search=Small-0.1B" in told
    (tmp_path / "owner" / "Small-0.1").mkdir(parents=True)
    assert "did you mean the folder owner/Small-0.1?" in told_by(BadCheckpoint)


def test_a_revision_that_does_not_exist_is_told(hub):
    hub.models[NAME] = Model(SMALL)
    told = told_by(BadCheckpoint, NAME, "v9")
    assert told.startswith(f"{NAME} has no revision 'v9'; {hub.endpoint}/{NAME}/tree/main lists")


def test_a_gated_model_needs_a_token_whose_account_has_access(hub, monkeypatch):
    hub.models[NAME] = Model(SMALL, is_gated=True, grants=("hf_good",))
    told = told_by(BadCheckpoint)
    assert f"is gated: accept its conditions at {hub.endpoint}/{NAME}" in told
    assert "`hf auth login` or set HF_TOKEN" in told
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "the account of this token has no access yet: ask for it at" in told_by(BadCheckpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert files_in(resolve()) == SMALL


def test_a_private_model_is_found_with_the_token_that_the_hub_keeps(hub, tmp_path):
    hub.models[NAME] = Model(SMALL, is_private=True, grants=("hf_good",))
    assert "for a private model run `hf auth login` or set HF_TOKEN" in told_by(BadCheckpoint)
    (tmp_path / "token").write_text("hf_good")
    assert files_in(resolve()) == SMALL


def test_a_refusal_is_told_with_its_status(hub):
    hub.status = 403
    assert "refuses owner/Small-0.1B (status 403): check HF_TOKEN" in told_by(BadCheckpoint)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (
            ["pytorch_model.bin"],
            r"pytorch_model\.bin is never read.*M\.from_pretrained\('{name}'\)\.save",
        ),
        (
            ["small.Q4_0.gguf"],
            r"small\.Q4_0\.gguf is in GGUF.*\('{name}', gguf_file='small\.Q4_0\.gguf'\)",
        ),
        ([INDEX], r"lacks model-00001-of-00002\.safetensors, .*, 2 of the 2 files that"),
        (["consolidated.safetensors"], "holds consolidated.safetensors under another name"),
    ],
)
def test_a_model_without_safetensors_is_refused_before_its_weights_are_downloaded(
    hub, files, wanted
):
    content = filled(files) | {"config.json": b"{}", INDEX: SHARDED[INDEX]}
    if INDEX not in files:
        del content[INDEX]
    hub.models[NAME] = Model(content)
    told = told_by(BadCheckpoint)
    assert re.search(wanted.replace("{name}", NAME), told), told
    assert f"{NAME} on {hub.endpoint}" in told
    assert set(hub.downloaded) <= {"config.json", INDEX}


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["small.gguf", "README.md"], "small.gguf is in GGUF"),
        (["adapter_config.json", "adapter_model.safetensors"], "holds an adapter"),
        (["model_index.json", "unet/config.json"], "a pipeline of diffusers"),
        (["README.md"], "holds no config.json; wanted"),
    ],
)
def test_a_model_without_a_config_is_told_what_it_is(hub, files, wanted):
    hub.models[NAME] = Model(filled(files))
    assert wanted in told_by(BadCheckpoint)
    assert hub.downloaded == []


@pytest.mark.parametrize("shard", ["../x.safetensors", "a/b.safetensors", "*.safetensors", "x.bin"])
def test_an_index_cannot_name_anything_but_files_of_its_folder(hub, shard):
    index = json.dumps({"weight_map": {"a": shard}}).encode()
    hub.models[NAME] = Model(SHARDED | {INDEX: index, "x.bin": b""})
    assert re.search("is not a plain file name|no safetensors file", told_by(BadCheckpoint))
    assert set(hub.downloaded) == {"config.json", INDEX}


def test_a_model_that_is_not_supported_is_refused_before_its_weights_are_downloaded(hub):
    hub.models[NAME] = Model(SMALL | {"config.json": b'{"model_type": "bert"}'})
    with pytest.raises(UnknownConfig, match="model_type 'bert' is not supported"):
        jaxkv.load_model(NAME)
    with pytest.raises(UnknownConfig, match="model_type 'bert' is not supported"):
        jaxkv.LLM(NAME, progress=False)
    hub.models[NAME] = Model(SMALL)
    with pytest.raises(ValueError, match=r"the cache has 1,000 bytes|the budget is 1,000"):
        jaxkv.LLM(NAME, kv_cache_memory_bytes=1000, progress=False)
    assert SINGLE not in hub.downloaded


def test_a_format_that_a_file_beside_the_config_names_is_refused(hub):
    hub.models[NAME] = Model(SMALL | {"quant_config.json": b'{"w_bit": 3}'})
    with pytest.raises(UnknownConfig, match=r"quant_config\.json sets w_bit = 3"):
        jaxkv.load_model(NAME)


def failing(error):
    def download(*values, local_files_only=False, **options):
        if local_files_only:
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing")
        raise error

    return download


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "the disk is full, with .* bytes free in",
        ),
        (
            RuntimeError("xet: No space left on device (os error 28)"),
            "set HF_HUB_CACHE to a folder on",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied"),
            r"cannot be written \(Permission denied\)",
        ),
    ],
)
def test_a_disk_that_takes_nothing_is_told_with_the_cache_and_what_to_set(
    hub, cache, monkeypatch, error, wanted
):
    hub.models[NAME] = Model(SMALL)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", failing(error))
    told = told_by(OSError)
    assert re.search(wanted, told), told
    assert str(cache) in told
    assert "HF_HUB_CACHE" in told


def test_without_huggingface_hub_the_command_that_installs_it_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert told_by(BadCheckpoint).endswith("needs huggingface_hub: pip install huggingface_hub")


@pytest.mark.parametrize(
    "target",
    ["../../../secret", "../../../blobs/secret", "../../../blobs/ab/secret", "../../../../outside"],
)
def test_a_snapshot_may_link_to_blobs_and_to_nothing_else(cache, tmp_path, kit, target):
    folder = write_cache(cache, NAME, {"config.json": b"{}"})
    (folder / target).resolve().parent.mkdir(parents=True, exist_ok=True)
    kit.save_file(kit.checkpoint_tensors(kit.CONFIG), (folder / target).resolve())
    (folder / SINGLE).symlink_to(target)
    with pytest.raises(BadCheckpoint, match="is a link out of the model directory"):
        load_params(folder, kit.Toy(kit.CONFIG), dtype="float32", progress=False)


def test_only_a_folder_of_the_cache_may_link_to_shared_blobs(cache, kit):
    folder = write_cache(cache, NAME, {"config.json": b"{}"})
    other = cache / "other" / "snapshots" / folder.name
    shutil.copytree(folder, other)
    blob = cache / "blobs" / "ab" / ("ab" * 32)
    blob.parent.mkdir(parents=True)
    kit.save_file(kit.checkpoint_tensors(kit.CONFIG), blob)
    for directory in (folder, other):
        (directory / SINGLE).symlink_to(blob)
    load_params(folder, kit.Toy(kit.CONFIG), dtype="float32", progress=False)
    with pytest.raises(BadCheckpoint, match="is a link out of the model directory"):
        load_params(other, kit.Toy(kit.CONFIG), dtype="float32", progress=False)


PROGRAM = """
import sys
from jaxkv.cli import main

assert main(["plan", "--model", sys.argv[1], "--max-model-len", "64"]) == 0
assert "jaxkv.weights.hub" in sys.modules
print("hub imported:", "huggingface_hub" in sys.modules)
"""


def plan(model, **environment):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, model],
        env={
            **kept,
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "NO_PROXY": "127.0.0.1",
            **environment,
        },
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_command_follows_the_environment_of_the_hub(hub, tmp_path):
    home = tmp_path / "home"
    hub.models[NAME] = Model(SMALL, is_private=True, grants=("hf_good",))
    told = plan(NAME, HF_ENDPOINT=hub.endpoint, HF_HOME=str(home), HF_TOKEN="hf_good")
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("llama: ")
    assert sorted([*hub.downloaded, SINGLE]) == sorted(SMALL)
    hub.asked.clear()
    cache = str(home / "hub")
    told = plan(NAME, HF_ENDPOINT=hub.endpoint, HF_HUB_CACHE=cache, HF_HUB_OFFLINE="1")
    assert told.returncode == 0, told.stderr
    assert "hub imported: True" in told.stdout
    assert hub.asked == []


def test_a_folder_is_read_without_importing_huggingface_hub():
    told = plan(str(default_model.path()))
    assert told.returncode == 0, told.stderr
    assert "hub imported: False" in told.stdout
