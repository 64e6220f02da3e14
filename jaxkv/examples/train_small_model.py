"""Trains the embedded default model on the Python standard library's own sources and writes a Hugging Face directory.

`python -m jaxkv.examples.train_small_model --out DIR` runs the recipe. `python_text.py` has the training text and
`small_llama.py` the model. It needs optax, and a GPU unless `--steps` is small.
"""

import argparse
import hashlib
import json
import math
import platform
import shutil
import sysconfig
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from tokenizers import Tokenizer

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
from jaxkv.examples.small_llama import Params, SmallLlama, forward, init_params, save_hf

PROMPTS = ("def ", "import ", "class ", "for i in range(")


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of the training."""

    steps: int = 3000
    batch_size: int = 32
    context: int = 1024
    peak_learning_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    dropout: float = 0.2
    steps_per_check: int = 100
    compute_dtype: str = "bfloat16"
    seed: int = 0


def cut_windows(
    stream: Int[Array, " tokens"], starts: Int[Array, " batch"], size: int
) -> Int[Array, "batch window"]:
    """Copies `size` tokens from each start."""
    return jax.vmap(lambda start: jax.lax.dynamic_slice(stream, (start,), (size,)))(starts)


def loss_of(
    params: Params,
    windows: Int[Array, "batch window"],
    key: PRNGKeyArray | None,
    *,
    model: SmallLlama,
    recipe: Recipe,
) -> Float[Array, ""]:
    """Returns the mean negative log-likelihood, in nats per token, of each window's tokens after its first."""
    dtype = jnp.dtype(recipe.compute_dtype)
    logits = forward(model, params, windows[:, :-1], dtype=dtype, dropout=recipe.dropout, key=key)
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Returns AdamW with warm-up, a cosine decay to a hundredth of the peak, and weight decay of matrices only."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        recipe.peak_learning_rate,
        min(recipe.warmup_steps, recipe.steps // 2),
        recipe.steps,
        recipe.peak_learning_rate / 100,
    )
    adamw = optax.adamw(
        schedule,
        b2=0.95,
        weight_decay=recipe.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def train(
    model: SmallLlama,
    recipe: Recipe,
    tokenizer: Tokenizer,
    train_stream: Int[np.ndarray, " tokens"],
    held_out_stream: Int[np.ndarray, " held_out_tokens"],
) -> tuple[Params, list[dict[str, int | float]]]:
    """Runs every step and returns the weights of the best held-out loss, with the history of the checks."""
    optimizer = make_optimizer(recipe)
    loss = partial(loss_of, model=model, recipe=recipe)
    starts = jnp.asarray(line_starts(tokenizer, train_stream, recipe.context))
    stream = jnp.asarray(train_stream)
    size = recipe.context + 1
    held_out = held_out_stream[: len(held_out_stream) // size * size].reshape(-1, size)
    init_key, run_key = jax.random.split(jax.random.key(recipe.seed))

    def one_step(state: tuple, step: Array) -> tuple[tuple, Array]:
        params, moments = state
        start_key, drop_key = jax.random.split(jax.random.fold_in(run_key, step))
        chosen = jax.random.choice(start_key, starts, (recipe.batch_size,))
        windows = cut_windows(stream, chosen, size)
        value, gradients = jax.value_and_grad(loss)(params, windows, drop_key)
        # optax raises its decay rates to an integer step count, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    run_steps = jax.jit(partial(jax.lax.scan, one_step), donate_argnums=0)
    check = jax.jit(lambda params, windows: loss(params, windows, None))
    params = init_params(model, init_key)
    state = (params, optimizer.init(params))
    best, best_loss, history = params, math.inf, []
    for begin in range(0, recipe.steps, recipe.steps_per_check):
        end = min(begin + recipe.steps_per_check, recipe.steps)
        state, values = run_steps(state, jnp.arange(begin, end))
        held_out_loss = float(np.mean([check(state[0], window[None]) for window in held_out]))
        entry = {"step": end, "train": float(values.mean()), "held_out": held_out_loss}
        history.append(entry)
        print(json.dumps(entry), flush=True)
        if not math.isfinite(held_out_loss):
            raise FloatingPointError(f"the held-out loss is {held_out_loss} after step {end}")
        if held_out_loss < best_loss:
            best, best_loss = jax.tree.map(jnp.copy, state[0]), held_out_loss
    return best, history


@partial(jax.jit, static_argnames="model")
def logits_at(
    model: SmallLlama, params: Params, token_ids: Int[Array, "1 tokens"], last: Int[Array, ""]
) -> Float[Array, " vocab"]:
    """Returns the logits after token `last`; later tokens are padding, which causal attention ignores."""
    return forward(model, params, token_ids)[0, last]


def sample(
    model: SmallLlama,
    params: Params,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    temperature: float,
    max_tokens: int = 100,
    seed: int = 0,
) -> str:
    """Returns the continuation of a prompt, computed without a cache: every token recomputes the whole text."""
    ids = tokenizer.encode(prompt).ids
    # Rounded up, so that prompts of similar lengths share one compiled program.
    room = np.zeros((1, -(-(len(ids) + max_tokens) // 64) * 64), np.int32)
    rng = np.random.default_rng(seed)
    for _ in range(max_tokens):
        room[0, : len(ids)] = ids
        last = jnp.asarray(len(ids) - 1)
        logits = np.asarray(logits_at(model, params, jnp.asarray(room), last))
        if temperature > 0:
            logits = logits / temperature + rng.gumbel(size=logits.shape)
        ids.append(int(logits.argmax()))
        if ids[-1] == tokenizer.token_to_id(END):
            break
    return tokenizer.decode(ids)


def parse_options() -> argparse.Namespace:
    """Reads the command line and finds the licence that must accompany the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument(
        "--source",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="a standard library (default: this Python's)",
    )
    parser.add_argument(
        "--python-version", default=platform.python_version(), help="the version of --source"
    )
    parser.add_argument("--licence", type=Path, help="its licence (default: SOURCE/LICENSE.txt)")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    options = parser.parse_args()
    options.licence = options.licence or options.source / "LICENSE.txt"
    if not options.licence.is_file():
        parser.error(f"{options.licence} is missing; pass --licence with the licence of --source")
    return options


def describe_data(sources: dict[str, str], version: str, num_tokens: int) -> dict[str, str | int]:
    """Returns sizes and SHA-256 of the training text, and its Python version."""
    text = "".join(sources.values()).encode()
    return {
        "python_version": version,
        "files": len(sources),
        "held_out_files": sum(map(is_held_out, sources)),
        "bytes": len(text),
        "tokens": num_tokens,
        "sha256": hashlib.sha256(text).hexdigest(),
    }


def describe_result(
    params: Params, history: list[dict[str, int | float]], bytes_per_token: float, seconds: float
) -> dict[str, str | int | float]:
    """Returns the losses at the check with the best held-out loss, the training time, and the device."""
    best = min(history, key=lambda entry: entry["held_out"])
    return {
        "parameters": sum(leaf.size for leaf in params.values()),
        "best_step": best["step"],
        "train_loss": best["train"],
        "held_out_loss": best["held_out"],
        "held_out_bits_per_byte": best["held_out"] / math.log(2) / bytes_per_token,
        "seconds": round(seconds),
        "device": jax.devices()[0].device_kind,
        "date": datetime.now(UTC).date().isoformat(),
        "jax": jax.__version__,
    }


def main() -> None:
    """Trains by the recipe, saves the model directory and prints samples."""
    options = parse_options()
    began = time.monotonic()
    model, recipe = SmallLlama(), Recipe(steps=options.steps)
    sources = read_sources(options.source)
    train_texts = [text for name, text in sources.items() if not is_held_out(name)]
    held_out_texts = [text for name, text in sources.items() if is_held_out(name)]
    tokenizer = train_tokenizer(train_texts, model.vocab_size)
    stream, held_out = (tokenise(tokenizer, texts) for texts in (train_texts, held_out_texts))
    params, history = train(model, recipe, tokenizer, stream, held_out)

    save_hf(model, params, options.out)
    save_tokenizer(tokenizer, model.max_positions, options.out)
    shutil.copyfile(options.licence, options.out / "LICENSE-PYTHON.txt")
    bytes_per_token = len("".join(held_out_texts).encode()) / len(held_out)
    record = {
        "data": describe_data(sources, options.python_version, len(stream) + len(held_out)),
        "model": asdict(model),
        "recipe": asdict(recipe),
        "result": describe_result(params, history, bytes_per_token, time.monotonic() - began),
        "history": history,
    }
    samples = {
        f"`{prompt}` at temperature {heat}:": sample(
            model, params, tokenizer, prompt, temperature=heat
        )
        for prompt in PROMPTS
        for heat in (0.0, 0.8)
    }
    write_card(options.out, record, samples)
    for title, text in samples.items():
        print(f"--- {title}\n{text}")


if __name__ == "__main__":
    main()
