"""Every code block of the README and of the documentation runs as shown, and prints the output shown."""

import importlib.util
import io
import re
import shutil
import sys

import pytest

from jaxkv import SamplingParams, cli, default_model
from jaxkv.programs.manifest import compile_count
from tests.docs.blocks import (
    LANGUAGES,
    ON_THE_HUB,
    PAGES,
    ROOT,
    assert_shown,
    blocks_of,
    commands_of,
    run_command,
    run_python,
    steps_of,
)
from tests.offload.test_prefix_file import save
from tests.one_layer import one_layer_model
from tests.openai_stub import KEY, openai_stub
from tests.serve.chromium import dashboard_server

# Page -> what it shows -> what the tests run instead, since compiling for the sizes shown takes minutes on a CPU.
SMALLER = {
    "docs/how-to/serve.md": {
        "max_model_len=4096": "max_model_len=192",
        "batch=8, prompt_tokens=1024": "batch=2, prompt_tokens=16",
        "max_tokens=128": "max_tokens=8",
    }
}
# Page -> command -> options that are added, for the same reason.
MORE_OPTIONS = {
    "docs/how-to/command-line.md": {
        "generate": "--max-model-len 64 --max-tokens 4",
        "chat": "--max-model-len 64 --max-tokens 4",
        "compile": "--token-budget 64",
        "bench": "--requests 3 --prompt-tokens 8:15 --output-tokens 2:4 --prefix-tokens 4 "
        "--max-sequences 1 --token-budget 16 --cache-bytes 32MB",
    }
}
# (page, reason) -> blocks that no test runs.
NOT_RUN = {
    ("CONTRIBUTING.md", "needs a GPU"): 1,
    ("README.md", "serves until it is stopped"): 1,
    ("docs/how-to/quantisation.md", "needs a model"): 1,
    ("docs/how-to/replicas.md", "serves until it is stopped"): 1,
    ("docs/how-to/several-gpus.md", "serves until it is stopped"): 1,
    ("docs/how-to/several-hosts.md", "needs several hosts"): 2,
    ("docs/how-to/trainer.md", "takes minutes"): 1,
    ("docs/how-to/trainer.md", "needs google-tunix"): 1,
    ("docs/how-to/trainer.md", "needs adapters on disk"): 1,
}
NEEDS_TORCH = ("docs/how-to/transformers.md",)
# Page -> a word of blocks that another test runs: tests/torch_bridge/transformers_cache/test_cache.py.
RUN_ELSEWHERE = {"README.md": "torch_bridge"}


def nothing_compiles_after_the_warm_up(names):
    llm, before = names["llm"], compile_count()
    assert llm.stats().programs > 0
    llm.generate([[1] * 16, "def "], SamplingParams(temperature=0.0, max_tokens=8))
    assert compile_count() == before


def all_rows_differ(names):
    assert len({tuple(row) for row in names["out"].tokens.tolist()}) == 8


# Pages whose commands ask a server and write files.
NEEDS_SERVER = ("docs/how-to/benchmark.md",)
# Pages whose commands look into a server and a file.
NEEDS_LOOKED_AT = ("docs/how-to/dashboard.md",)
# Pages of many programs that show nothing of the whole model. They are compiled for one layer of it.
ONE_LAYER = (
    "docs/how-to/logits-processors.md",
    "docs/how-to/quantisation.md",
    "docs/how-to/serve.md",
    "docs/how-to/several-gpus.md",
    "docs/structured.md",
)
# Pages that take seconds of what other pages and tests run too.
LONG = (
    *("docs/how-to/command-line.md", "docs/how-to/speculation.md", "docs/how-to/trainer.md"),
    *("docs/how-to/replicas.md", "docs/how-to/several-gpus.md", "docs/how-to/transformers.md"),
    # tests/test_llm.py, test_async_llm.py and test_bundled_programs.py have what it calls.
    "docs/how-to/serve.md",
    # tests/models/test_flax_model.py has the module.
    *("docs/how-to/your-own-model.md", "docs/tutorial.md"),
    # tests/test_plan.py and tests/test_saved_prefixes.py have the cache, tests/test_quantization.py the weights, and
    # tests/structured the grammars.
    *("docs/how-to/cache.md", "docs/how-to/quantisation.md", "docs/structured.md"),
    # tests/engine/test_processors.py has processors in an engine.
    "docs/how-to/logits-processors.md",
)
# Page -> what is checked once its blocks have run.
AFTERWARDS = {
    "docs/how-to/serve.md": nothing_compiles_after_the_warm_up,
    "docs/how-to/trainer.md": all_rows_differ,
}


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def marked(page):
    marks = [pytest.mark.torch] if name_of(page) in NEEDS_TORCH else []
    marks += [pytest.mark.slow] if name_of(page) in LONG else []
    return pytest.param(page, id=name_of(page), marks=marks)


@pytest.fixture
def directory(tmp_path):
    """The small model inside the package, with a chat template."""
    directory = shutil.copytree(default_model.path(), tmp_path / "model")
    template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server that commands find by the variables of the environment, and a folder for their files."""
    with openai_stub() as stub:
        monkeypatch.setenv("JAXKV_BASE_URL", stub.url)
        monkeypatch.setenv("JAXKV_API_KEY", KEY)
        monkeypatch.chdir(tmp_path)
        yield


@pytest.fixture
def looked_at(monkeypatch, tmp_path):
    """A server whose engine is drawn, and a file of prefixes."""
    with dashboard_server(keys=(KEY * 2,), model="Qwen/Qwen3-0.6B") as port:
        monkeypatch.setenv("JAXKV_BASE_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("JAXKV_API_KEY", KEY * 2)
        monkeypatch.chdir(tmp_path)
        save(tmp_path / "prefixes.safetensors")
        yield


@pytest.mark.parametrize("page", [marked(page) for page in PAGES if steps_of(page)])
def test_the_blocks_of_a_page_run_in_order_and_print_what_is_shown(
    page, directory, capsys, monkeypatch, request
):
    name, names = name_of(page), {}
    if name in NEEDS_SERVER:
        request.getfixturevalue("server")
    if name in NEEDS_LOOKED_AT:
        request.getfixturevalue("looked_at")
    if "save_programs" in page.read_text():
        request.getfixturevalue("compiled_anew")
    if name in ONE_LAYER:
        one_layer_model(directory)
        monkeypatch.setattr(default_model, "path", lambda: directory)
    models = dict.fromkeys(('"path/to/hf_dir"', f'"{ON_THE_HUB}"'), repr(str(directory)))
    models['"path/to/programs"'] = repr(f"{directory}-programs")
    replaced = models | SMALLER.get(name, {})
    for shown in SMALLER.get(name, {}):
        assert shown in page.read_text(), shown
    for block, shown in steps_of(page):
        if block.language == "console":
            follow(block, directory, capsys, monkeypatch, MORE_OPTIONS.get(name, {}))
        elif RUN_ELSEWHERE.get(name, "\0") not in block.text:
            run_python(block, names, replaced)
            printed = capsys.readouterr().out
            if shown is not None:
                assert_shown(block, shown, printed)
    if name in AFTERWARDS:
        AFTERWARDS[name](names)


def follow(block, directory, capsys, monkeypatch, more):
    """Runs the commands of a block, with the user's message on stdin."""
    for words, output in commands_of(block):
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        run_command(words, directory, more.get(words[1], "").split())
        printed = capsys.readouterr().out
        assert words[0] == "make" or printed.strip(), words
        if output:
            assert_shown(block, output, printed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_run_as_shown_without_other_options(directory, capsys, monkeypatch):
    blocks = blocks_of(ROOT / "docs" / "how-to" / "command-line.md")
    assert [words[1] for block in blocks for words, _ in commands_of(block)].count("bench") == 4
    for block in blocks:
        follow(block, directory, capsys, monkeypatch, {})


def test_pages_have_blocks_of_three_languages_and_no_others():
    for page in PAGES:
        blocks = blocks_of(page)
        fences = re.findall(r"^.*(?:```|~~~).*$", page.read_text(), re.MULTILINE)
        assert len(fences) == 2 * len(blocks), name_of(page)
        assert {block.language for block in blocks} <= set(LANGUAGES), name_of(page)
        for block in blocks:
            if block.language == "console":
                assert block.text.startswith("$ "), f"{block.page}:{block.line}"


def test_the_blocks_that_are_not_run_are_these():
    left_out: dict[tuple[str, str], int] = {}
    for page in PAGES:
        assert page.read_text().count("<!-- not run") == sum(
            b.reason is not None for b in blocks_of(page)
        )
        for block in blocks_of(page):
            if block.reason is not None:
                key = (block.page, block.reason)
                left_out[key] = left_out.get(key, 0) + 1
                check_without_running(block)
    assert left_out == NOT_RUN


def check_without_running(block):
    """Checks of a block that is not run what can be checked: its syntax, and that its programs exist."""
    if block.language == "python":
        compile(block.text, block.page, "exec")
        return
    for words, _ in commands_of(block):
        if words[0] == "jaxkv":
            cli._parser().parse_args(words[1:])
            continue
        assert words[:2] == ["python3", "-m"], words
        assert importlib.util.find_spec(words[2]) is not None, words
