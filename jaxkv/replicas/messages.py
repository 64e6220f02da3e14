"""The messages between the front of replicas and the process of each: the records in them, and errors as values.

To a replica: ("start", options), ("call", number, operation, arguments), ("cancel", number). From it: ("ready", facts),
("pieces", number, pieces), ("done", number, result), ("error", number, error).
"""

import builtins
from dataclasses import dataclass
from typing import Any

from jaxkv import errors
from jaxkv.cache.kept_pages.stats import PrefixStats
from jaxkv.cache.prefix.report import Explanation, GroupReport
from jaxkv.config.cache import CacheConfig
from jaxkv.config.checkpoint_policy import CheckpointPolicy
from jaxkv.config.engine import EngineConfig
from jaxkv.config.lora import LoraConfig
from jaxkv.config.speculation import SpeculationConfig
from jaxkv.engine.lora.loaded_adapter import AdapterVersion
from jaxkv.engine.request import Piece, RequestOutput, SampleOutput, Timing, Usage
from jaxkv.engine.saved_prefixes import PrefixCounts
from jaxkv.engine.speculation.speculation import SpeculationStats
from jaxkv.engine.warm_up import WarmUp
from jaxkv.links.values import Values
from jaxkv.monitoring.stats import GroupStats, Stats
from jaxkv.offload.entries import HostStats
from pallas_kernels.dispatch import Unsupported


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the front needs to know of the model that a replica has loaded.

    Attributes:
        eos_ids: ids that end a text.
        max_model_len: longest prompt plus output, in tokens.
        vocab_size: number of the model's token ids.
        max_sequences: most sequences that one replica runs at once.
        block, cache_tokens: see `jaxkv.replicas.router.block_sizes`.
        repeats_bits: whether a request's bits are the same beside any others.
    """

    eos_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int
    max_sequences: int
    block: int
    cache_tokens: int
    repeats_bits: bool


@dataclass(frozen=True)
class RemoteError:
    """An error of a replica.

    Attributes:
        kind: name of its class.
        text: its message.
    """

    kind: str
    text: str


VALUES = Values(
    (
        *(AdapterVersion, CacheConfig, CheckpointPolicy, EngineConfig, Explanation, Facts),
        *(GroupReport, GroupStats, HostStats, LoraConfig, Piece, PrefixCounts, PrefixStats),
        *(RemoteError, RequestOutput, SampleOutput, SpeculationConfig, SpeculationStats, Stats),
        *(Timing, Usage, WarmUp),
    )
)
"""Writes and reads the values of these messages."""


def as_value(error: BaseException) -> RemoteError:
    """Returns an error as a value."""
    return RemoteError(type(error).__name__, str(error))


def as_error(value: RemoteError) -> Exception:
    """Returns an error of the same class and message; a `RuntimeError` that names a class that is not known here."""
    for known in (errors, builtins):
        kind: Any = getattr(known, value.kind, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return _made(kind, value.text)
    if value.kind == Unsupported.__name__:
        return Unsupported(value.text)
    return RuntimeError(f"{value.kind}: {value.text}")


def _made(kind: type[Exception], text: str) -> Exception:
    """Returns an error of a class that takes its message alone, as all but a few built-in ones do."""
    return (
        RuntimeError(f"{kind.__name__}: {text}") if issubclass(kind, UnicodeError) else kind(text)
    )
