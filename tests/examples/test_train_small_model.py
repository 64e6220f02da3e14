"""The training recipe of the embedded model, on a text and sizes small enough for a CPU."""

import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.examples.model_card import write_card
from jaxkv.examples.python_text import (
    END,
    is_held_out,
    line_starts,
    read_sources,
    save_tokenizer,
    tokenise,
    train_tokenizer,
)
from jaxkv.examples.small_llama import SmallLlama, forward, init_params, save_hf
from jaxkv.examples.train_small_model import (
    Recipe,
    describe_data,
    describe_result,
    loss_of,
    sample,
    train,
)

TINY = SmallLlama(
    vocab_size=300,
    hidden_size=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    max_positions=64,
)
RECIPE = Recipe(
    steps=30,
    batch_size=8,
    context=32,
    warmup_steps=5,
    steps_per_check=10,
    peak_learning_rate=1e-2,
    compute_dtype="float32",
)
TEXTS = [
    f"def add_{name}(first, second):\n    return first + second + {number}\n\n"
    for number, name in enumerate(("one", "two", "three", "four", "five", "six"))
]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, TINY.vocab_size)


@pytest.fixture(scope="module")
def trained(tokenizer):
    stream = tokenise(tokenizer, TEXTS)
    return train(TINY, RECIPE, tokenizer, stream, stream[:70])


@pytest.mark.slow
def test_the_loss_falls_and_the_best_weights_are_the_ones_kept(tokenizer, trained):
    params, history = trained
    assert history[-1]["train"] < 0.7 * history[0]["train"] < 0.7 * math.log(TINY.vocab_size)
    windows = tokenise(tokenizer, TEXTS)[: 2 * (RECIPE.context + 1)].reshape(2, -1)
    kept = loss_of(params, jnp.asarray(windows), None, model=TINY, recipe=RECIPE)
    best = min(entry["held_out"] for entry in history)
    np.testing.assert_allclose(kept, best, rtol=1e-5)


def test_a_prompt_is_cut_as_the_same_text_was_in_training(tokenizer):
    whole = tokenizer.encode("def add_one(first, second):\n    return first").ids
    for cut in ("def ", "def add_one(first, ", "def add_one(first, second):\n"):
        ids = tokenizer.encode(cut).ids
        assert ids == whole[: len(ids)]
    assert tokenizer.decode(whole) == "def add_one(first, second):\n    return first"


def test_windows_begin_where_a_line_does_and_fit_the_stream(tokenizer):
    stream = tokenise(tokenizer, TEXTS)
    starts = line_starts(tokenizer, stream, RECIPE.context)
    assert len(starts)
    for start in starts:
        before = tokenizer.decode([int(stream[start - 1])], skip_special_tokens=False)
        assert before == END or before.endswith("\n")
        assert start + RECIPE.context + 1 <= len(stream)
    with pytest.raises(ValueError, match="no line is followed by"):
        line_starts(tokenizer, stream[:10], RECIPE.context)


def test_only_what_people_wrote_is_read_and_one_file_in_twenty_is_held_out(tmp_path):
    for name in (
        "b.py",
        "a/x.py",
        "test/t.py",
        "site-packages/p.py",
        "_sysconfigdata_m.py",
        "c.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    assert read_sources(tmp_path) == {"a/x.py": "# a/x.py\n", "b.py": "# b.py\n"}
    with pytest.raises(ValueError, match="no Python sources"):
        read_sources(tmp_path / "test" / "none")
    share = sum(is_held_out(f"module_{i}.py") for i in range(4000)) / 4000
    assert 0.03 < share < 0.07


def test_a_later_token_never_changes_an_earlier_logit():
    params = init_params(TINY, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (1, 16), 0, TINY.vocab_size)
    changed = tokens.at[0, 10].set((tokens[0, 10] + 1) % TINY.vocab_size)
    run = jax.jit(partial(forward, TINY))
    before, after = run(params, tokens), run(params, changed)
    np.testing.assert_array_equal(before[0, :10], after[0, :10])
    assert jnp.abs(before[0, 10:] - after[0, 10:]).max() > 0


def test_the_card_says_what_was_done(tmp_path, trained):
    params, history = trained
    data = describe_data({"a.py": "x = 1\n"}, "3.12.1", num_tokens=5)
    result = describe_result(params, history, bytes_per_token=2.0, seconds=1.0)
    assert result["held_out_loss"] == min(entry["held_out"] for entry in history)
    record = {"data": data, "recipe": {"steps": 30}, "result": result}
    write_card(tmp_path, record, {"`def `:": "def f(): ..."})
    assert json.loads((tmp_path / "training.json").read_text()) == record
    card = (tmp_path / "README.md").read_text()
    assert data["sha256"] in card
    assert "def f(): ..." in card


@pytest.mark.torch
def test_the_saved_directory_is_an_ordinary_hugging_face_model(tmp_path, tokenizer, trained):
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    params, _ = trained
    save_hf(TINY, params, tmp_path, dtype="float32")
    save_tokenizer(tokenizer, TINY.max_positions, tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(tmp_path)("def add_")["input_ids"]
    assert ids == tokenizer.encode("def add_").ids
    tokens = np.asarray(tokenise(tokenizer, TEXTS)[:48], np.int32)[None]
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    with jax.default_matmul_precision("highest"):  # on a GPU the default is TF32
        ours = forward(TINY, params, jnp.asarray(tokens))
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    prompt = torch.tensor([ids])
    continued = model.generate(prompt, do_sample=False, max_new_tokens=12)[0].tolist()
    ours = sample(TINY, params, tokenizer, "def add_", temperature=0.0, max_tokens=12)
    assert tokenizer.decode(continued) == ours
