"""Trains the small model of the package by GRPO, in one process with its engine: `python -m jaxkv.examples.grpo`.

The model completes the beginning of a line of Python. The reward is 1 if the line ends and `ast.parse` reads it, so it
is verified and not learned. Each step generates a group of samples per prompt, gives each sample the advantage of its
reward over its group's mean (GRPO; Shao et al., DeepSeekMath, 2024), and takes one step of clipped policy gradient on
the log-probabilities that the engine reported. The engine then gets the new weights in place.
"""

import argparse
import ast
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int
from safetensors.flax import load_file

from jaxkv import LLM, CacheConfig, SamplingParams, default_model
from jaxkv._pytree import pytree
from jaxkv.bench.plots.charts import Lines, Series
from jaxkv.bench.plots.svg import as_svg_file
from jaxkv.examples.small_llama import SmallLlama, forward
from jaxkv.rollout import Rollout

PROMPTS = (
    "result = ",
    "print(",
    "assert ",
    "data = [",
    "from ",
    "value = self",
    "raise ",
    "x, y = ",
)


Figures = dict[str, Any]
"""Numbers of one step by name."""


@dataclass(frozen=True)
class Recipe:
    """The sizes of a run.

    Attributes:
        steps: steps of training.
        samples: samples per prompt, which make a group.
        max_tokens: most tokens of a sample.
        learning_rate: of Adam.
        clip: the ratio of new to old probabilities is clipped to within this distance of 1.
        seed: of the rollouts.
    """

    steps: int = 60
    samples: int = 16
    max_tokens: int = 16
    learning_rate: float = 1e-4
    clip: float = 0.2
    seed: int = 0


class Policy(nnx.Module):
    """The decoder that is trained, with parameters under their Hugging Face names."""

    def __init__(self, sizes: SmallLlama, weights: dict[str, Array]) -> None:
        self.sizes = sizes
        self.weights = nnx.Dict({name: nnx.Param(weight) for name, weight in weights.items()})

    def named(self) -> Iterator[tuple[str, Array]]:
        """Yields (name, array) pairs, which `LLM.update_weights` takes."""
        return ((name, param[...]) for name, param in self.weights.items())

    def logprobs(self, batch: "Batch") -> Float[Array, "samples output_width"]:
        """Returns the log-probability of each output token; those of padding are arbitrary."""
        logits = forward(self.sizes, dict(self.named()), batch.ids)
        columns = jnp.arange(batch.mask.shape[1])[None, :]
        after = batch.prompt_lens[:, None] + columns - 1
        logprobs = jax.nn.log_softmax(jnp.take_along_axis(logits, after[:, :, None], axis=1))
        output_ids = jnp.take_along_axis(batch.ids, after + 1, axis=1)
        return jnp.take_along_axis(logprobs, output_ids[:, :, None], axis=2)[:, :, 0]


@pytree
class Batch:
    """The samples of one step.

    Attributes:
        ids: prompt and output of each sample from the first column on; anything behind them.
        prompt_lens: tokens of each prompt.
        mask: which output columns are tokens.
        logprobs: log-probabilities that the rollout reported.
        advantages: of each sample over its group.
    """

    ids: Int[Array, "samples width"]
    prompt_lens: Int[Array, " samples"]
    mask: Bool[Array, "samples output_width"]
    logprobs: Float[Array, "samples output_width"]
    advantages: Float[Array, " samples"]


def parses(line: str) -> bool:
    """Returns whether a line is a Python program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(line)
        except (SyntaxError, ValueError):
            return False
    return True


def rewards_of(prompts: Sequence[str], rollout: Rollout) -> Float[np.ndarray, " samples"]:
    """Returns 1 for each sample that ends its line and makes it a Python program, and 0 for the others."""
    samples = [
        (prompts[index], one)
        for index, group in enumerate(rollout.outputs)
        for one in group.outputs
    ]
    good = [one.finish_reason == "stop" and parses(prompt + one.text) for prompt, one in samples]
    return np.asarray(good, np.float32)


def advantages_of(
    rewards: Float[np.ndarray, " samples"], samples: int
) -> Float[np.ndarray, " samples"]:
    """Returns each reward's distance from the mean of its group, in standard deviations of the group."""
    groups = rewards.reshape(-1, samples)
    spread = groups.std(axis=1, keepdims=True) + 1e-4
    return ((groups - groups.mean(axis=1, keepdims=True)) / spread).reshape(-1)


def batch_of(rollout: Rollout, advantages: Float[np.ndarray, " samples"]) -> Batch:
    """Returns what a train step needs of a rollout; texts are moved to the first column."""
    ids = np.concatenate([rollout.prompt_ids, rollout.output_ids], axis=1)
    lens = rollout.prompt_mask.sum(axis=1, dtype=np.int32)
    start = rollout.prompt_ids.shape[1] - lens
    return Batch(
        ids=jnp.asarray(np.stack([np.roll(row, -at) for row, at in zip(ids, start, strict=True)])),
        prompt_lens=jnp.asarray(lens),
        mask=jnp.asarray(rollout.output_mask),
        logprobs=jnp.asarray(rollout.logprobs),
        advantages=jnp.asarray(advantages),
    )


def loss_of(policy: Policy, batch: Batch, clip: float) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the clipped loss per token, and the RMS of trainer's less rollout's log-probabilities in nats."""
    change = jnp.where(batch.mask, policy.logprobs(batch) - batch.logprobs, 0.0)
    ratio, advantages = jnp.exp(change), batch.advantages[:, None]
    clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    tokens = jnp.sum(batch.mask).astype(jnp.float32)
    loss = -jnp.sum(jnp.where(batch.mask, gain, 0.0)) / tokens
    return loss, jnp.sqrt(jnp.sum(change**2) / tokens)


def train(
    directory: Path,
    sizes: SmallLlama,
    recipe: Recipe,
    prompts: Sequence[str] = PROMPTS,
    report: Callable[[Figures], None] = lambda entry: None,
) -> tuple[Policy, list[Figures]]:
    """Trains a model directory's weights in float32; returns the policy, and per step the figures.

    Args:
        directory: a model directory.
        sizes: of its model.
        recipe: sizes of the run.
        prompts: beginnings of lines.
        report: called with each step's figures: mean reward, RMS of trainer's less rollout's log-probabilities, the
            version of the weights that generated, and seconds.
    """
    loaded = load_file(directory / "model.safetensors")
    policy = Policy(sizes, {name: leaf.astype(jnp.float32) for name, leaf in loaded.items()})
    optimizer = nnx.Optimizer(policy, optax.adam(recipe.learning_rate), wrt=nnx.Param)
    rows = len(prompts) * recipe.samples
    cache = CacheConfig(max_sequences=rows, page_size=16)
    llm = LLM(
        directory, dtype="float32", max_model_len=64, cache=cache, seed=recipe.seed, progress=False
    )
    sampling = SamplingParams(
        temperature=1.0, n=recipe.samples, max_tokens=recipe.max_tokens, stop=("\n",)
    )

    @nnx.jit
    def update(policy: Policy, optimizer: nnx.Optimizer, batch: Batch) -> Float[Array, ""]:
        gradients, rms = nnx.grad(lambda policy: loss_of(policy, batch, recipe.clip), has_aux=True)(
            policy
        )
        # optax raises its decay rates to an integer step count, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(policy, gradients)
        return rms

    history = []
    with llm:
        for step in range(recipe.steps):
            begin = time.perf_counter()
            rollout = llm.rollout(prompts, sampling)
            rewards = rewards_of(prompts, rollout)
            batch = batch_of(rollout, advantages_of(rewards, recipe.samples))
            version = llm.weight_version
            rms = update(policy, optimizer, batch)
            llm.update_weights(policy.named())
            history.append(
                {
                    "step": step,
                    "reward": float(rewards.mean()),
                    "rms": float(rms),
                    "version": version,
                    "seconds": round(time.perf_counter() - begin, 2),
                }
            )
            report(history[-1])
    return policy, history


def write_curve(history: Sequence[Figures], path: Path) -> None:
    """Writes the mean reward of each step, and its mean over ten steps, as one SVG file."""
    rewards = [entry["reward"] for entry in history]
    means = [float(np.mean(rewards[max(0, at - 9) : at + 1])) for at in range(len(rewards))]
    chart = Lines(
        title="GRPO on the small model: share of lines that are Python",
        x_label="step",
        y_label="mean reward",
        series=tuple(
            Series(
                label=label, points=tuple((float(at), y) for at, y in enumerate(line)), color=color
            )
            for color, (label, line) in enumerate(
                {"step": rewards, "mean of the last ten": means}.items()
            )
        ),
    )
    path.write_text(as_svg_file(chart))


def main() -> None:
    """Trains, prints each step's figures, and writes the reward curve."""
    parser = argparse.ArgumentParser(description="Trains the small model by GRPO.")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--curve", type=Path, default=Path("grpo.svg"), help="default: %(default)s")
    options = parser.parse_args()
    recipe = Recipe(steps=options.steps)
    print(json.dumps({"device": jax.devices()[0].device_kind} | asdict(recipe)))
    _, history = train(
        default_model.path(),
        SmallLlama(),
        recipe,
        report=lambda one: print(json.dumps(one), flush=True),
    )
    write_curve(history, options.curve)


if __name__ == "__main__":
    main()
