"""`JaxkvRollout`: an `LLM` as the rollout engine of a tunix `RLCluster`, in the trainer's process and on its arrays.

It needs `google-tunix`, and is written for 0.1.7.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports]
    BaseRollout,
    RolloutConfig,
    RolloutOutput,
)

from jaxkv.config.sampling import SamplingParams
from jaxkv.llm import LLM
from jaxkv.models.protocol import Params

Weights = Callable[[Any], Params | Iterable[tuple[str, Array]]]
"""Turns the `nnx.State` of the trained parameters into what `LLM.update_weights` takes."""


class JaxkvRollout(BaseRollout):
    """Generates with an `LLM`; tunix makes it, so bind the first two arguments.

    Examples:
        >>> engine = functools.partial(JaxkvRollout, llm=llm, weights=named)
        >>> config = ClusterConfig(rollout_engine=engine, ...)

    Log-probabilities of samples are those of the model's logits divided by the temperature, as tunix computes its own.
    A prompt longer than `max_prompt_length` is refused, not cut.

    Args:
        llm: serves the rollouts.
        weights: turns the actor's state into what `LLM.update_weights` takes: a tree like `LLM.params`, or (name,
            array) pairs under a checkpoint's names.
        rollout_actor: the trained module, whose weights the engine gets at once.
        tokenizer: names the ids of padding and of the end.
        mesh: not used; the arrays stay where the engine has them.
        rollout_config: not used; each call of `generate` has its own.
    """

    def __init__(
        self,
        *,
        llm: LLM,
        weights: Weights,
        rollout_actor: Any,  # noqa: ANN401 - an nnx module
        tokenizer: Any,  # noqa: ANN401 - tunix's adapter
        mesh: Any = None,  # noqa: ANN401 - tunix passes it by name
        rollout_config: Any = None,  # noqa: ANN401 - likewise
    ) -> None:
        del mesh, rollout_config
        self._llm, self._weights = llm, weights
        self._tokenizer = tokenizer
        self.update_params(nnx.state(rollout_actor, nnx.Param))

    def generate(
        self, prompts: Sequence[str], rollout_config: RolloutConfig, **kwargs: object
    ) -> RolloutOutput:
        """Generates one sample per prompt; equal neighbours are the samples of one prompt and share its pages.

        Raises:
            ValueError: a prompt is longer than `max_prompt_length`, or there are further arguments.
        """
        if kwargs:
            raise ValueError(f"JaxkvRollout.generate has no arguments {', '.join(kwargs)}")
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        sampling = _sampling(rollout_config)
        rollout = self._llm.rollout(
            [prompt for prompt, _ in groups],
            [replace(sampling, n=count) for _, count in groups],
            prompt_width=rollout_config.max_prompt_length,
            pad_id=self.pad_id(),
        )
        lengths = rollout.output_mask.sum(axis=1)
        kept = [slice(length) for length in lengths]
        logprobs = [row[part] for row, part in zip(rollout.logprobs, kept, strict=True)]
        return RolloutOutput(
            text=rollout.texts,
            logits=None,
            tokens=[row[part] for row, part in zip(rollout.output_ids, kept, strict=True)],
            left_padded_prompt_tokens=rollout.prompt_ids,
            logprobs=logprobs if rollout_config.return_logprobs else None,
        )

    def get_per_token_logps(
        self,
        prompt_tokens: Int[Array, "samples prompt_width"],
        completion_tokens: Int[Array, "samples output_width"],
    ) -> Float[Array, "samples output_width"]:
        """Returns the model's log-probability of each completion token, from `LLM.score`; 0 for padding.

        Args:
            prompt_tokens: prompts, padded on the left.
            completion_tokens: completions, padded on the right.
        """
        pad, ends = self.pad_id(), self.eos_id() == self.pad_id()
        prompts = [_without_padding(row[::-1], pad)[::-1] for row in np.asarray(prompt_tokens)]
        outputs = [_without_padding(row, pad, ends=ends) for row in np.asarray(completion_tokens)]
        texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
        found = np.zeros(completion_tokens.shape, np.float32)
        for row, output, scores in zip(found, outputs, self._llm.score(texts), strict=True):
            row[: len(output)] = scores[len(scores) - len(output) :]
        return jnp.asarray(found)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:  # noqa: ANN401
        """Gives the engine new weights, in place; what the old ones cached is dropped.

        Args:
            params: `nnx.State` of the trained parameters.
            filter_types: what `params` was filtered by; not needed, because `weights` reads the state.
        """
        del filter_types
        self._llm.update_weights(self._weights(params))

    def pad_id(self) -> int:
        """The id of padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The id that ends a text."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Returns `None`: the engine has arrays of its own, so tunix calls `update_params` after each step."""
        return


def _sampling(config: RolloutConfig) -> SamplingParams:
    """Returns tunix's options as ours; `eos_tokens` replace the model's own end ids."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        max_tokens=config.max_tokens_to_generate,
        seed=_seed(config.seed),
        stop_token_ids=tuple(config.eos_tokens or ()),
        ignore_eos=bool(config.eos_tokens),
        logprobs=0,
        logprobs_mode="temperature" if config.temperature > 0 else "raw",
    )


def _seed(seed: Any) -> int | None:  # noqa: ANN401 - an int, a PRNG key or its data
    """Returns a seed of 64 bits; `None` if there is none."""
    if seed is None or isinstance(seed, int):
        return seed
    words = jax.random.key_data(seed) if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) else seed
    bits = np.asarray(words).ravel()
    return int(bits[0]) << 32 | int(bits[-1])


def _without_padding(row: np.ndarray, pad: int, *, ends: bool = False) -> list[int]:
    """Returns a row up to the padding at its end, or with the first padding if that `ends` a text."""
    real = np.flatnonzero(row != pad)
    length = int(real[-1]) + 1 if real.size else 0
    return row[: length + ends].tolist()
