"""A KV cache of float8 or int8 gives the logits that Transformers computes from keys and values rounded alike."""

import numpy as np
import pytest

from jaxkv import LLM, CacheConfig, SamplingParams
from jaxkv.cache.budget import bytes_per_token
from jaxkv.models.registry import build_model, load_config, load_params
from pallas_kernels.device import gpu_arch
from tests.models.driver import Driver

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
cases = pytest.importorskip("tests.models.families.cases")

pytestmark = pytest.mark.torch

PROMPT, STEPS = 21, 12
# Summed in another order a number may be rounded to the neighbouring byte, 1/16 (fp8) or 1/127 of the row's largest.
TOLERANCE = {"fp8": 0.05, "int8": 0.02}


def rounded(values, name):
    """One scale per token and head, in torch."""
    largest = {"fp8": 448.0, "int8": 127.0}[name]
    scale = values.abs().amax(-1, keepdim=True) / largest
    stored = (values / scale).clamp(-largest, largest)
    stored = stored.round() if name == "int8" else stored.to(torch.float8_e4m3fn).float()
    return stored * scale


class RoundedCache(transformers.DynamicCache):
    """Transformers' cache with every key and value rounded to one byte."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def update(self, key_states, value_states, *args, **options):
        pair = (rounded(states, self.name) for states in (key_states, value_states))
        return super().update(*pair, *args, **options)


@torch.no_grad()
def greedy(model, tokens, name):
    """Returns the logits of the prompt and of each step, and the tokens chosen."""
    cache = RoundedCache(name)
    ids, logits, chosen = torch.tensor([tokens]), [], []
    for _ in range(STEPS):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        logits.append(out.logits[0].numpy())
        chosen.append(int(logits[-1][-1].argmax()))
        ids = torch.tensor([chosen[-1:]])
    return np.concatenate(logits), chosen


@pytest.mark.parametrize(
    ("family", "name"),
    [pytest.param("llama", "fp8", marks=pytest.mark.slow), ("mistral-window", "int8")],
)
def test_logits_and_greedy_tokens_equal_transformers_over_rounded_keys(family, name, tmp_path):
    case = cases.CASES[family]
    theirs = case.build()
    theirs.save_pretrained(tmp_path)
    model = build_model(load_config(tmp_path))
    params = load_params(tmp_path, model, dtype="float32", progress=False)
    tokens = case.prompt(PROMPT)
    wanted, chosen = greedy(theirs, tokens, name)
    exact = cases.logits(theirs, tokens + chosen[:-1])
    driver = Driver(model, params, cache_dtype=name)
    logits = [driver.prefill([tokens])[0]]
    logits += [driver.decode([token]) for token in chosen[:-1]]
    got = np.concatenate(logits)
    error = np.max(np.abs(got - wanted))
    assert error < TOLERANCE[name]
    # The bound means nothing unless rounding changes much more than that.
    assert np.max(np.abs(exact - wanted)) > 4 * error
    best_two = np.sort(wanted[PROMPT - 1 :])[:, -2:]
    clear = best_two[:, 1] - best_two[:, 0] > 2 * error
    assert np.mean(clear) > 0.8
    assert np.all((got[PROMPT - 1 :].argmax(1) == chosen)[clear])


@pytest.mark.slow
def test_a_model_serves_text_from_a_third_of_the_bytes():
    params = SamplingParams(temperature=0.0, max_tokens=4)
    texts, sizes = {}, {}
    for name in ("float32", "int8"):
        cache = CacheConfig(dtype=name, max_sequences=1, page_size=16)
        llm = LLM(dtype="float32", max_model_len=64, cache=cache, progress=False)
        texts[name] = llm.generate("def add(", params)[0].text
        sizes[name] = bytes_per_token(llm.engine.runner.layout.groups[0])
    assert texts["int8"] == texts["float32"]
    assert sizes["int8"] < 0.32 * sizes["float32"]


@pytest.mark.skipif(gpu_arch() == 90, reason="the kernels run on this GPU")
def test_fp8_is_refused_where_xla_would_copy_its_pools():
    with pytest.raises(ValueError, match=r"an fp8 cache needs our kernels.* found .*int8 instead"):
        LLM(max_model_len=64, cache=CacheConfig(dtype="fp8"), progress=False)
