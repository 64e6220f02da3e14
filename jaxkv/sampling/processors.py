"""The registered logits processors: the layout of their arguments, and how a step applies them.

All processors of an engine are part of every program with the feature `processors`. A row names some of them; which,
and with which arguments, are int32 words in the row's entry of the cache's sampling group. So other requests, names
and arguments need no other program.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int

from jaxkv.wording import listed, shown

_BITS = 32


class TokenHistory(NamedTuple):
    """The tokens of one row so far, on the device.

    Attributes:
        ids: int32 `[max_tokens]`, the prompt's ids and then the generated ones. From `length` on they are the
            vocabulary's size, which is past the end of the logits, so `mode="drop"` leaves them out.
        length: int32 `[]`, number of tokens, the prompt's included.
        prompt_length: int32 `[]`, number of tokens of the prompt; at most `length`.
    """

    ids: Int[Array, " max_tokens"]
    length: Int[Array, ""]
    prompt_length: Int[Array, ""]


@runtime_checkable
class LogitsProcessor(Protocol):
    """A pure JAX function on the logits of one row; JAX maps it over the rows of a batch.

    It may have further parameters, each with a default: a bool, an int, a float, or an array of these. The default
    declares dtype (bool, int32 or float32) and shape, and a request may give another value.
    """

    def __call__(
        self, logits: Float32[Array, " vocab"], history: TokenHistory, /, **arguments: Array
    ) -> Float32[Array, " vocab"]:
        """Returns the logits from which the row's next token is sampled.

        Args:
            logits: logits after penalties and biases.
            history: the row's tokens.
            arguments: the request's arguments.
        """
        ...


@dataclass(frozen=True)
class Parameter:
    """A parameter of a processor that requests may set.

    Attributes:
        name: its name.
        dtype: "bool", "int32" or "float32".
        shape: shape of its values.
        default: the default as words.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    default: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of words, one per element."""
        return len(self.default)

    def decode(self, words: Int[Array, "rows size"]) -> Array:
        """Returns the values of some rows, [rows, *shape]."""
        values = words.reshape(-1, *self.shape)
        if self.dtype == "bool":
            return values != 0
        return lax.bitcast_convert_type(values, jnp.dtype(self.dtype))


def encode(value: object) -> tuple[str, tuple[int, ...], np.ndarray]:
    """Returns dtype name, shape and int32 words of a number or an array of numbers.

    Raises:
        ValueError: its elements are no bools, ints of 32 bits or floats, or it holds NaN.
    """
    array = np.asarray(value)
    if array.dtype.kind == "b":
        return "bool", array.shape, array.astype(np.int32).ravel()
    if array.dtype.kind in "iu":
        if array.size and not -(2**31) <= array.min() <= array.max() < 2**31:
            raise ValueError(f"its ints must fit into 32 bits, got {shown(value)}")
        return "int32", array.shape, array.astype(np.int32).ravel()
    if array.dtype.kind != "f":
        raise ValueError(f"it must hold bools, ints or floats, got {shown(value)}")
    if np.isnan(array).any():
        raise ValueError(f"it holds NaN: {shown(value)}")
    with np.errstate(over="ignore"):
        return "float32", array.shape, array.astype(np.float32).ravel().view(np.int32)


@dataclass(frozen=True)
class Processor:
    """One registered processor.

    Attributes:
        name: the name by which requests ask for it.
        function: a `LogitsProcessor`.
        parameters: its parameters beside logits and history.
    """

    name: str
    function: Callable[..., Any]
    parameters: tuple[Parameter, ...]

    @property
    def size(self) -> int:
        """Words of its arguments."""
        return sum(parameter.size for parameter in self.parameters)

    def words(self, arguments: Mapping[str, Any]) -> np.ndarray:
        """Returns the words of its arguments.

        Raises:
            ValueError: it has no such parameter, or a value has another dtype or shape.
        """
        known = [parameter.name for parameter in self.parameters]
        unknown = [name for name in arguments if name not in known]
        if unknown:
            raise ValueError(
                f"the logits processor {self.name!r} has no argument {shown(unknown[0])}; it has "
                f"{listed(known) or 'none'}"
            )
        parts = [
            self._encoded(parameter, arguments[parameter.name])
            if parameter.name in arguments
            else np.asarray(parameter.default, np.int32)
            for parameter in self.parameters
        ]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def _encoded(self, parameter: Parameter, value: object) -> np.ndarray:
        wanted = f"{parameter.dtype}{list(parameter.shape)}"
        start = (
            f"argument {parameter.name!r} of the logits processor {self.name!r} must be {wanted}"
        )
        try:
            dtype, shape, words = encode(value)
            if (dtype, parameter.dtype) == ("int32", "float32"):
                dtype, shape, words = encode(np.asarray(value, np.float64))
        except ValueError as error:
            raise ValueError(f"{start}: {error}") from None
        if (dtype, shape) != (parameter.dtype, parameter.shape):
            raise ValueError(f"{start}, got {dtype}{list(shape)}: {shown(value)}")
        return words

    def arguments(self, words: Int[Array, "rows words"]) -> dict[str, Array]:
        """Returns parameter name -> values of some rows, inside a trace."""
        stops = list(accumulate(parameter.size for parameter in self.parameters))
        return {
            parameter.name: parameter.decode(words[:, stop - parameter.size : stop])
            for parameter, stop in zip(self.parameters, stops, strict=True)
        }

    @property
    def defaults(self) -> np.ndarray:
        """The words of the defaults."""
        return self.words({})


@dataclass(frozen=True)
class LogitsProcessors:
    """The processors of one engine, in the order in which they apply.

    The words of a row are: the length of its prompt; one bit for each processor, set if the row names it; the arguments
    of all processors.

    Attributes:
        processors: the processors, with different names.
    """

    processors: tuple[Processor, ...] = ()

    @property
    def num_words(self) -> int:
        """Words of a row; 0 if there are no processors."""
        return self._first + sum(one.size for one in self.processors) if self.processors else 0

    @property
    def _first(self) -> int:
        """Index of the first word of arguments."""
        return 1 + -(-len(self.processors) // _BITS)

    @cached_property
    def _by_name(self) -> dict[str, int]:
        return {one.name: index for index, one in enumerate(self.processors)}

    def check(self, calls: Mapping[str, Mapping[str, Any]]) -> None:
        """Raises `ValueError` if a request names an unknown processor, or gives wrong arguments."""
        if calls:
            self.words(calls)

    def words(
        self, calls: Mapping[str, Mapping[str, Any]], prompt_length: int = 0
    ) -> Int[np.ndarray, " words"]:
        """Returns the words of a row; without calls, those of a row that no processor changes.

        Args:
            calls: `SamplingParams.logits_processors`.
            prompt_length: tokens of the prompt.

        Raises:
            ValueError: see `check`.
        """
        for name in calls:
            if name not in self._by_name:
                known = listed(list(self._by_name)) or "none"
                raise ValueError(
                    f"logits_processors names {shown(name)}, which is not registered; registered are: {known}"
                )
        uses = np.zeros(_BITS * (self._first - 1), np.uint8)
        uses[[self._by_name[name] for name in calls]] = 1
        return np.concatenate(
            [
                np.asarray([prompt_length], np.int32),
                np.packbits(uses, bitorder="little").view("<i4").astype(np.int32),
                *(one.words(calls.get(one.name, {})) for one in self.processors),
            ]
        )

    def apply(
        self,
        logits: Float32[Array, "rows vocab"],
        ids: Int[Array, "rows max_tokens"],
        lengths: Int[Array, " rows"],
        words: Int[Array, "rows words"],
    ) -> Float32[Array, "rows vocab"]:
        """Returns the logits after the processors that each row names; other rows keep their bits.

        JAX runs a function for all rows at once. Rows that do not name it have an empty history and default arguments
        there, so that what an entry's former owner left can neither change nor delay anything.

        Args:
            logits: logits after penalties and biases.
            ids: token histories; from `lengths` on they may hold anything.
            lengths: tokens of each row.
            words: words of each row; all 0 for a row without processors.
        """
        columns = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
        first = self._first
        for index, one in enumerate(self.processors):
            named = (words[:, 1 + index // _BITS] >> (index % _BITS) & 1) > 0
            length = jnp.where(named, lengths, 0)
            history = TokenHistory(
                ids=jnp.where(columns < length[:, None], ids, logits.shape[1]),
                length=length,
                prompt_length=jnp.where(named, words[:, 0], 0),
            )
            own = words[:, first : first + one.size]
            own = jnp.where(named[:, None], own, jnp.asarray(one.defaults)[None, :])
            logits = _applied(one, logits, history, own, named)
            first += one.size
        return logits


def _applied(
    one: Processor,
    logits: Float32[Array, "rows vocab"],
    history: TokenHistory,
    words: Int[Array, "rows words"],
    named: Bool[Array, " rows"],
) -> Float32[Array, "rows vocab"]:
    """Returns the logits after one processor, in the rows that name it."""

    def run(
        logits: Array, history: TokenHistory, arguments: Mapping[str, Array]
    ) -> Float32[Array, " vocab"]:
        return one.function(logits, history, **arguments)

    changed = jax.vmap(run)(logits, history, one.arguments(words))
    return jnp.where(named[:, None], changed, logits)


NO_PROCESSORS = LogitsProcessors()
