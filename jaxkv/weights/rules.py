"""How a parameter leaf is put together from checkpoint tensors, as data. Knows no file, no array and no family."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal, NamedTuple

from jaxkv.config.model import ModelConfig

Combine = Literal[
    "copy",
    "stack",
    "concat",
    "turn",
    "stack_turn",
    "taps",
    "pick",
    "part",
    "part_rows",
    "part_turn",
    "last_first",
]

_OF_TURNED: Mapping[Combine, Combine] = {"part_turn": "part_rows", "last_first": "turn"}
"""What makes the same leaf of a source whose last two axes are exchanged."""


@dataclass(frozen=True)
class Regroup:
    """Rows that a checkpoint keeps group by group, such as each head's query and gate, put section by section.

    Attributes:
        groups: the `ModelConfig` fields whose product is the number of groups.
        sections: for each section of a group, the fields whose product is its rows; in the checkpoint's order.
        order: in which order the sections follow each other in the leaf; "pick" takes those that are named alone.
    """

    groups: tuple[str, ...]
    sections: tuple[tuple[str, ...], ...]
    order: tuple[int, ...]


class Regrouped(NamedTuple):
    """A `Regroup` of one model: numbers."""

    groups: int
    sections: tuple[int, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """How one parameter leaf, or one per layer, is put together.

    Attributes:
        target: path of the leaf in the parameter tree, dotted; `{layer}` makes it one leaf per layer.
        sources: names of the tensors in the checkpoint, in order; `{expert}` makes a name one for each expert.
        combine: "copy" takes the only source as it is. "stack" puts sources of equal shape along a new first axis, or
            equally many at each place of it, one below the other. "concat" joins them along their first axis. "turn"
            exchanges the first two axes of the only source, "stack_turn" those of the stack. "taps" makes
            [taps, channels] of the only source, the weight [channels, 1, taps] of a convolution of each channel by
            itself. "part" puts the numbers at even places of the only source's last axis before those at odd places,
            "part_rows" does so along the second of three axes, "part_turn" along the last, and then exchanges the last
            two; "last_first" makes the last of three axes the first. "pick" takes some sections of each group of the
            only source's rows (see `regroup`).
        rows: "concat" only: for each source, the `ModelConfig` fields whose product is its first axis.
        when: the boolean field of `ModelConfig`, or of a part of it ("mamba.in_bias"), and the value of it that makes
            the rule apply.
        block: the rule applies to layers whose pattern names this block; to all if empty.
        regroup: of the first source's rows.
        offset: what is added to every number.
    """

    target: str
    sources: tuple[str, ...]
    combine: Combine = "copy"
    rows: tuple[tuple[str, ...], ...] = ()
    when: tuple[str, bool] | None = None
    block: str = ""
    regroup: Regroup | None = None
    offset: float = 0.0

    def applies(self, config: ModelConfig) -> bool:
        """Whether a model of this config has the leaf; of one with `{layer}`, whether a layer may have it."""
        if self.when is None:
            return True
        name, value = self.when
        part, _, field = name.rpartition(".")
        owner = getattr(config, part) if part else config
        return owner is not None and getattr(owner, field) is value

    def layers(self, config: ModelConfig) -> list[int]:
        """Returns the layers that have the leaf; just 0 if it is not one of a layer."""
        if "{layer}" not in self.target:
            return [0]
        layers = range(config.num_layers)
        return [
            layer for layer in layers if not self.block or self.block in config.blocks_of(layer)
        ]


@dataclass(frozen=True)
class RuleSet:
    """Everything that a family's checkpoints may hold.

    Attributes:
        rules: the leaves.
        ignored: patterns of names that hold nothing a model needs.
        tied: (copy, original) names; with tied embeddings a checkpoint may hold both, if they are equal.
        further_layers: how names of a layer begin, with its number as a group; those of the config's `mtp_layers`, past
            the model's last layer, are harmless.
    """

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()
    further_layers: str | None = None

    def ignores(self, name: str, config: ModelConfig) -> bool:
        """Whether a tensor of this name is known to be harmless in a checkpoint of this config."""
        if self.further_layers is not None:
            found = re.match(self.further_layers, name)
            if found is not None and 0 <= int(found[1]) - config.num_layers < config.mtp_layers:
                return True
        return any(re.fullmatch(pattern, name) for pattern in self.ignored)


@dataclass(frozen=True)
class Recipe:
    """A rule for one leaf of one model: `rows` are numbers, names are complete."""

    target: str
    sources: tuple[str, ...]
    combine: Combine
    rows: tuple[int, ...]
    regroup: Regrouped | None = None
    offset: float = 0.0

    def of_turned_source(self) -> "Recipe | None":
        """Returns the recipe of the same leaf if the source's last two axes are exchanged, `None` if there is none."""
        combine = _OF_TURNED.get(self.combine)
        return None if combine is None else replace(self, combine=combine)

    def source_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Returns the shape that each source must have for a leaf of `shape`."""
        if self.combine == "copy":
            assert len(self.sources) == 1, self
            return (shape,)
        if self.combine == "pick":
            assert len(self.sources) == 1, self
            assert self.regroup is not None, self
            groups, sections, order = self.regroup
            picked = groups * sum(sections[at] for at in order)
            assert picked == math.prod(shape[:-1]), (self, shape)
            return ((groups * sum(sections), shape[-1]),)
        if self.combine == "taps":
            assert len(self.sources) == 1, self
            return ((shape[1], 1, shape[0]),)
        if self.combine == "turn":
            assert len(self.sources) == 1, self
            return ((shape[1], shape[0], *shape[2:]),)
        if self.combine in ("part", "part_rows"):
            return (shape,)
        if self.combine == "part_turn":
            return ((shape[0], shape[2], shape[1]),)
        if self.combine == "last_first":
            return ((shape[1], shape[2], shape[0]),)
        if self.combine == "stack_turn":
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
    """Returns the recipe of every leaf that a model of this config has, by the leaf's dotted path."""
    recipes = {}
    for rule in rules.rules:
        if not rule.applies(config):
            continue
        rows = tuple(_product(config, names) for names in rule.rows)
        regroup = None if rule.regroup is None else _regrouped(config, rule.regroup)
        for layer in rule.layers(config):
            target = rule.target.format(layer=layer)
            assert target not in recipes, f"two rules make {target}"
            sources = _sources(rule, config, layer)
            recipes[target] = Recipe(target, sources, rule.combine, rows, regroup, rule.offset)
    return recipes


def _sources(rule: Rule, config: ModelConfig, layer: int) -> tuple[str, ...]:
    """Returns complete names; all those of the first expert come first, where names have a place for one."""
    experts = 0 if config.mixture is None else config.mixture.experts
    every = range(experts) if any("{expert}" in name for name in rule.sources) else (0,)
    return tuple(
        name.format(layer=layer, expert=expert) for expert in every for name in rule.sources
    )


def _product(config: ModelConfig, names: tuple[str, ...]) -> int:
    """Multiplies fields of a config, those of its parts by dotted names."""
    return math.prod(attrgetter(name)(config) for name in names)


def _regrouped(config: ModelConfig, regroup: Regroup) -> Regrouped:
    sections = tuple(_product(config, names) for names in regroup.sections)
    return Regrouped(_product(config, regroup.groups), sections, regroup.order)
