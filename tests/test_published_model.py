"""A published model from file to text: SmolLM2-135M-Instruct in float32 on the CPU. Truth is Transformers."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxkv import LLM, CacheConfig, SamplingParams
from tests.smollm2 import missing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(missing()), reason=missing() or "never"),
]
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Zürich, 東京 und 😀:",
    "  12345 + 678 =",
]
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of Italy?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Is 7 a prime number?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And 8?"},
    ],
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    # In a process of its own: what Transformers imports to read GGUF leaves warnings behind.
    root = Path(__file__).parents[1]
    subprocess.run(
        [sys.executable, "-m", "tests.smollm2", folder],
        cwd=root,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"},
        check=True,
    )
    return folder


@pytest.fixture(scope="module")
def ours(directory):
    with LLM(
        directory,
        dtype="float32",
        max_model_len=256,
        cache=CacheConfig(max_sequences=4),
        progress=False,
    ) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs(directory):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(directory)


def continuation(theirs, ids):
    """Returns the ids that Transformers adds greedily."""
    import torch

    model, _ = theirs
    made = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=GREEDY.max_tokens,
        do_sample=False,
    )
    return made[0, len(ids) :].tolist()


def test_plain_prompts_continue_as_in_transformers(ours, theirs):
    _, tokenizer = theirs
    for prompt, output in zip(PROMPTS, ours.generate(PROMPTS, GREEDY), strict=True):
        ids = tokenizer.encode(prompt)
        assert output.prompt_token_ids == ids
        wanted = continuation(theirs, ids)
        assert output.token_ids == wanted
        assert output.text == tokenizer.decode(wanted, skip_special_tokens=True)
        assert "".join(piece.text for piece in ours.stream(prompt, GREEDY)) == output.text


def test_conversations_are_answered_as_in_transformers(ours, theirs):
    _, tokenizer = theirs
    ends = set()
    for conversation, output in zip(CONVERSATIONS, ours.chat(CONVERSATIONS, GREEDY), strict=True):
        made = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
        ids = list(made["input_ids"])
        assert output.prompt_token_ids == ids
        wanted = continuation(theirs, ids)
        assert output.token_ids == wanted
        assert output.text == tokenizer.decode(wanted, skip_special_tokens=True)
        ends.add(output.finish_reason)
    assert "stop" in ends


def test_log_probabilities_are_those_of_transformers(ours, theirs):
    import torch

    model, tokenizer = theirs
    text = (
        "A published model reads its own tokenizer, and its weights are those of a file in 4 bits."
    )
    ids = tokenizer.encode(text)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    wanted = torch.log_softmax(logits, -1)[torch.arange(len(ids) - 1), ids[1:]].numpy()
    with jax.default_matmul_precision("highest"):
        [got] = ours.score(text)
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, atol=1e-3)
