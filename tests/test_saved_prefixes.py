"""`LLM.save_prefixes` and `LLM.load_prefixes` on a layer of the model inside the package, across processes."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from jaxkv import LLM, AsyncLLM, CacheConfig, SamplingParams
from jaxkv.errors import BadCheckpoint, ProgramRefused
from tests.few_programs import few_programs
from tests.one_layer import one_layer_model

PROJECT = Path(__file__).parents[1]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
STEM = "class Node:\n    def __init__(self):\n        self.children = []\n"
PROMPTS = [
    STEM + "        self.name = name\n    def add(self, child):\n",
    STEM + "        self.value = None\n    def get(self):\n        return",
]


def make(model, page_size=8, dtype="float32", max_sequences=2, **options):
    cache = CacheConfig(max_sequences=max_sequences, page_size=page_size, dtype="int8")
    llm = LLM(model, dtype=dtype, max_model_len=64, cache=cache, progress=False, **options)
    return few_programs(llm)


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory):
    return one_layer_model(tmp_path_factory.mktemp("models") / "one")


@pytest.fixture(scope="module")
def llm(one_layer):
    with make(one_layer, max_sequences=3) as one:
        yield one


@pytest.fixture(scope="module")
def path(llm, tmp_path_factory):
    """Returns a file with what two prompts left in the LLM's cache."""
    path = tmp_path_factory.mktemp("saved") / "prefixes.safetensors"
    llm.generate(PROMPTS, GREEDY)
    assert llm.save_prefixes(path).pages > 0
    return path


def save_two(model, path):
    """Writes what two prompts leave in the cache, and prints their tokens."""
    with make(model) as llm:
        made = llm.generate(PROMPTS, GREEDY)
        saved = llm.save_prefixes(path)
        print([one.token_ids for one in made], saved.tokens, saved.pages)


@pytest.mark.slow
def test_prefixes_of_another_process_are_hit_and_change_no_token(one_layer, tmp_path):
    path = tmp_path / "prefixes.safetensors"
    script = f"from tests.test_saved_prefixes import save_two; save_two({str(one_layer)!r}, {str(path)!r})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    with make(one_layer, max_sequences=3) as llm:
        wanted = [(llm.explain(prompt).num_tokens - 1) // 8 * 8 for prompt in PROMPTS]
        assert min(wanted) > 24
        loaded = llm.load_prefixes(path)
        assert loaded.left_out == loaded.present == 0
        made = llm.generate(PROMPTS, GREEDY)
        printed = f"{[one.token_ids for one in made]} {loaded.tokens} {loaded.pages}"
        assert printed == done.stdout.strip()
        assert [one.usage.cached_tokens for one in made] == wanted
        assert llm.load_prefixes(path).present == loaded.pages
        llm.engine.sequence_runner.allocator.check()
        llm.engine.prefix.check()


def test_prompts_limit_what_is_saved(llm, path, tmp_path):
    llm.load_prefixes(path)
    both = llm.save_prefixes(tmp_path / "both", PROMPTS)
    one = llm.save_prefixes(tmp_path / "one", PROMPTS[0])
    ids = llm.get_tokenizer().encode(PROMPTS[0])
    assert 0 < one.pages < both.pages
    assert llm.save_prefixes(tmp_path / "one", {"prompt_token_ids": ids}) == one
    assert one.tokens == len(ids) // 8 * 8
    with pytest.raises(ValueError, match="prefixes with a cache_salt are not saved"):
        llm.save_prefixes(tmp_path / "salted", {"prompt": STEM, "cache_salt": "tenant"})
    with pytest.raises(ValueError, match=r"prompt 1: .*at least one token"):
        llm.save_prefixes(tmp_path / "empty", [STEM, ""])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["both", "one"]


def test_other_caches_and_dtypes_are_refused(llm, path, one_layer, tmp_path):
    for options, message in (
        ({"page_size": 16}, "another cache layout"),
        ({"dtype": "bfloat16"}, "other weights|another model|another cache layout"),
        ({"load_format": "dummy"}, "other weights"),
    ):
        with make(one_layer, **options) as other, pytest.raises(BadCheckpoint, match=message):
            other.load_prefixes(path)
    with pytest.raises(FileNotFoundError):
        llm.load_prefixes(tmp_path / "nothing")
    (tmp_path / "text").write_text("no prefixes")
    with pytest.raises(BadCheckpoint, match="no safetensors file"):
        llm.load_prefixes(tmp_path / "text")


def test_while_an_async_llm_serves_it_and_after_its_end_it_is_refused(
    llm, path, one_layer, tmp_path
):

    async def served():
        async with AsyncLLM(llm):
            for act in (llm.save_prefixes, llm.load_prefixes):
                with pytest.raises(RuntimeError, match="an AsyncLLM serves this LLM"):
                    act(path)

    before = path.read_bytes()
    asyncio.run(served())
    assert path.read_bytes() == before
    closed = make(one_layer)
    closed.close()
    for act in (closed.save_prefixes, closed.load_prefixes):
        with pytest.raises(RuntimeError, match="closed"):
            act(tmp_path / "prefixes")


@pytest.mark.slow
def test_strict_mode_compiles_nothing_for_it(path, one_layer, tmp_path):
    with make(one_layer, strict=True) as llm:
        llm.warm_up(batch=1, prompt_tokens=8, sampling=GREEDY)
        for act in (llm.save_prefixes, llm.load_prefixes):
            with pytest.raises(ProgramRefused):
                act(path if act == llm.load_prefixes else tmp_path / "prefixes")
        assert list(tmp_path.iterdir()) == []
        llm.warm_up(batch=1, prompt_tokens=8, sampling=GREEDY, saved_prefixes=True)
        loaded = llm.load_prefixes(path)
        assert loaded.pages > 0
        assert llm.save_prefixes(tmp_path / "prefixes").pages == loaded.pages
