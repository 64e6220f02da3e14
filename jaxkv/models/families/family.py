"""`Family`: the record of one model family. Each file of the folders here describes one family, or versions of it."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxkv.config.model import ModelConfig
from jaxkv.weights.rules import RuleSet


class MtpNames(NamedTuple):
    """Names of the tensors of a layer that predicts further tokens (MTP), in the checkpoint of its model.

    Attributes:
        prefix: beginning of all its names; `{after}` is the number of layers of the model.
        block: beginning of the names of its decoder block, likewise.
        embedding_norm, hidden_norm: the norms of the embedding and of the hidden state, behind `prefix`.
        join: the projection of both, behind `prefix`.
        final_norm: the norm before the output projection, behind `prefix`.
        ignored: patterns of further names: copies of what the model has, and further such layers.
    """

    prefix: str
    block: str
    embedding_norm: str
    hidden_norm: str
    join: str
    final_norm: str
    ignored: tuple[str, ...]


class Family(NamedTuple):
    """One family of published models.

    Attributes:
        model_type: its name in config.json.
        read: returns the config of a parsed config.json, see `registry.read_config`.
        rules: which tensors of a checkpoint make up which parameter.
        mtp: names of a layer that predicts further tokens, which checkpoints may have; `None` if they never do.
    """

    model_type: str
    read: Callable[[Mapping[str, object]], ModelConfig]
    rules: RuleSet
    mtp: MtpNames | None = None
