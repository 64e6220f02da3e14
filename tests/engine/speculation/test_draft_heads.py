"""EAGLE-3 heads and MTP layers draft: outputs stay what they are, and a head that knows the model is always right."""

import json
import shutil
import weakref
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxkv import LLM, CacheConfig, EngineConfig, SamplingParams, SpeculationConfig
from jaxkv.models.draft_heads import load
from jaxkv.plan import explain_plan
from jaxkv.runner.draft_programs import HiddenPool, PutDraftsSpec
from jaxkv.step.draft_chain import KeptHidden
from tests.few_programs import few_programs
from tests.models.draft_heads import copycats, eagle3_files

pytest.importorskip("torch")
made = pytest.importorskip("tests.models.draft_heads.checkpoints")
glm_copycat = pytest.importorskip("tests.models.draft_heads.glm_copycat")
mtp_cases = pytest.importorskip("tests.models.draft_heads.mtp_cases")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.torch

DRAW = np.random.default_rng(4)
PROMPTS = [DRAW.integers(0, eagle3_files.VOCAB, size).tolist() for size in (45, 1, 20)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=0.8, top_p=0.9, seed=4, logprobs=2, max_tokens=40, ignore_eos=True
)
METHODS = ("eagle3", "mtp")
# Room for two of three requests.
FEW_BYTES = {"eagle3": 560_000, "mtp": 270_000}


@pytest.fixture(scope="module")
def knowing(tmp_path_factory):
    """Method -> directory of a model as `copycats` has it, the model of Transformers, and the options of its head."""
    folder = tmp_path_factory.mktemp("knowing")
    copycats.llama(folder / "llama")
    copycats.eagle3(folder / "head", folder / "llama")
    llama = made.Verifier(transformers.LlamaForCausalLM.from_pretrained(folder / "llama").double())
    glm = glm_copycat.glm_with_mtp(folder / "glm")
    options = {"tokens": 3, "adaptive": False}
    eagle3 = SpeculationConfig(method="eagle3", model=folder / "head", **options)
    mtp = SpeculationConfig(method="deepseek_mtp", **options)
    return {"eagle3": (folder / "llama", llama, eagle3), "mtp": (folder / "glm", glm, mtp)}


def llm_of(model, speculation=None, *, strict=False, **cache):
    return LLM(
        model,
        engine=EngineConfig(token_budget=32, batch_invariant=True),
        speculation=speculation,
        cache=CacheConfig(**{"max_sequences": 3, "page_size": 16} | cache),
        max_model_len=128,
        strict=strict,
        progress=False,
    )


@pytest.fixture(scope="module")
def served(knowing):
    """Returns a function of a method that returns an `LLM` with few pages, which it makes once until one takes it."""
    made_of = {}

    def of(method, *, takes=False):
        if method not in made_of:
            folder, _, speculation = knowing[method]
            llm = llm_of(folder, speculation, budget_bytes=FEW_BYTES[method])
            made_of[method] = few_programs(llm, 32)
        return made_of.pop(method) if takes else made_of[method]

    yield of
    for llm in made_of.values():
        llm.close()


def told(outputs):
    return [(one.token_ids, one.finish_reason, one.logprobs) for one in outputs]


def share(llm, position=1):
    """Returns the share of right drafts; the first draft of a request repeats its last token."""
    stats = llm.stats().speculation
    return stats.accepted[position] / stats.drafted[position]


@pytest.mark.parametrize("method", ["eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def test_a_head_that_knows_the_model_is_right_whatever_happens_to_requests(
    knowing, served, method, monkeypatch
):
    """Prompts in chunks, preemptions, hits in the prefix cache, an abort, a sleep, new weights and a lost cache.

    At last no step is sent before the one before is read.
    """
    folder, model, _ = knowing[method]
    wanted = [model.greedy(prompt, 40) for prompt in PROMPTS]
    llm = served(method)
    drafter = llm.engine.speculation.drafter
    first = llm.generate(PROMPTS, GREEDY)
    assert sum(one.usage.preemptions for one in first) > 0
    stream = llm.stream(PROMPTS[2][::-1], GREEDY)
    for _ in range(9):
        next(stream)
    stream.close()
    second = llm.generate(PROMPTS, GREEDY)
    assert sum(one.usage.cached_tokens for one in second) > 0
    llm.sleep(level=2)
    assert not any(drafter._runner.params[name] is not None for name in drafter._head.shared)
    llm.update_weights(load_file(folder / "model.safetensors").items())
    llm.wake_up()
    third = llm.generate(PROMPTS, GREEDY)
    drafter._runner.owner.poison("the test says so")
    drafter._forget()
    fourth = llm.generate(PROMPTS, GREEDY)
    monkeypatch.setattr(llm.engine, "config", replace(llm.engine.config, overlap=False))
    before = llm.stats().speculation
    fifth = llm.generate(PROMPTS, GREEDY)
    after = llm.stats().speculation
    assert after.drafted[2] > before.drafted[2] + 10
    assert after.overlapped == before.overlapped
    for outputs in (first, second, third, fourth, fifth):
        assert [one.token_ids for one in outputs] == wanted
    # A text of fewer than five tokens has no drafts of a head, but zeros.
    assert share(llm, 1) > 0.9, llm.stats().speculation
    assert share(llm, 2) > 0.9, llm.stats().speculation
    assert drafter._failures == 0


# Of the same `LLM`, which this test closes.
@pytest.mark.parametrize("method", ["eagle3", pytest.param("mtp", marks=pytest.mark.slow)])
def test_a_head_keeps_no_weights_of_the_model_that_it_no_longer_needs(served, method):
    """Neither the old ones after an update, though nothing is drafted since, nor any after `close`."""
    llm = served(method, takes=True)
    drafter = llm.engine.speculation.drafter
    llm.generate(PROMPTS, GREEDY)
    for change in (lambda: llm.update_weights(jax.tree.map(jnp.copy, llm.params)), llm.close):
        old = [weakref.ref(leaf) for leaf in jax.tree.leaves(llm.params)]
        change()
        assert len(old) > 10
        assert [one() for one in old if one() is not None] == []
    assert not drafter._rows


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_drawn_tokens_and_log_probabilities_are_those_without_drafts(knowing, method):
    """Nothing is compiled late, and drafts that are drawn with the noise of their position are right."""
    folder, _, speculation = knowing[method]
    with llm_of(folder) as llm:
        wanted = told(llm.generate(PROMPTS, DRAWN))
        plain = llm.stats().steps
    with llm_of(folder, speculation, strict=True) as llm:
        llm.warm_up(batch=3, prompt_tokens=45, sampling=DRAWN)
        assert told(llm.generate(PROMPTS, DRAWN)) == wanted
        stats = llm.stats()
        assert stats.steps < plain // 2
        again = llm.generate(PROMPTS, DRAWN)
        assert told(again) == wanted
        assert again[0].usage.cached_tokens >= 32
        # The EAGLE-3 head lacks some of the ids that are drawn.
        assert share(llm, 1) > 0.85, stats.speculation
        assert stats.speculation.overlapped > stats.speculation.steps // 2
        assert llm.stats().compiled_late == 0


def random_head(name, folder):
    """Writes a model and a random head, which is seldom right; returns its definition and the options."""
    if name != "eagle3":
        definition = mtp_cases.CASES[name].save(folder)
        return definition, SpeculationConfig(method="mtp", tokens=3, adaptive=False)
    model, tensors = made.llama(folder), eagle3_files.eagle3_tensors(3, drafted=120)
    config = eagle3_files.save_eagle3(folder / "head", tensors, draft_vocab_size=120)
    embed = model.model.model.embed_tokens.weight.detach().numpy()
    definition = made.Eagle3(tensors, config, model, embed, reads=(2, 2, 1))
    return definition, SpeculationConfig(
        method="eagle3", model=folder / "head", tokens=3, adaptive=False
    )


SLOW = ("deepseek-v3", "glm-4.5", "qwen3-next")


# In the fast tests, tests/models/draft_heads/test_parity.py compares chains with the definition, and the test above
# the engine's drafts with a model that the head knows.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", *SLOW])
def test_drafts_are_those_of_the_definition(name, tmp_path, monkeypatch):
    """Behind each verified step, and so do the tokens."""
    definition, speculation = random_head(name, tmp_path / "model")
    model = definition.verifier
    seen = []
    with llm_of(tmp_path / "model", speculation) as llm:
        runner = llm.engine.runner
        run, layer = runner.run, runner.model.num_layers

        def recorded(spec, arrays):
            if isinstance(spec, PutDraftsSpec):
                (entries, _), drafts = arrays
                choices = runner.cache.layer(layer)
                texts, lengths = (
                    np.asarray(choices[role]) for role in ("token_history", "text_length")
                )
                seen.extend(
                    (texts[entry, : lengths[entry]].tolist(), drafted)
                    for entry, drafted in zip(entries, np.asarray(drafts).tolist(), strict=True)
                    if entry < len(texts) and lengths[entry] > 4
                )
            return run(spec, arrays)

        monkeypatch.setattr(runner, "run", recorded)
        outputs = llm.generate(PROMPTS, replace(GREEDY, max_tokens=16))
    assert [one.token_ids for one in outputs] == [model.greedy(prompt, 16) for prompt in PROMPTS]
    assert len(seen) > 30
    assert [drafts for _, drafts in seen] == [definition.chain(text, 3)[0] for text, _ in seen]


def right_with(knowing, method):
    """Returns the share of right drafts of a head that knows the model, and asserts that tokens are right."""
    folder, model, speculation = knowing[method]
    with llm_of(folder, speculation) as llm:
        outputs = llm.generate(PROMPTS[:1], GREEDY)
        assert outputs[0].token_ids == model.greedy(PROMPTS[0], 40)
        return share(llm)


@pytest.mark.slow
def test_hidden_states_of_other_positions_make_wrong_drafts(knowing, monkeypatch):
    at = KeptHidden.at
    monkeypatch.setattr(
        KeptHidden, "at", lambda kept, owner, places: at(kept, owner, np.maximum(places - 1, 0))
    )
    assert right_with(knowing, "eagle3") < 0.5


@pytest.mark.slow
def test_another_norm_makes_wrong_drafts(knowing, monkeypatch):
    """The layer reads what the final norm makes of the hidden state, and not what is before it."""
    read = load.read_mtp

    def before_the_norm(verifier):
        head = read(verifier)
        return replace(head, reads=tuple(at - 1 for at in head.reads))

    monkeypatch.setattr(load, "read_mtp", before_the_norm)
    assert right_with(knowing, "mtp") < 0.7


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_has_the_hidden_states_and_names_the_head(knowing, method):
    folder, _, speculation = knowing[method]
    plan = partial(explain_plan, folder, dtype="auto", max_model_len=128, free_bytes=None)
    text = plan(cache=CacheConfig(), engine=EngineConfig(speculation=speculation))
    assert "hidden_states" in text
    assert f"{speculation.model or 'the layer that predicts further tokens'} drafts" in text
    assert "hidden_states" not in plan(cache=CacheConfig())


def test_slots_follow_the_page_table():
    pool = HiddenPool(pages=9, page_size=4, width=2, dtype="float32")
    assert pool.slots((5, 2, 7), 3, 6).tolist() == [23, 8, 9, 10, 11, 28]


def changed(folder, target, *, tensors=None, **config):
    """Writes a copy of a head with other keys, and tensors changed by a function."""
    shutil.copytree(folder, target)
    keys = json.loads((target / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(keys))
    if tensors is not None:
        stored = load_file(target / "model.safetensors")
        tensors(stored)
        save_file(stored, target / "model.safetensors")
    return target


WRONG = {
    "vocabulary": ({"vocab_size": 300}, None, r"model's vocabulary of 300, and the model here has"),
    "width": ({"target_hidden_size": 32}, None, r"model's hidden size of 32, and the model here"),
    "architecture": ({"architectures": ["LlamaForCausalLM"]}, None, "an EAGLE-3 head has"),
    "layers": ({"num_hidden_layers": 2}, None, "num_hidden_layers = 2"),
    "reads": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}},
        None,
        "must list layers of a model of 4",
    ),
    "missing": ({}, lambda stored: stored.pop("fc.weight"), r"lacks 'fc.weight', of shape"),
    "ids": ({}, lambda stored: stored.pop("d2t"), r"drafts 160 of 199 ids and lacks 'd2t'"),
    "id": ({}, lambda stored: stored["d2t"].fill(80), "must name 160 different ids below 199"),
    "shape": (
        {},
        lambda stored: stored.update({"norm.weight": np.ones(7, np.float32)}),
        r"'norm.weight' has shape \[7\], wanted \[64\]",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_heads_that_do_not_fit_are_refused(knowing, tmp_path, what):
    folder, _, speculation = knowing["eagle3"]
    config, tensors, message = WRONG[what]
    head = changed(speculation.model, tmp_path / "head", tensors=tensors, **config)
    with pytest.raises(ValueError, match=message):
        llm_of(folder, replace(speculation, model=str(head)))


def test_a_head_given_as_a_smaller_model_is_refused(knowing):
    folder, _, speculation = knowing["eagle3"]
    with pytest.raises(ValueError, match='is an EAGLE-3 head; give method="eagle3" with it'):
        llm_of(folder, replace(speculation, method="draft_model"))


def test_models_without_such_layers_are_refused(knowing, tmp_path):
    folder, _, speculation = knowing["mtp"]
    with pytest.raises(ValueError, match="this llama model has no layers that predict further"):
        llm_of(knowing["eagle3"][0], speculation)
    without = changed(folder, tmp_path / "model", num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match="this glm4_moe model has no layers"):
        llm_of(without, speculation)

    def cut(stored):
        stored.pop("model.layers.2.eh_proj.weight")

    lacking = changed(folder, tmp_path / "lacking", tensors=cut)
    with pytest.raises(ValueError, match=r"lacks 'model.layers.2.eh_proj.weight'"):
        llm_of(lacking, speculation)
