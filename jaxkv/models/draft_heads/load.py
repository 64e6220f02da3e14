"""Reads the head that drafts for a model: its config before the memory is planned, and its parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxkv.config.model import ModelConfig
from jaxkv.config.speculation import SpeculationConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.draft_heads.eagle3 import draft_places, eagle3_rules, read_eagle3, with_shared
from jaxkv.models.draft_heads.head import DraftHead
from jaxkv.models.draft_heads.mtp import mtp_rules, read_mtp
from jaxkv.models.protocol import Model, Params
from jaxkv.weights.hub import resolve_model
from jaxkv.weights.load import load_by_rules


def head_of(config: SpeculationConfig | None, verifier: Model) -> DraftHead | None:
    """Returns the head that drafts by the method of `config`, without parameters; `None` for other methods.

    Args:
        config: the options of speculation.
        verifier: the model that verifies its drafts.

    Raises:
        ValueError: the model has no such head, is on several devices, or the head is one of another model.
        UnknownConfig, BadCheckpoint: config.json of the head is not supported, or damaged.
    """
    if config is None or not config.reads_hidden:
        return None
    if not isinstance(verifier, Decoder):
        raise ValueError(
            f"{config.method} is supported for a Decoder on one device, got a {type(verifier).__name__}; use ngram"
        )
    if config.method == "mtp":
        return read_mtp(verifier)
    return read_eagle3(resolve_model(config.model, progress=False), verifier)


def load_head(
    head: DraftHead, directory: Path, verifier: ModelConfig, *, dtype: str, progress: bool = False
) -> tuple[DraftHead, Params]:
    """Reads a head's parameters.

    Args:
        head: what `head_of` returned.
        directory: the head's, or for an MTP layer the model's.
        verifier: config of the model that verifies its drafts.
        dtype: dtype name of that model's parameters, which the head's get too.
        progress: show a progress bar on stderr.

    Returns:
        The head, which now has the names in `DraftHead.shared`; and its parameters, those as
        `jax.ShapeDtypeStruct`s.

    Raises:
        BadCheckpoint: a file is missing or damaged, or does not fit the head.
    """
    places = None
    if head.is_mtp:
        rules = mtp_rules(verifier)
    else:
        head = with_shared(head, directory, verifier)
        rules = eagle3_rules(head)
        places = draft_places(head, directory)
    stored = _StoredPart(head)
    params: dict[str, Any] = dict(
        load_by_rules(directory, stored, rules, dtype=dtype, progress=progress)
    )
    if places is not None:
        params["draft_places"] = jnp.asarray(places)
    types = head.param_shapes(dtype)
    return head, {name: params.get(name, types[name]) for name in types}


def joined(head: DraftHead, params: Params, verifier: Params) -> Params:
    """Returns the head's parameters with those of the verifying model that it shares; `None` for no such model."""
    theirs: Mapping[str, Any] = dict.fromkeys(head.shared) if verifier is None else verifier
    return {**params, **{name: theirs[name] for name in head.shared}}


@dataclass(frozen=True)
class _StoredPart:
    """What a head's own file has of its parameters; a `Loadable`."""

    head: DraftHead

    @property
    def config(self) -> ModelConfig:
        return self.head.config

    def param_shapes(self, dtype: DTypeLike) -> Params:
        types: Mapping[str, jax.ShapeDtypeStruct] = self.head.param_shapes(dtype)
        others = {*self.head.shared, "draft_places"}
        return {name: leaf for name, leaf in types.items() if name not in others}

    def few_bits_leaves(self) -> frozenset[str]:
        return self.head.few_bits_leaves()
