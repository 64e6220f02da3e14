"""LLM inference in JAX on NVIDIA GPUs, with caches that PyTorch shares without a copy.

The names in `__all__` are the public API, and `jaxkv.errors` has the exceptions; everything else is private.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from jaxkv.log_messages import VARIABLE, show_messages
from jaxkv.version import __version__ as __version__

if TYPE_CHECKING:
    from jaxkv.async_llm import AsyncLLM
    from jaxkv.config.cache import CacheConfig
    from jaxkv.config.checkpoint_policy import CheckpointPolicy
    from jaxkv.config.engine import EngineConfig
    from jaxkv.config.lora import LoraConfig
    from jaxkv.config.reasoning_tokens import ReasoningTokens
    from jaxkv.config.sampling import SamplingParams
    from jaxkv.config.speculation import SpeculationConfig
    from jaxkv.config.structured_outputs import StructuredOutputs
    from jaxkv.generation import generate
    from jaxkv.llm import LLM
    from jaxkv.models.flax_model import FlaxModel
    from jaxkv.models.registry import load_model
    from jaxkv.models.tensor_parallel import TensorParallel, tensor_mesh
    from jaxkv.scoring import score

_HOMES = {
    "AsyncLLM": "jaxkv.async_llm",
    "CacheConfig": "jaxkv.config.cache",
    "CheckpointPolicy": "jaxkv.config.checkpoint_policy",
    "EngineConfig": "jaxkv.config.engine",
    "FlaxModel": "jaxkv.models.flax_model",
    "LLM": "jaxkv.llm",
    "LoraConfig": "jaxkv.config.lora",
    "ReasoningTokens": "jaxkv.config.reasoning_tokens",
    "SamplingParams": "jaxkv.config.sampling",
    "SpeculationConfig": "jaxkv.config.speculation",
    "StructuredOutputs": "jaxkv.config.structured_outputs",
    "TensorParallel": "jaxkv.models.tensor_parallel",
    "generate": "jaxkv.generation",
    "load_model": "jaxkv.models.registry",
    "score": "jaxkv.scoring",
    "tensor_mesh": "jaxkv.models.tensor_parallel",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheConfig",
    "CheckpointPolicy",
    "EngineConfig",
    "FlaxModel",
    "LoraConfig",
    "ReasoningTokens",
    "SamplingParams",
    "SpeculationConfig",
    "StructuredOutputs",
    "TensorParallel",
    "generate",
    "load_model",
    "score",
    "tensor_mesh",
]

show_messages(os.environ.get(VARIABLE, ""))


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used, so that host bookkeeping alone never loads JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
