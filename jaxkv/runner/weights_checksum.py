"""A checksum of all parameters, computed on the device, so that a file can name the weights that it was made with."""

import hashlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

from jaxkv.models.protocol import Params
from jaxkv.programs.lowering import Lowering
from jaxkv.programs.spec import ProgramSpec
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.program_specs import Runner
from jaxkv.weights.quantised.weight_forms import is_few_bits

_GOLDEN = 0x9E3779B1
_SECOND = 0x85EBCA6B


@dataclass(frozen=True)
class ChecksumSpec(ProgramSpec[Runner]):
    """The program that computes a checksum of every parameter array."""

    @property
    def kind(self) -> str:
        """Always "checksum"."""
        return "checksum"

    @property
    def name(self) -> str:
        """The kind alone."""
        return self.kind

    def lowering(self, runner: Runner) -> Lowering:
        """Returns `sums = run(params)`, which reads no cache."""
        return Lowering(leaf_checksums, (runner.params,), cache_argument=None)


def weights_checksum(runner: ModelRunner) -> str:
    """Returns a SHA-256 digest, in hex, of the name, shape, dtype and checksum of every parameter array.

    It depends on every bit of every parameter, on which of them have activations rounded (`FewBits.rounds_rows`), and
    on nothing else. It finds other weights and damage; the checksums inside of it are not cryptographic, so weights
    that were constructed to have equal checksums pass.

    Raises:
        ProgramRefused: strict mode has no program for it.
    """
    return digest_of(runner.params, np.asarray(runner.program(ChecksumSpec())(runner.params)))


def digest_of(params: Params, sums: UInt32[np.ndarray, "leaves 2"]) -> str:
    """Returns the digest of parameters, of whose arrays `leaf_checksums` has returned `sums`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    digest = hashlib.sha256()
    for (path, leaf), pair in zip(leaves, sums.tolist(), strict=True):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape} {pair}\n".encode())
    nodes, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_few_bits)
    for path, node in nodes:
        if is_few_bits(node) and node.rounds_rows:
            digest.update(f"{jax.tree_util.keystr(path)} rounds rows\n".encode())
    return digest.hexdigest()


def leaf_checksums(params: Params) -> UInt32[Array, "leaves 2"]:
    """Returns two 32-bit checksums of each array: sums of a hash of each element's bits and position."""
    return jnp.stack([_checksum(leaf) for leaf in jax.tree.leaves(params)])


def _checksum(leaf: Array) -> UInt32[Array, " 2"]:
    bits = leaf.astype(jnp.uint8) if leaf.dtype == jnp.bool_ else leaf
    size = bits.dtype.itemsize
    word = {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32)
    # An element of 8 bytes becomes two words along a new last axis.
    hashed = lax.bitcast_convert_type(bits, word).astype(jnp.uint32)
    for axis in range(hashed.ndim):
        place = lax.broadcasted_iota(jnp.uint32, hashed.shape, axis)
        hashed = _mixed(hashed ^ (place * jnp.uint32(_GOLDEN) + jnp.uint32(axis + 1)))
    hashed = _mixed(hashed)
    second = _mixed(hashed ^ jnp.uint32(_SECOND))
    return jnp.stack([jnp.sum(hashed, dtype=jnp.uint32), jnp.sum(second, dtype=jnp.uint32)])


def _mixed(word: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The finalizer of MurmurHash3, a bijection of 32-bit words."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
