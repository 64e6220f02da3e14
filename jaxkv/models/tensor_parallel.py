"""`TensorParallel`: a decoder that several devices compute together, each a part of every block.

It is a `Model` whose parameters and cache are global arrays over a mesh, so that steps, samplers, engine and prefix
cache use it like a model on one device. Only `forward`, `logits` and `sample` differ: they run each device's part under
`jax.shard_map`, with explicit sums (`jaxkv.layers.shards`), because the partitioner of XLA cannot divide our kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray, Shaped

from jaxkv.batch import StepBatch
from jaxkv.cache.spec import LayerSpec, PagedSpec
from jaxkv.cache.state import Cache
from jaxkv.config.checks import as_int
from jaxkv.config.model import ModelConfig
from jaxkv.layers.shards import Shards
from jaxkv.models.decoder import Decoder
from jaxkv.models.nccl import why_not_nccl
from jaxkv.models.param_division import ParamDivision
from jaxkv.models.protocol import Model, Params
from jaxkv.models.shard_config import shard_config
from jaxkv.sampling.batch import SamplingBatch
from jaxkv.sampling.sample import Sampled, SamplingState, sample
from jaxkv.sampling.vocab import Vocab
from jaxkv.weights.quantised.weight_forms import is_few_bits
from pallas_kernels.formats.few_bits import FewBits
from pallas_kernels.peer_sum.api import mailbox_bytes, why_not_mailboxes

AXIS = "tensor"
"""Name of the mesh axis."""

_LOGIT_BYTES = 4
_MOST_JOINED_BYTES = 8 * 2**20
"""Most bytes that XLA's kernel over peer memory sums. It leaves more to NCCL, outside of the step's CUDA graph."""


def tensor_mesh(devices: int) -> Mesh:
    """Returns the mesh of the first devices, along one axis; of several processes (`jax.distributed`), of all devices.

    Args:
        devices: number of devices.

    Raises:
        ValueError: there are fewer devices, or processes whose devices would be left out.
        RuntimeError: they are GPUs, and NCCL is too old for this JAX.
    """
    known = jax.devices()
    if jax.process_count() > 1 and devices != len(known):
        raise ValueError(
            f"{jax.process_count()} processes compute a model on all of their devices together, so "
            f"tensor_parallel_size must be {len(known)}, got {devices}"
        )
    if not 1 <= devices <= len(known):
        raise ValueError(
            f"tensor_parallel_size must be between 1 and the number of devices here, {len(known)}, got {devices}"
        )
    if devices > 1 and known[0].platform == "gpu":
        refusal = why_not_nccl()
        if refusal is not None:
            raise RuntimeError(refusal)
    return Mesh(np.asarray(known[:devices]), (AXIS,))


def mesh_of(model: Model) -> Mesh | None:
    """Returns the devices that divide a model's cache; `None` for a model on one device."""
    mesh = model.mesh if isinstance(model, TensorParallel) else None
    return mesh if isinstance(mesh, Mesh) else None


def has_mailboxes(model: Model) -> bool:
    """Returns whether our kernel computes sums over a model's devices, by way of mailboxes (`Cache.peers`).

    Of a planned model it tells whether it would, with devices like the default one.
    """
    if not isinstance(model, TensorParallel) or model.implementation == "xla":
        return False
    return why_not_mailboxes(model.mesh) is None


def mailbox_room(model: Model) -> int:
    """Returns the bytes of a mailbox on each of a model's devices; 0 if they have none."""
    if not isinstance(model, TensorParallel) or not has_mailboxes(model):
        return 0
    return mailbox_bytes(model.count)


def spans_processes(model: Model) -> bool:
    """Returns whether devices of other processes divide a model with those of this one."""
    mesh = mesh_of(model)
    return mesh is not None and mesh.is_multi_process


def over_devices(
    decoder: Decoder, devices: int, types: Params, *, planned: bool = False
) -> "TensorParallel | None":
    """Returns a decoder over several devices; `None` for one device.

    Args:
        decoder: the decoder.
        devices: number of devices, as a user gave it.
        types: types of its parameters.
        planned: nothing will run, so there need not be as many devices.

    Raises:
        ValueError: there are fewer devices, or they cannot divide the decoder or its weights in 8 and 4 bits.
    """
    count = as_int("tensor_parallel_size", devices, 1, 2**16)
    if count == 1:
        return None
    mesh = (
        AbstractMesh((count,), (AXIS,), axis_types=(AxisType.Auto,))
        if planned
        else tensor_mesh(count)
    )
    divided = TensorParallel(decoder, mesh)
    # It raises for weights in few bits that cannot be divided, before they are loaded.
    divided.divided_types(types)
    return divided


@dataclass(frozen=True)
class TensorParallel:
    """A decoder over several devices.

    Parameters are divided as they are declared (`Leaf.split`), see `jaxkv.models.param_division`.

    Attributes:
        whole: the decoder.
        mesh: the devices, along one axis; without devices for a model of which only shapes are asked.

    Raises:
        ValueError: the mesh has several axes, the decoder is batch invariant, or the devices cannot divide it, see
            `shard_config`.
    """

    whole: Decoder
    mesh: Mesh | AbstractMesh

    def __post_init__(self) -> None:
        """Checks the mesh and the sizes."""
        if len(self.mesh.axis_names) != 1:
            raise ValueError(
                f"a decoder is divided along one axis, got a mesh of the axes {self.mesh.axis_names}; make one with "
                "tensor_mesh"
            )
        if self.whole.batch_invariant:
            raise ValueError(
                f"batch_invariant is supported on one device only, and tensor_parallel_size is {self.count}; turn one "
                "of them off"
            )
        assert self.part.config.num_layers == self.whole.num_layers

    def __repr__(self) -> str:
        """Names the decoder and the number of devices, also for a mesh without devices."""
        return f"TensorParallel({self.whole!r}, devices={self.count})"

    @cached_property
    def part(self) -> Decoder:
        """The part of each device."""
        config = shard_config(self.whole.config, self.count)
        mamba = self.whole.config.mamba
        shards = Shards(
            axis=self._axis,
            count=self.count,
            splits_vocab=config.vocab_size != self.whole.vocab_size,
            splits_norm=mamba is not None and mamba.norm_groups == 1,
        )
        return replace(self.whole, config=config, shards=shards)

    @property
    def count(self) -> int:
        """Number of devices."""
        return self.mesh.size

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.whole.vocab_size

    @property
    def num_layers(self) -> int:
        """Layers of the pattern."""
        return self.whole.num_layers

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model supports, in tokens."""
        return self.whole.max_positions

    @property
    def whole_prompts(self) -> bool:
        """Whether a prompt must be computed in one step."""
        return self.whole.whole_prompts

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's bits depend on its own sequence alone."""
        return self.whole.batch_invariant

    @property
    def implementation(self) -> str | None:
        """The family of implementations that every op must use; `None` for the best."""
        return self.whole.implementation

    @property
    def config(self) -> ModelConfig:
        """Architecture and sizes of the whole decoder."""
        return self.whole.config

    def limited(self, max_positions: int) -> "TensorParallel":
        """Returns the same model for sequences of at most `max_positions` tokens."""
        return replace(self, whole=self.whole.limited(max_positions))

    def running(self, implementation: str) -> "TensorParallel":
        """Returns the same model with another family of implementations."""
        return replace(self, whole=self.whole.running(implementation))

    def cache_specs(self, *, page_size: int, dtype: str) -> tuple[LayerSpec, ...]:
        """Returns the cache spec of each layer over all devices."""
        specs = self.part.cache_specs(page_size=page_size, dtype=dtype)
        return tuple(
            replace(one, spec=replace(one.spec, arrays=self._joined(one.spec))) for one in specs
        )

    def init_params(self, key: PRNGKeyArray, dtype: DTypeLike) -> Params:
        """Returns the whole decoder's random parameters, each divided before the next one is drawn."""
        return self.init_params_like(key, self.whole.param_shapes(dtype))

    def init_params_like(self, key: PRNGKeyArray, types: Params) -> Params:
        """Returns the whole decoder's random parameters of given types, as `init_params` does."""
        return self.whole.init_params_like(key, types, placed=self.divide)

    def param_shapes(self, dtype: DTypeLike) -> Params:
        """Returns the tree of `init_params` as `jax.ShapeDtypeStruct`s with shardings, without computing it."""
        return self.divided_types(self.whole.param_shapes(dtype))

    def divided_types(self, types: Params) -> Params:
        """Returns the types of parameters, or of adapters' factors by path, with shardings, given the whole ones.

        Raises:
            ValueError: some are in 8 or 4 bits, and the devices cannot divide their columns.
        """
        return self._division.types(types)

    def divided(self, params: Params) -> Params:
        """Returns the whole decoder's parameters, or adapters' factors by path, divided: a copy."""
        return self._division.divided(params)

    def divide(self, path: str, leaf: Shaped[Array, "..."] | FewBits) -> Any:  # noqa: ANN401 - as `leaf`
        """Returns a parameter of the whole decoder, or one array of a `FewBits`, divided among the devices.

        Args:
            path: its dotted path.
            leaf: the whole parameter.
        """
        return self._division.divide(path, leaf)

    def refuse_undivided(self, params: Params) -> None:
        """Raises `ValueError` if arrays are not divided among the devices as `divided` does it.

        Tracers are not checked, since they have no place yet.
        """
        types = self.param_shapes(jnp.float32)
        if jax.tree.structure(params, is_leaf=is_few_bits) != jax.tree.structure(types):
            return
        wrong = self._division.not_divided(params)
        if wrong:
            raise ValueError(
                f"{len(wrong)} of {len(jax.tree.leaves(params))} parameters are not divided among the {self.count} "
                f"devices, {wrong[0]} for one; give model.divided(params), where model is the TensorParallel, such as "
                "LLM.model"
            )

    def forward(
        self, params: Params, cache: Cache, batch: StepBatch
    ) -> tuple[Cache, Float[Array, "tokens hidden_size"]]:
        """Returns the cache with the new tokens written, and their hidden states, which all devices have."""
        everywhere = PartitionSpec()
        pools: Any = replace(
            cache,
            arrays=tuple(map(self._pool_spec, cache.keys)),
            peers=None if cache.peers is None else PartitionSpec(self._axis),
        )
        run = jax.shard_map(
            self.part.forward,
            mesh=self.mesh,
            in_specs=(self._division.specs(params), pools, everywhere),
            out_specs=(pools, everywhere),
            # Our kernels do not declare over which axes their results vary.
            check_vma=False,
        )
        return run(params, cache, batch)

    def logits(
        self, params: Params, hidden: Float[Array, "rows hidden_size"]
    ) -> Float[Array, "rows vocab_size"]:
        """Returns the float32 logits of each hidden state, which all devices have."""
        run = jax.shard_map(
            self.part.logits,
            mesh=self.mesh,
            in_specs=(self._division.specs(params), PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return run(params, hidden)

    def sample(
        self,
        params: Params,
        hidden: Float[Array, "rows hidden_size"],
        sampling: SamplingBatch,
        state: SamplingState | None,
        positions: Int[Array, " rows"],
    ) -> Sampled:
        """Samples one token per row as `jaxkv.sampling.sample.sample` does, each device from its part of the logits.

        The logits of all ids are put together only for processors, which need them on one device, and for filters of so
        few rows that one sum takes less time than the exchanges of a search.
        """
        features = sampling.features
        joined = len(hidden) * self.vocab_size * _LOGIT_BYTES
        few = features.filters and joined <= _MOST_JOINED_BYTES
        if features.processors or few or not self._shards.splits_vocab:
            return sample(self.logits(params, hidden), sampling, state, positions)

        def run(
            params: Params,
            hidden: Array,
            sampling: SamplingBatch,
            state: SamplingState | None,
            positions: Array,
        ) -> Sampled:
            logits = self.part.own_logits(params, hidden)
            return sample(logits, sampling, state, positions, Vocab(self.count, self._axis))

        everywhere = PartitionSpec()
        return jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(self._division.specs(params), *(everywhere,) * 4),
            out_specs=everywhere,
            check_vma=False,
        )(params, hidden, sampling, state, positions)

    @property
    def _shards(self) -> Shards:
        assert self.part.shards is not None, "a part belongs to shards"
        return self.part.shards

    @property
    def _axis(self) -> str:
        return self.mesh.axis_names[0]

    @cached_property
    def _division(self) -> ParamDivision:
        whole, part = self.whole.leaf_declarations(), self.part.leaf_declarations()
        return ParamDivision(whole, part, self.mesh)

    @cached_property
    def _pool_splits(self) -> Mapping[tuple[int, str], int]:
        """(Layer of the cache, role) -> axis of a pool that the devices divide, without the pools of scales."""
        specs = self.part.cache_specs(page_size=1, dtype="float32")
        return {
            (one.layer, array.role): array.split + (2 if isinstance(one.spec, PagedSpec) else 1)
            for one in specs
            for array in one.spec.arrays
            if array.split is not None
        }

    def _pool_spec(self, key: tuple[int, str]) -> PartitionSpec:
        layer, role = key
        axis = self._pool_splits.get((layer, role.removesuffix("_scale")))
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, self._axis)

    def _joined(self, spec: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a paged or a state spec
        return tuple(array.joined(self.count) for array in spec.arrays)
