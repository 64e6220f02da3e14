"""`Vocab`: the token ids of logits, and the reductions over them; one device has all ids, or each of several a part."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int, Shaped

from jaxkv.sampling.bounds_of_parts import bounds_of_parts
from jaxkv.sampling.log_total import log_total
from pallas_kernels import filter_bounds


@dataclass(frozen=True)
class Vocab:
    """The token ids of the logits that a sampler gets.

    Several devices of a mesh have consecutive parts of equal width. Each then calls these functions on its own part
    under `jax.shard_map`, and all of them get the same results, by sums and extrema over the devices alone.

    Attributes:
        parts: number of devices; 1 if the logits have all ids.
        axis: name of the mesh axis of the devices.
    """

    parts: int = 1
    axis: str = ""

    def own(self, whole: Shaped[Array, "rows vocab"]) -> Shaped[Array, "rows width"]:
        """Returns this device's part of an array over all ids."""
        if self.parts == 1:
            return whole
        width = whole.shape[1] // self.parts
        return lax.dynamic_slice_in_dim(whole, self._first(width), width, axis=1)

    def columns(self, ids: Int[Array, "rows ids"], width: int) -> Int[Array, "rows ids"]:
        """Returns the columns of ids in this device's logits, which are `width` wide; `width` for ids of others."""
        if self.parts == 1:
            return ids
        columns = ids - self._first(width)
        return jnp.where((columns >= 0) & (columns < width), columns, width)

    def max(self, logits: Float32[Array, "rows width"]) -> Float32[Array, "rows 1"]:
        """Returns each row's largest logit."""
        best = jnp.max(logits, axis=1, keepdims=True)
        return best if self.parts == 1 else lax.pmax(best, self.axis)

    def max_of_valid(
        self, logits: Float32[Array, "rows width"], valid: Bool[Array, "rows width"]
    ) -> tuple[Float32[Array, "rows 1"], Bool[Array, " rows"]]:
        """Returns each row's largest logit, and whether all its logits are valid; otherwise the former is arbitrary."""
        best, are_valid = jnp.max(logits, axis=1, keepdims=True), jnp.all(valid, axis=1)
        if self.parts == 1:
            return best, are_valid
        # A device with an invalid logit sends inf, so that one exchange tells both.
        best = lax.pmax(jnp.where(are_valid[:, None], best, jnp.inf), self.axis)
        return best, best[:, 0] < jnp.inf

    def argmax(
        self, scores: Float32[Array, "rows width"], best: Float32[Array, "rows 1"] | None = None
    ) -> Int[Array, " rows"]:
        """Returns the id of each row's largest score, the lowest one on ties; arbitrary for a row with a NaN.

        Args:
            scores: the scores.
            best: the largest score of each row, if it is known.
        """
        chosen = lax.argmax(scores, 1, jnp.int32)
        if self.parts == 1:
            return chosen
        best = self.max(scores) if best is None else best
        is_best = jnp.max(scores, axis=1) == best[:, 0]
        ids = jnp.where(is_best, chosen + self._first(scores.shape[1]), jnp.iinfo(jnp.int32).max)
        return lax.pmin(ids, self.axis)

    def take(
        self, logits: Float32[Array, "rows width"], ids: Int[Array, " rows"]
    ) -> Float32[Array, "rows 1"]:
        """Returns the logit of one id of each row."""
        if self.parts == 1:
            return jnp.take_along_axis(logits, ids[:, None], axis=1)
        columns = self.columns(ids[:, None], logits.shape[1])
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
        own = logits.at[rows, columns].get(mode="fill", fill_value=-jnp.inf)
        return lax.pmax(own, self.axis)

    def log_total(self, logits: Float32[Array, "rows width"]) -> Float32[Array, "rows 1"]:
        """Returns the logarithm of each row's sum of exponentials; -inf for a row of -inf."""
        own = log_total(logits)
        if self.parts == 1:
            return own
        best = lax.pmax(own, self.axis)
        # -inf - -inf would be NaN.
        shift = jnp.where(jnp.isfinite(best), best, 0.0)
        return shift + jnp.log(lax.psum(jnp.exp(own - shift), self.axis))

    def top(
        self, logits: Float32[Array, "rows width"], count: int
    ) -> tuple[Float32[Array, "rows count"], Int[Array, "rows count"]]:
        """Returns the `count` largest logits of each row and their ids, the lowest id first on ties."""
        values, ids = lax.top_k(logits, count if self.parts == 1 else min(count, logits.shape[1]))
        if self.parts == 1:
            return values, ids
        values = self._gathered(values)
        ids = self._gathered(ids + self._first(logits.shape[1]))
        values, places = lax.top_k(values, count)
        return values, jnp.take_along_axis(ids, places, axis=1)

    def filter_bounds(
        self,
        logits: Float32[Array, "rows width"],
        best: Float32[Array, "rows 1"],
        top_k: Int[Array, " rows"],
        top_p: Float32[Array, " rows"],
        min_p: Float32[Array, " rows"],
        temperature: Float32[Array, " rows"],
    ) -> Float32[Array, " rows"]:
        """Returns the logit threshold of each row's filters, see `pallas_kernels.filter_bounds`.

        Args:
            logits: the logits.
            best: the largest logit of each row.
            top_k: int32; 0, or at least the number of ids, for no filter.
            top_p: 1 for no filter.
            min_p: 0 for no filter.
            temperature: positive; probabilities are the softmax of logits / temperature.
        """
        if self.parts == 1:
            return filter_bounds(logits, top_k, top_p, min_p, temperature)
        filters, size = (top_k, top_p, min_p, temperature), self.parts * logits.shape[1]
        return bounds_of_parts(logits, *filters, best, vocab_size=size, axis=self.axis)

    def _first(self, width: int) -> Int[Array, ""]:
        """Returns the first id of this device's part."""
        return lax.axis_index(self.axis) * width

    def _gathered(self, own: Shaped[Array, "rows some"]) -> Shaped[Array, "rows all"]:
        """Returns the columns of all devices side by side: a sum with zeros, see `Shards.all_logits`."""
        rows, width = own.shape
        place = jnp.zeros((rows, self.parts * width), own.dtype)
        return lax.psum(lax.dynamic_update_slice(place, own, (0, self._first(width))), self.axis)


ALL_IDS = Vocab()
"""The ids of logits on one device."""
