"""`Family`: the record of one model family. Each file of the folders here describes one family, or versions of it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxkv.config.model import ModelConfig
from jaxkv.weights.rules import RuleSet


class Family(NamedTuple):
    """One family of published models.

    Attributes:
        model_type: its name in config.json.
        read: returns the config of a parsed config.json, see `registry.read_config`.
        rules: which tensors of a checkpoint make up which parameter.
    """

    model_type: str
    read: Callable[[Mapping[str, object]], ModelConfig]
    rules: RuleSet
