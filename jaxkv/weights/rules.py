"""Weight rules as data: how a parameter leaf is assembled from checkpoint tensors."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal, NamedTuple

from jaxkv.config.model import ModelConfig

Combine = Literal[
    "copy",
    "stack",
    "concat",
    "transpose",
    "stack_transpose",
    "taps",
    "select",
    "deinterleave",
    "deinterleave_rows",
    "deinterleave_transpose",
    "last_axis_first",
    "only_row",
    "squeeze",
    "swap_last",
]

_OF_TRANSPOSED: Mapping[Combine, Combine] = {
    "deinterleave_transpose": "deinterleave_rows",
    "last_axis_first": "transpose",
}
"""Operation -> the operation with the same result for a source whose last two axes are exchanged."""

_OF_EXCHANGED: Mapping[Combine, Combine] = {"copy": "swap_last", "transpose": "last_axis_first"}
"""Operation -> the same for a source of three axes whose last two are exchanged, of rules with `either_last`."""

_OF_FUSED: Mapping[Combine, Combine] = {
    "copy": "copy",
    "only_row": "only_row",
    "transpose": "transpose",
    "stack": "copy",
    "stack_transpose": "transpose",
}
"""Operation -> the operation with the same result for one source with a leading axis of experts."""


@dataclass(frozen=True)
class Regroup:
    """Reorders rows from group by group, such as each head's query and gate, to section by section.

    Attributes:
        groups: `ModelConfig` fields whose product is the number of groups.
        sections: for each section of a group, the fields whose product is its number of rows; in the checkpoint's
            order.
        order: order of the sections in the leaf. With "select", sections that are not named are left out.
    """

    groups: tuple[str, ...]
    sections: tuple[tuple[str, ...], ...]
    order: tuple[int, ...]


class Regrouped(NamedTuple):
    """A `Regroup` with the numbers of one model."""

    groups: int
    sections: tuple[int, ...]
    order: tuple[int, ...]


class HeadPairs(NamedTuple):
    """Rows that are heads with interleaved rotary pairs: rows 2i and 2i + 1 of each head's first `rotary_dim` rows.

    In the leaf a pair's rows are i and i + rotary_dim / 2.

    Attributes:
        rows: number of these rows, which are the first ones of the leaf.
        head_dim: rows of a head.
        rotary_dim: rows of a head that are rotated.
    """

    rows: int
    head_dim: int
    rotary_dim: int


@dataclass(frozen=True)
class Rule:
    """The assembly of one parameter leaf, or of one per layer.

    Operations (`combine`); all but "stack", "stack_transpose", "concat" and "taps" have one source:
        copy: the source unchanged.
        stack: sources of equal shape along a new first axis; several per position of it are concatenated.
        concat: sources concatenated along their first axis.
        transpose: the source with its first two axes exchanged.
        stack_transpose: "stack" with the first two axes exchanged.
        taps: [taps, channels] of a depthwise convolution's weight [channels, 1, taps], or of several side by side.
        deinterleave: even positions of the last axis, then odd ones.
        deinterleave_rows: the same along the second of three axes.
        deinterleave_transpose: "deinterleave", then the last two of three axes exchanged.
        last_axis_first: the last of three axes moved to the front.
        swap_last: the last two of three axes exchanged.
        only_row: the source without its first axis, which has size 1.
        squeeze: [n] of a source [1, 1, n, 1].
        select: some sections of each group of the source's rows (see `regroup`).

    Attributes:
        target: dotted path of the leaf in the parameter tree; with `{layer}` there is one leaf per layer.
        sources: names of the tensors in the checkpoint, in order; a name with `{expert}` stands for one per expert.
            `{owner}` is the layer's owner (`ModelConfig.owners`), and `{use}` the layer's number among those with the
            rule's block.
        combine: the operation.
        rows: "concat", and "taps" of several sources: for each source, the `ModelConfig` fields whose product is the
            size of its first axis.
        when: a boolean field of `ModelConfig`, or of a part of it ("mamba.in_bias"), and the value for which the rule
            applies; `None` if it always applies.
        block: name of the block to whose layers the rule applies; empty for all layers.
        is_shared: whether only layers that are their own owners have the leaf (`Leaf.is_shared`).
        regroup: reordering of the first source's rows; `None` for none.
        offset: number that is added to every element.
        fused: name of one tensor that a checkpoint may hold instead of the sources: Transformers 5 has all experts of a
            layer in one tensor, and saves it so on request. Empty for none.
        either_last: whether the last two of three axes of the source may be exchanged, which its shape tells.
        interleaved: "concat" only: number of first sources whose rows are heads with interleaved rotary pairs (see
            `HeadPairs`).
    """

    target: str
    sources: tuple[str, ...]
    combine: Combine = "copy"
    rows: tuple[tuple[str, ...], ...] = ()
    when: tuple[str, bool] | None = None
    block: str = ""
    is_shared: bool = False
    regroup: Regroup | None = None
    offset: float = 0.0
    fused: str = ""
    either_last: bool = False
    interleaved: int = 0

    def applies(self, config: ModelConfig) -> bool:
        """Whether a model of this config may have the leaf."""
        if self.when is None:
            return True
        name, value = self.when
        part, _, field = name.rpartition(".")
        owner = getattr(config, part) if part else config
        return owner is not None and getattr(owner, field) is value

    def layers(self, config: ModelConfig) -> list[int]:
        """Returns the layers that have the leaf; [0] if the leaf belongs to no layer."""
        if "{layer}" not in self.target:
            return [0]
        uses = self.uses(config)
        return [layer for layer in uses if not self.is_shared or config.owner(layer) == layer]

    def uses(self, config: ModelConfig) -> list[int]:
        """Returns the layers that have the rule's block, those included that share the leaf with another layer."""
        layers = range(config.num_layers)
        return [
            layer for layer in layers if not self.block or self.block in config.blocks_of(layer)
        ]


@dataclass(frozen=True)
class RuleSet:
    """All tensors that a family's checkpoints may hold.

    Attributes:
        rules: the rules of the leaves.
        ignored: patterns of tensor names that a model does not need.
        unused: (block, pattern of tensor names with the layer's number as the first group) that a layer with the block
            does not need.
        tied: (copy, original) names; with tied embeddings a checkpoint may hold both, if they are equal.
        further_layers: pattern of the beginning of a layer's tensor names, with the layer's number as a group. Tensors
            of the config's `mtp_layers` after the model's last layer are ignored.
        prefixes: (pattern of a prefix in the checkpoint, its replacement in the rules) of tensor names, as `re.sub`
            takes them. The first one that fits is replaced.
        older_name: returns the name in the rules of a tensor of an older layout, whose numbers count something else
            than layers; any other name unchanged. `None` if there is no such layout.
    """

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    unused: tuple[tuple[str, str], ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    further_layers: str | None = None
    prefixes: tuple[tuple[str, str], ...] = ()
    older_name: Callable[[str, ModelConfig], str] | None = None

    def name_of(self, stored: str, config: ModelConfig) -> str:
        """Returns the name that a stored tensor has in the rules."""
        if self.older_name is not None:
            stored = self.older_name(stored, config)
        for prefix, replacement in self.prefixes:
            name, found = re.subn(rf"\A{prefix}", replacement, stored)
            if found:
                return name
        return stored

    def ignores(self, name: str, config: ModelConfig) -> bool:
        """Whether a tensor with this name may be left out for a model of this config."""
        if self.further_layers is not None:
            found = re.match(self.further_layers, name)
            if found is not None and 0 <= int(found[1]) - config.num_layers < config.mtp_layers:
                return True
        for block, pattern in self.unused:
            found = re.fullmatch(pattern, name)
            layer = config.num_layers if found is None else int(found[1])
            if layer < config.num_layers and block in config.blocks_of(layer):
                return True
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True)
class Recipe:
    """A rule applied to one leaf of one model, with complete names and numbers of rows."""

    target: str
    sources: tuple[str, ...]
    combine: Combine
    rows: tuple[int, ...]
    regroup: Regrouped | None = None
    offset: float = 0.0
    fused: str = ""
    pairs: HeadPairs | None = None
    either_last: bool = False

    def of_exchanged_source(self) -> "Recipe | None":
        """Returns the recipe with the same result for the other order of the last two axes; `None` if it has one."""
        if not self.either_last:
            return None
        return replace(self, combine=_OF_EXCHANGED[self.combine], either_last=False)

    def of_fused_source(self) -> "Recipe":
        """Returns the recipe with the same result for the tensor `fused`, which must have a name."""
        return replace(self, sources=(self.fused,), combine=_OF_FUSED[self.combine], fused="")

    def of_transposed_source(self) -> "Recipe | None":
        """Returns the recipe with the same result for a source with exchanged last axes; `None` if there is none."""
        combine = _OF_TRANSPOSED.get(self.combine)
        return None if combine is None else replace(self, combine=combine)

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the shape that each source must have for a leaf of `shape`."""
        if self.combine == "copy":
            assert len(self.sources) == 1, self
            return (shape,)
        if self.combine == "select":
            assert len(self.sources) == 1, self
            assert self.regroup is not None, self
            groups, sections, order = self.regroup
            selected = groups * sum(sections[at] for at in order)
            assert selected == math.prod(shape[:-1]), (self, shape)
            return ((groups * sum(sections), shape[-1]),)
        if self.combine == "taps":
            channels = self.rows or (shape[1],)
            assert (len(channels), sum(channels)) == (len(self.sources), shape[1]), (self, shape)
            return tuple((each, 1, shape[0]) for each in channels)
        if self.combine == "squeeze":
            return ((1, 1, *shape, 1),)
        if self.combine == "transpose":
            assert len(self.sources) == 1, self
            return ((shape[1], shape[0], *shape[2:]),)
        if self.combine in ("deinterleave", "deinterleave_rows"):
            return (shape,)
        if self.combine in ("deinterleave_transpose", "swap_last"):
            return ((shape[0], shape[2], shape[1]),)
        if self.combine == "last_axis_first":
            return ((shape[1], shape[2], shape[0]),)
        if self.combine == "only_row":
            return ((1, *shape),)
        if self.combine == "stack_transpose":
            assert len(self.sources) == shape[1], (self, shape)
            return ((shape[0], *shape[2:]),) * len(self.sources)
        if self.combine == "stack":
            each, rest = divmod(len(self.sources), shape[0])
            assert not rest, (self, shape)
            stored = shape[1:] if each == 1 else (shape[1] // each, *shape[2:])
            return (stored,) * len(self.sources)
        assert sum(self.rows) == shape[0], (self, shape)
        return tuple((rows, *shape[1:]) for rows in self.rows)


def expand(rules: RuleSet, config: ModelConfig) -> dict[str, Recipe]:
    """Returns dotted path -> recipe, for every leaf of a model of this config."""
    recipes = {}
    for rule in rules.rules:
        layers = rule.layers(config) if rule.applies(config) else []
        if not layers:
            continue
        rows = tuple(_product(config, names) for names in rule.rows)
        regroup = None if rule.regroup is None else _regrouped(config, rule.regroup)
        for layer in layers:
            target = rule.target.format(layer=layer)
            assert target not in recipes, f"two rules make {target}"
            sources = _sources(rule, config, layer)
            fused, pairs = rule.fused.format(layer=layer), _pairs(rule, config, rows)
            recipes[target] = Recipe(
                target,
                sources,
                rule.combine,
                rows,
                regroup,
                rule.offset,
                fused,
                pairs,
                rule.either_last,
            )
    return recipes


def copies(rules: RuleSet, config: ModelConfig) -> dict[str, str]:
    """Returns name -> original, for tensors that a checkpoint may hold besides their originals, if they are equal.

    Those are copies of tied embeddings, and those that layers have under their own names of what their owner stores.
    """
    found = dict(rules.tied) if config.tie_embeddings else {}
    for rule in rules.rules:
        if not (rule.applies(config) and any("{owner}" in name for name in rule.sources)):
            continue
        for layer in rule.layers(config):
            originals, owner = _sources(rule, config, layer), config.owner(layer)
            for other in range(config.num_layers):
                if config.owner(other) == owner != other:
                    names = _sources(rule, config, layer, owner=other)
                    found |= zip(names, originals, strict=True)
    return found


def _sources(
    rule: Rule, config: ModelConfig, layer: int, *, owner: int | None = None
) -> tuple[str, ...]:
    """Returns the complete names of the sources, ordered by expert; `owner` replaces the layer's own."""
    experts = 0 if config.mixture is None else config.mixture.experts
    every = range(experts) if any("{expert}" in name for name in rule.sources) else (0,)
    numbers = {"layer": layer, "owner": config.owner(layer) if owner is None else owner}
    if any("{use}" in name for name in rule.sources):
        numbers["use"] = rule.uses(config).index(layer)
    return tuple(name.format(expert=expert, **numbers) for expert in every for name in rule.sources)


def _pairs(rule: Rule, config: ModelConfig, rows: tuple[int, ...]) -> HeadPairs | None:
    if not rule.interleaved:
        return None
    return HeadPairs(sum(rows[: rule.interleaved]), config.head_dim, config.rope.rotary_dim)


def _product(config: ModelConfig, names: tuple[str, ...]) -> int:
    """Returns the product of fields of a config; dotted names are fields of its parts."""
    return math.prod(attrgetter(name)(config) for name in names)


def _regrouped(config: ModelConfig, regroup: Regroup) -> Regrouped:
    sections = tuple(_product(config, names) for names in regroup.sections)
    return Regrouped(_product(config, regroup.groups), sections, regroup.order)
