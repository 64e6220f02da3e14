"""`Shards`: the devices of a tensor-parallel model, and the sums over them that its layers need."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxkv.layers.linear import Joining
from pallas_kernels.peer_sum.api import peer_sum, peer_sum_weighed, why_not
from pallas_kernels.skinny_matmul.api import Weighed


@dataclass(frozen=True)
class Shards:
    """The devices of which each computes a part of a decoder, all of them in one program.

    Attributes:
        axis: name of the mesh axis.
        count: number of devices.
        splits_vocab: whether each has a part of the token ids; otherwise each has the whole tables.
        splits_norm: whether the components that Mamba-2 normalises together are on several devices.
    """

    axis: str
    count: int
    splits_vocab: bool
    splits_norm: bool = False

    def summed(
        self, part: Float[Array, "tokens width"], peers: Int[Array, "1 numbers"] | None = None
    ) -> Float[Array, "tokens width"]:
        """Returns the sum over the devices, which all of them get.

        Args:
            part: this device's part.
            peers: this device's row of `Cache.peers`, if our kernel may compute the sum; no other sum of the program
                may run beside it.
        """
        if peers is not None and why_not(part) is None:
            return peer_sum(part, peers)
        return lax.psum(part, self.axis)

    def joined(
        self,
        part: Float[Array, "tokens width"],
        joining: Joining,
        peers: Int[Array, "1 numbers"] | None,
    ) -> Any:  # noqa: ANN401 - an array, or a `Weighed` if a norm follows
        """Returns the residual stream after the sum over the devices, as a projection on one device returns it.

        Args:
            part: this device's part, which `joins` accepts.
            joining: the residual stream, and the next norm.
            peers: this device's row of `Cache.peers`; no other sum of the program may run beside it.
        """
        assert peers is not None, "`joins` refuses parts without them"
        hidden, norms, row = joining
        if norms is None:
            return peer_sum(part, peers, residual=hidden)
        return Weighed(*peer_sum_weighed(part, peers, residual=hidden, norms=norms, norm_row=row))

    def joins(self, part: jax.ShapeDtypeStruct, peers: Int[Array, "1 numbers"] | None) -> bool:
        """Returns whether `joined` accepts parts of this type."""
        return peers is not None and why_not(part, weighs=True) is None

    def mean(self, part: Float[Array, "*rows means"]) -> Float[Array, "*rows means"]:
        """Returns the mean over the devices, which all of them get."""
        return lax.psum(part, self.axis) / self.count

    def own_ids(self, tokens: Int[Array, " tokens"], rows: int) -> Int[Array, " tokens"]:
        """Returns the row of each token in this device's part of a table; out of range for those of other devices."""
        return tokens - lax.axis_index(self.axis) * rows

    def all_logits(self, part: Float[Array, "rows part"]) -> Float[Array, "rows vocab"]:
        """Returns the logits of all token ids, given those of this device's part.

        It is a sum with zeros, for which XLA has a kernel over peer memory, as it has not for a gather.
        """
        rows, width = part.shape
        first = lax.axis_index(self.axis) * width
        whole = jnp.zeros((rows, self.count * width), part.dtype)
        return lax.psum(lax.dynamic_update_slice(whole, part, (0, first)), self.axis)
