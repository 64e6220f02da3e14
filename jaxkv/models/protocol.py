"""What the rest of the package asks of a model. A built-in family, or a user's own module, answers it."""

from typing import Any, Protocol, runtime_checkable

from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from jaxkv.batch import StepBatch
from jaxkv.cache.spec import LayerSpec
from jaxkv.cache.state import Cache

Params = Any
"""A pytree of arrays that only the model itself looks into."""


@runtime_checkable
class Model(Protocol):
    """A hashable description of a computation: it holds no arrays and is static to the compiler."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits; token ids lie below it."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers that remember something; they are numbered from 0."""
        ...

    @property
    def max_positions(self) -> int:
        """Longest sequence the model is meant for."""
        ...

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt must not be cut into several steps, because its length changes what a token computes."""
        ...

    @property
    def implementation(self) -> str | None:
        """What every op insists on, one of `pallas_kernels.families.FAMILIES`; `None` takes the best."""
        ...

    def running(self, implementation: str) -> "Model":
        """Returns the same model insisting on an implementation."""
        ...

    def cache_specs(self, *, page_size: int, dtype: str) -> tuple[LayerSpec, ...]:
        """Returns what each layer remembers, keys and values in `dtype`."""
        ...

    def init_params(self, key: PRNGKeyArray, dtype: DTypeLike) -> Params:
        """Draws random parameters, for tests and benchmarks."""
        ...

    def forward(
        self, params: Params, cache: Cache, batch: StepBatch
    ) -> tuple[Cache, Float[Array, "tokens hidden_size"]]:
        """Remembers the new tokens and returns their hidden states after the final norm.

        The returned cache has the leaves of the given one, in the same order.
        """
        ...

    def logits(
        self, params: Params, hidden: Float[Array, "rows hidden_size"]
    ) -> Float[Array, "rows vocab_size"]:
        """Scores every token after each hidden state, in float32."""
        ...
