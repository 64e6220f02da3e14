"""Cache memory as data: arrays, groups and their total order. Knows no variant and allocates nothing."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import ml_dtypes  # noqa: F401 - importing it teaches numpy the names bfloat16, float8_e4m3fn, ...
import numpy as np

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
    "hidden",
)
ROLE_ORDER: Mapping[str, int] = MappingProxyType({role: at for at, role in enumerate(_ROLES)})
"""Role -> place in the order of a layer's arrays."""


@dataclass(frozen=True)
class ArraySpec:
    """One array of one layer.

    Attributes:
        role: what it holds; one of `ROLE_ORDER`.
        shape: per token (paged) or per state.
        dtype: a numpy or ml_dtypes name, such as "bfloat16".
    """

    role: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        """Refuses unknown roles, unknown dtypes and empty shapes."""
        if self.role not in ROLE_ORDER:
            raise ValueError(f"unknown role {self.role!r}; known are {', '.join(ROLE_ORDER)}")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"sizes of {self.role} must be at least 1, got {self.shape}")
        try:
            canonical = np.dtype(self.dtype).name
        except TypeError as error:
            raise ValueError(f"{self.role} has the unknown dtype {self.dtype!r}") from error
        object.__setattr__(self, "dtype", canonical)

    @property
    def nbytes(self) -> int:
        """Bytes per token (paged) or per state."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


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
        kind: the variant's name; it names groups and nothing depends on it.
        arrays: in role order.
        page_size: tokens per page.
        window: tokens a query sees, itself included; `None` for all.
        codec: name of the byte format of quantised records; `None` for plain numbers.
        expands: steps of up to so many tokens, none of which comes from before, are cheaper without reading what is
            stored, which is smaller than what it stands for; 0 for none.
        notes: what a person should know, such as a wish that was ignored; no part of equality.
    """

    kind: str
    arrays: tuple[ArraySpec, ...]
    page_size: int
    window: int | None = None
    codec: str | None = None
    expands: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Sorts the arrays and refuses sizes below 1."""
        object.__setattr__(self, "arrays", _in_role_order(self.kind, self.arrays))
        for name, size in (("page_size", self.page_size), ("window", self.window)):
            if size is not None and size < 1:
                raise ValueError(f"{name} of {self.kind} must be at least 1, got {size}")

    @property
    def leading(self) -> tuple[int, ...]:
        """Axes between the page axis and an array's own shape."""
        return (self.page_size,)


@dataclass(frozen=True)
class StateSpec:
    """Memory of fixed size per sequence: each array is `[states, *shape]`, and state 0 stays zero for ever.

    Attributes:
        kind: the variant's name; it names groups and nothing depends on it.
        arrays: in role order.
        in_place: a step updates a sequence's state where it is, so a fork must copy it. Otherwise a step reads
            one state and writes another (often the same), and fresh or forked sequences need no copy.
        chunk_size: tokens at whose multiples, counted from the first, a prompt is cut, so that a state does not
            depend on the cuts even in the last bit.
        notes: what a person should know; no part of equality.
    """

    kind: str
    arrays: tuple[ArraySpec, ...]
    in_place: bool = False
    chunk_size: int = 1
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        """Sorts the arrays and refuses chunks below 1."""
        object.__setattr__(self, "arrays", _in_role_order(self.kind, self.arrays))
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size of {self.kind} must be at least 1, got {self.chunk_size}")

    @property
    def leading(self) -> tuple[int, ...]:
        """Axes between the state axis and an array's own shape: none."""
        return ()


@dataclass(frozen=True)
class LayerSpec:
    """A spec at an absolute layer. A layer may appear more than once, with different roles."""

    layer: int
    spec: PagedSpec | StateSpec

    def __post_init__(self) -> None:
        """Refuses negative layers."""
        if self.layer < 0:
            raise ValueError(f"layers count from 0, got {self.layer}")


@dataclass(frozen=True)
class Group:
    """Layers with equal specs: one pool of ids, one table row per sequence.

    Attributes:
        index: position among all groups of the layout.
        rank: position among `CacheLayout.paged_groups`, `.state_groups` or `.in_place_groups`, whichever holds it;
            for the first two that is its position in `StepBatch.paged` or `StepBatch.states`.
        name: unique and stable, such as "gqa" or "window-2".
        layers: ascending.
    """

    index: int
    rank: int
    name: str
    spec: PagedSpec | StateSpec
    layers: tuple[int, ...]

    @property
    def unit(self) -> str:
        """What its pool hands out: "page" or "state"."""
        return "page" if isinstance(self.spec, PagedSpec) else "state"

    @property
    def in_place(self) -> bool:
        """Whether a step updates its states where they are."""
        return isinstance(self.spec, StateSpec) and self.spec.in_place

    @property
    def page_size(self) -> int:
        """Tokens per page, for paged groups alone."""
        if not isinstance(self.spec, PagedSpec):
            raise ValueError(f"group {self.name!r} holds states, which have no page_size")
        return self.spec.page_size

    @property
    def window(self) -> int | None:
        """Tokens that a query of a paged group sees, itself included; `None` for all, and for groups of states."""
        return self.spec.window if isinstance(self.spec, PagedSpec) else None

    @property
    def bytes_per_unit(self) -> int:
        """Bytes of one page or state, over all its layers."""
        per_layer = sum(array.nbytes for array in self.spec.arrays)
        return math.prod(self.spec.leading) * per_layer * len(self.layers)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that the first `num_tokens` tokens of a sequence fill or begin."""
        return -(-num_tokens // self.page_size)


@dataclass(frozen=True)
class NamedArray:
    """One leaf of the cache: what it is called, where it belongs and how large it is."""

    name: str
    layer: int
    role: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class CacheLayout:
    """All groups of a cache. Made by `group_layers`; device, save file and budget read this one list."""

    groups: tuple[Group, ...]

    @property
    def paged_groups(self) -> tuple[Group, ...]:
        """Groups that grow by pages, in the order of `StepBatch.paged`."""
        return tuple(group for group in self.groups if group.unit == "page")

    @property
    def state_groups(self) -> tuple[Group, ...]:
        """Recurrent groups (a state is read, a state is written), in the order of `StepBatch.states`."""
        return tuple(group for group in self.groups if group.unit == "state" and not group.in_place)

    @property
    def keeps_outputs(self) -> bool:
        """Whether a state holds what a sequence's next token is chosen from, so that choosing it computes nothing."""
        return any(array.role == "hidden" for g in self.state_groups for array in g.spec.arrays)

    @property
    def expands(self) -> int:
        """Most tokens of a step without tokens from before that is worth a program of its own; 0 if none is."""
        most = [group.spec.expands for group in self.groups if isinstance(group.spec, PagedSpec)]
        return min(filter(None, most), default=0)

    @property
    def in_place_groups(self) -> tuple[Group, ...]:
        """Groups whose states a step updates where they are; the sampling group is one."""
        return tuple(group for group in self.groups if group.in_place)

    @property
    def chunk_size(self) -> int:
        """Tokens at whose multiples prompts are best cut: the chunks of all recurrent groups."""
        specs = (group.spec for group in self.groups)
        return math.lcm(*(spec.chunk_size for spec in specs if isinstance(spec, StateSpec)))

    def group(self, name: str) -> Group:
        """Returns the group of this name."""
        for group in self.groups:
            if group.name == name:
                return group
        names = ", ".join(group.name for group in self.groups)
        raise ValueError(f"there is no group {name!r}; this cache has {names}")

    def arrays(self, counts: Mapping[str, int]) -> tuple[NamedArray, ...]:
        """Lists every array in the total order (layer, role priority): flattening, donation and save order.

        Args:
            counts: pages or states of each group, by name.

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
    shape = (count, *group.spec.leading, *array.shape)
    nbytes = math.prod(shape) * np.dtype(array.dtype).itemsize
    name = f"layer{layer}.{array.role}"
    return NamedArray(name, layer, array.role, group.name, shape, array.dtype, nbytes)


def group_layers(layer_specs: Iterable[LayerSpec]) -> CacheLayout:
    """Gathers layers with equal specs into groups; the result does not depend on the order given.

    Raises:
        ValueError: a role appears twice in one layer, or there is no layer at all.
    """
    owners: dict[tuple[int, str], str] = {}
    layers_of: dict[PagedSpec | StateSpec, list[int]] = {}
    for entry in sorted(layer_specs, key=lambda entry: entry.layer):
        for array in entry.spec.arrays:
            place = (entry.layer, array.role)
            if place in owners:
                raise ValueError(
                    f"layer {entry.layer} already has {array.role!r} from {owners[place]}, "
                    f"and {entry.spec.kind} brings it again; check the layer offsets"
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
        rank = sum(_sort(other) == _sort(group) for other in groups)
        groups.append(Group(group.index, rank, name, spec, group.layers))
    return tuple(groups)


def _sort(group: Group) -> tuple[str, bool]:
    return group.unit, group.in_place
