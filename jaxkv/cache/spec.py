"""The layout of cache memory as data: arrays, groups of layers, and the order of all arrays. Allocates nothing."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import ml_dtypes  # noqa: F401 - registers the numpy dtypes bfloat16, float8_e4m3fn and others
import numpy as np

from pallas_kernels.families import WIDEST_HEAD

_ROLES = (
    "key",
    "value",
    "key_scale",
    "value_scale",
    "indexer",
    "conv",
    "ssm",
    "delta",
    "last_token",
    "output_counts",
    "prompt_seen",
    "bias_ids",
    "bias_values",
    "token_history",
    "processor_words",
    "text_length",
    "drafts",
    "hidden",
    "experts",
    "hidden_states",
)
ROLE_ORDER: Mapping[str, int] = MappingProxyType({role: at for at, role in enumerate(_ROLES)})
"""Role -> position in the order of a layer's arrays."""


@dataclass(frozen=True)
class ArraySpec:
    """One array of one layer.

    Attributes:
        role: the kind of its contents, one of `ROLE_ORDER`.
        shape: shape per token (paged) or per state, over all devices.
        dtype: name of a numpy or ml_dtypes dtype, such as "bfloat16".
        split: axis of `shape` that the devices of a tensor-parallel model divide, such as that of heads; `None` if each
            has all of it.
        devices: number of devices that divide it.

    Raises:
        ValueError: an unknown role or dtype, or a size below 1.
    """

    role: str
    shape: tuple[int, ...]
    dtype: str
    split: int | None = None
    devices: int = 1

    def __post_init__(self) -> None:
        """Checks role, shape and dtype."""
        if self.role not in ROLE_ORDER:
            raise ValueError(f"unknown role {self.role!r}; known are {', '.join(ROLE_ORDER)}")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"sizes of {self.role} must be at least 1, got {self.shape}")
        try:
            canonical = np.dtype(self.dtype).name
        except TypeError as error:
            raise ValueError(
                f"{self.role} has the unknown dtype {self.dtype!r}; give a name of numpy or ml_dtypes"
            ) from error
        object.__setattr__(self, "dtype", canonical)

    @property
    def nbytes(self) -> int:
        """Bytes per token (paged) or per state, on each device."""
        return math.prod(self.shape) // self.devices * np.dtype(self.dtype).itemsize

    def joined(self, devices: int) -> "ArraySpec":
        """Returns the array whose part on each of several devices is this one."""
        if self.split is None:
            return self
        shape = [
            size * devices if axis == self.split else size for axis, size in enumerate(self.shape)
        ]
        return replace(self, shape=tuple(shape), devices=devices)


def _in_role_order(kind: str, arrays: Iterable[ArraySpec]) -> tuple[ArraySpec, ...]:
    ordered = tuple(sorted(arrays, key=lambda array: ROLE_ORDER[array.role]))
    roles = [array.role for array in ordered]
    if not roles or len(set(roles)) != len(roles):
        raise ValueError(f"{kind} needs at least one array, and each role once; got {roles}")
    return ordered


@dataclass(frozen=True)
class PagedSpec:
    """Memory that grows with the sequence, in pages: each array is `[pages, page_size, *shape]`.

    Attributes:
        kind: name of the variant; a part of group names only.
        arrays: sorted by role.
        page_size: tokens per page.
        window: tokens that a query sees, its own included; `None` for all.
        codec: name of the byte format of quantised records; `None` for unquantised arrays.
        expands: MLA only. A prefill step of at most this many tokens with no cached prefix expands keys and values from
            its own latents instead of reading pages; 0 disables this.
        notes: remarks for people, such as an option that was ignored; not compared.

    Raises:
        ValueError: a size below 1, no array, or a role twice.
    """

    kind: str
    arrays: tuple[ArraySpec, ...]
    page_size: int
    window: int | None = None
    codec: str | None = None
    expands: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Sorts the arrays and checks the sizes."""
        object.__setattr__(self, "arrays", _in_role_order(self.kind, self.arrays))
        for name, size in (("page_size", self.page_size), ("window", self.window)):
            if size is not None and size < 1:
                raise ValueError(f"{name} of {self.kind} must be at least 1, got {size}")

    @property
    def leading(self) -> tuple[int, ...]:
        """Sizes of the axes between the page axis and an array's own shape."""
        return (self.page_size,)


@dataclass(frozen=True)
class StateSpec:
    """Memory of fixed size per sequence: each array is `[states, *shape]`; state 0 is the zero state.

    Attributes:
        kind: name of the variant; a part of group names only.
        arrays: sorted by role.
        in_place: a step updates a sequence's state in place, so a fork must copy it. Otherwise a step reads one state
            and writes another (often the same one), and new or forked sequences need no copy.
        chunk_size: tokens of a scan's chunk. Prompts are split at multiples of it, counted from the first token, so
            that a state does not depend on the split, bit for bit.
        notes: remarks for people; not compared.

    Raises:
        ValueError: a chunk size below 1, no array, or a role twice.
    """

    kind: str
    arrays: tuple[ArraySpec, ...]
    in_place: bool = False
    chunk_size: int = 1
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Sorts the arrays and checks the chunk size."""
        object.__setattr__(self, "arrays", _in_role_order(self.kind, self.arrays))
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size of {self.kind} must be at least 1, got {self.chunk_size}")

    @property
    def leading(self) -> tuple[int, ...]:
        """Sizes of the axes between the state axis and an array's own shape: none."""
        return ()


@dataclass(frozen=True)
class LayerSpec:
    """The spec of one layer, by absolute number. A layer may have several specs with different roles."""

    layer: int
    spec: PagedSpec | StateSpec

    def __post_init__(self) -> None:
        """Raises `ValueError` if the layer is negative."""
        if self.layer < 0:
            raise ValueError(f"layers count from 0, got {self.layer}")


@dataclass(frozen=True)
class Group:
    """Layers with equal specs. They share one pool of ids and one page table or state per sequence.

    Attributes:
        index: position among all groups of the layout.
        rank: position among the groups of its sort: `CacheLayout.paged_groups` (also in `StepBatch.paged`),
            `CacheLayout.state_groups` (also in `StepBatch.states`) or `CacheLayout.in_place_groups`.
        name: unique and stable, such as "gqa" or "window-2".
        spec: the spec of each layer.
        layers: absolute layer numbers, ascending.
    """

    index: int
    rank: int
    name: str
    spec: PagedSpec | StateSpec
    layers: tuple[int, ...]

    # Cached, because the page allocator reads them for each page that a sequence takes.

    @cached_property
    def unit(self) -> str:
        """What an id of its pool stands for: "page" or "state"."""
        return "page" if isinstance(self.spec, PagedSpec) else "state"

    @cached_property
    def in_place(self) -> bool:
        """Whether a step updates its states in place."""
        return isinstance(self.spec, StateSpec) and self.spec.in_place

    @cached_property
    def page_size(self) -> int:
        """Tokens per page; raises `ValueError` for a group of states."""
        if not isinstance(self.spec, PagedSpec):
            raise ValueError(f"group {self.name!r} holds states, which have no page_size")
        return self.spec.page_size

    @cached_property
    def window(self) -> int | None:
        """Tokens that a query sees, its own included; `None` for all tokens, and for a group of states."""
        return self.spec.window if isinstance(self.spec, PagedSpec) else None

    @property
    def bytes_per_unit(self) -> int:
        """Bytes of one page or state, over all layers of the group."""
        per_layer = sum(array.nbytes for array in self.spec.arrays)
        return math.prod(self.spec.leading) * per_layer * len(self.layers)

    def pages_for(self, num_tokens: int) -> int:
        """Returns the number of pages for `num_tokens` tokens, the last one possibly not full."""
        return -(-num_tokens // self.page_size)


@dataclass(frozen=True)
class NamedArray:
    """One array of the cache: name, layer, role, group name, whole shape, dtype name, and bytes on each device.

    `split` is the axis that devices divide; `None` if each has all of it.
    """

    name: str
    layer: int
    role: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    split: int | None = None


@dataclass(frozen=True)
class CacheLayout:
    """All groups of a cache, made by `group_layers`. Device arrays, saved files and budgets all follow it."""

    groups: tuple[Group, ...]

    @property
    def paged_groups(self) -> tuple[Group, ...]:
        """Paged groups, in the order of `StepBatch.paged`."""
        return tuple(group for group in self.groups if group.unit == "page")

    @property
    def state_groups(self) -> tuple[Group, ...]:
        """Recurrent groups (a step reads one state and writes another), in the order of `StepBatch.states`."""
        return tuple(group for group in self.groups if group.unit == "state" and not group.in_place)

    @property
    def keeps_outputs(self) -> bool:
        """Whether states include the last hidden state, so that the next token is sampled without computing a token."""
        return any(array.role == "hidden" for g in self.state_groups for array in g.spec.arrays)

    @property
    def kept_drafts(self) -> int:
        """Most drafts of a sequence that the sampling group keeps, beside its text; 0 if it keeps neither."""
        arrays = [array for group in self.in_place_groups for array in group.spec.arrays]
        return sum(array.shape[0] for array in arrays if array.role == "drafts")

    @property
    def expands(self) -> int:
        """Most tokens of a prefill step without cached prefix that expands latents, see `PagedSpec`; 0 if none does."""
        most = [group.spec.expands for group in self.groups if isinstance(group.spec, PagedSpec)]
        return min(filter(None, most), default=0)

    @cached_property
    def shared_group(self) -> Group | None:
        """The first group of keys and values in 16 bits that layers read without a window; `None` if there is none.

        Its pages may be read once for several rows that begin with them, by a kernel that takes no wider heads.
        """
        for group in self.paged_groups:
            arrays = group.spec.arrays
            wide = all(array.dtype in ("bfloat16", "float16") for array in arrays)
            is_taken = {array.role for array in arrays} == {"key", "value"} and all(
                array.shape[-1] <= WIDEST_HEAD for array in arrays
            )
            if wide and is_taken and group.window is None:
                return group
        return None

    @property
    def has_wide_heads(self) -> bool:
        """Whether a group's keys are wider than kernels take, so that XLA attends in its layers."""
        return any(
            array.role == "key" and array.shape[-1] > WIDEST_HEAD
            for group in self.paged_groups
            for array in group.spec.arrays
        )

    @property
    def in_place_groups(self) -> tuple[Group, ...]:
        """Groups whose states a step updates in place; the sampling group is one."""
        return tuple(group for group in self.groups if group.in_place)

    @property
    def chunk_size(self) -> int:
        """Prompts are split at multiples of this many tokens: the least common multiple of the groups' chunk sizes."""
        specs = (group.spec for group in self.groups)
        return math.lcm(*(spec.chunk_size for spec in specs if isinstance(spec, StateSpec)))

    def group(self, name: str) -> Group:
        """Returns the group with this name; raises `ValueError` if there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        names = ", ".join(group.name for group in self.groups)
        raise ValueError(f"there is no group {name!r}; the groups of this cache are {names}")

    def arrays(self, counts: Mapping[str, int]) -> tuple[NamedArray, ...]:
        """Lists every array, ordered by layer and role. This is the order of flattening, donation and saving.

        Args:
            counts: group name -> number of pages or states.

        Raises:
            ValueError: `counts` does not name exactly the groups, or has one below 1.
        """
        names = {group.name for group in self.groups}
        if set(counts) != names or min(counts.values(), default=1) < 1:
            raise ValueError(f"counts must be at least 1 for each of {names}, got {dict(counts)}")
        named = [
            _named_array(layer, array, group, counts[group.name])
            for group in self.groups
            for layer in group.layers
            for array in group.spec.arrays
        ]
        return tuple(sorted(named, key=lambda array: (array.layer, ROLE_ORDER[array.role])))


def _named_array(layer: int, array: ArraySpec, group: Group, count: int) -> NamedArray:
    leading = (count, *group.spec.leading)
    nbytes = math.prod(leading) * array.nbytes
    name = f"layer{layer}.{array.role}"
    split = None if array.split is None else len(leading) + array.split
    shape = (*leading, *array.shape)
    return NamedArray(name, layer, array.role, group.name, shape, array.dtype, nbytes, split)


def group_layers(layer_specs: Iterable[LayerSpec]) -> CacheLayout:
    """Gathers layers with equal specs into groups, independently of the order of `layer_specs`.

    Raises:
        ValueError: a role appears twice in one layer, or there is no layer.
    """
    owners: dict[tuple[int, str], str] = {}
    layers_of: dict[PagedSpec | StateSpec, list[int]] = {}
    for entry in sorted(layer_specs, key=lambda entry: entry.layer):
        for array in entry.spec.arrays:
            place = (entry.layer, array.role)
            if place in owners:
                raise ValueError(
                    f"layer {entry.layer} already has {array.role!r} from {owners[place]}, "
                    f"and {entry.spec.kind} has it too; check the layer offsets"
                )
            owners[place] = entry.spec.kind
        layers_of.setdefault(entry.spec, []).append(entry.layer)
    if not layers_of:
        raise ValueError("a cache needs at least one layer")
    ordered = sorted(
        layers_of.items(), key=lambda item: (min(item[1]), ROLE_ORDER[item[0].arrays[0].role])
    )
    return CacheLayout(_number(ordered))


def _number(ordered: list[tuple[PagedSpec | StateSpec, list[int]]]) -> tuple[Group, ...]:
    groups: list[Group] = []
    for spec, layers in ordered:
        alike = sum(group.spec.kind == spec.kind for group in groups)
        name = f"{spec.kind}-{alike + 1}" if alike else spec.kind
        group = Group(len(groups), 0, name, spec, tuple(sorted(layers)))
        rank = sum(_group_sort(other) == _group_sort(group) for other in groups)
        groups.append(Group(group.index, rank, name, spec, group.layers))
    return tuple(groups)


def _group_sort(group: Group) -> tuple[str, bool]:
    return group.unit, group.in_place
