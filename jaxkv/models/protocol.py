"""The interface of models, implemented by `Decoder` for built-in families and by `FlaxModel` for users' modules."""

from typing import Any, Protocol, runtime_checkable

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from jaxkv.batch import StepBatch
from jaxkv.cache.spec import LayerSpec
from jaxkv.cache.state import Cache

Params = Any
"""A pytree of arrays; only the model knows its structure."""


@runtime_checkable
class Model(Protocol):
    """A hashable description of a computation, without arrays, static under `jax.jit`."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits; token ids are below it."""
        ...

    @property
    def num_layers(self) -> int:
        """Number of layers, numbered from 0; those without a cache may be counted."""
        ...

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model supports, in tokens."""
        ...

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt must be computed in one step, because its tokens' results depend on its length."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's bits depend on its own sequence alone, see `pallas_kernels.fixed_order`."""
        ...

    @property
    def implementation(self) -> str | None:
        """The family that every op must use, one of `pallas_kernels.families.FAMILIES`; `None` for the best."""
        ...

    def running(self, implementation: str) -> "Model":
        """Returns the same model with another family of implementations."""
        ...

    def cache_specs(self, *, page_size: int, dtype: str) -> tuple[LayerSpec, ...]:
        """Returns the cache spec of each layer.

        Args:
            page_size: tokens per page.
            dtype: dtype name of keys and values.
        """
        ...

    def init_params(self, key: PRNGKeyArray, dtype: DTypeLike) -> Params:
        """Returns random parameters in `dtype`, for tests and benchmarks."""
        ...

    def forward(
        self, params: Params, cache: Cache, batch: StepBatch
    ) -> tuple[Cache, Float[Array, "tokens hidden_size"]]:
        """Returns the cache with the new tokens written, and their hidden states after the final norm.

        The returned cache has the same leaves in the same order, so it can be donated.
        """
        ...

    def logits(
        self, params: Params, hidden: Float[Array, "rows hidden_size"]
    ) -> Float[Array, "rows vocab_size"]:
        """Returns the float32 logits of each hidden state."""
        ...


@runtime_checkable
class TakesBack(Model, Protocol):
    """A model that can leave the last tokens of a step out of its recurrent states, such as rejected drafts."""

    def forward_unsettled(
        self, params: Params, cache: Cache, batch: StepBatch
    ) -> tuple[Cache, Float[Array, "tokens hidden_size"], Any]:
        """Returns what `forward` does, with all recurrent states as they were, and what `settled` needs."""
        ...

    def settled(
        self,
        cache: Cache,
        batch: StepBatch,
        writes: Any,  # noqa: ANN401 - what `forward_unsettled` returned
        rejected: Int[Array, " rows"],
        /,
    ) -> Cache:
        """Returns the cache with the recurrent states after a step without the last `rejected` tokens of each row."""
        ...
