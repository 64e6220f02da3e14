"""A torch decoder in the design of gpt-fast, the peer of a decode step: static caches, compiled layers, one CUDA graph.

The design is that of gpt-fast (PyTorch, 2023): plain torch, with `scaled_dot_product_attention` over the used part of a
static cache, and no work on the host. All layers share one compiled function. The whole step is captured in one CUDA
graph. The weights share memory with jaxkv's parameters. Dense decoders with gated feed-forwards and full attention are
supported, such as Llama and Qwen3.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from benchmarks.generate import Setting
from benchmarks.timing import Effort, Timing, time_launches
from jaxkv.config.model import ModelConfig
from jaxkv.layers.rope import FREQUENCIES
from jaxkv.models.protocol import Params

Weights = Mapping[str, torch.Tensor]


class TorchDecoder:
    """A model and its caches.

    Args:
        config: the model's config.
        params: jaxkv's parameters, whose memory is shared; they must outlive this object.
        batch: number of sequences.
        length: capacity of the caches in tokens, per sequence.
        joined: adds up over devices what each one's part of a layer's output projections returns; with it, `config`
            and `params` are those of one device.

    Raises:
        ValueError: the model has a feature that is not supported.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        batch: int,
        length: int,
        joined: Callable[[torch.Tensor], torch.Tensor] = lambda part: part,
    ) -> None:
        known = {"down", "gate_up", "norms", "o", "qkv", "qk_norm"}
        strange = {name for layer in params["layers"] for name in layer} - known
        if strange or any(window is not None for window in config.windows):
            raise ValueError(
                f"the peer supports dense decoders with full attention, got {', '.join(sorted(strange)) or 'windows'}"
            )
        shared: Any = jax.tree.map(torch.from_dlpack, params)
        self.config, self.weights, self.joined = config, shared, joined
        embed = shared["embed"]
        shape = (batch, config.kv_heads, length, config.head_dim)
        self.caches = [(embed.new_zeros(shape), embed.new_zeros(shape)) for _ in config.windows]
        frequencies = torch.from_numpy(FREQUENCIES[config.rope.kind](config.rope)).to(embed.device)
        angles = torch.arange(length, device=embed.device)[:, None] * frequencies
        self.angles = torch.stack((angles.cos(), angles.sin()))
        self.tokens = torch.zeros((batch, 1), dtype=torch.long, device=embed.device)

    def prefill(self, prompts: np.ndarray) -> np.ndarray:
        """Computes prompts, [batch, prompt_tokens], uncompiled, and returns the first tokens."""
        tokens = torch.from_numpy(prompts).to(self.tokens.device)
        positions = torch.arange(prompts.shape[1], device=tokens.device)
        with torch.inference_mode():
            self.tokens.copy_(self._next(tokens, positions, prompts.shape[1], _layer))
        return self.tokens[:, 0].cpu().numpy().copy()

    def step(self, position: int) -> np.ndarray:
        """Runs one uncompiled step for tokens at `position` and returns the next tokens."""
        positions = torch.tensor([position], device=self.tokens.device)
        with torch.inference_mode():
            self.tokens.copy_(self._next(self.tokens, positions, position + 1, _layer))
        return self.tokens[:, 0].cpu().numpy().copy()

    def time_step(self, position: int, effort: Effort) -> Timing:
        """Times steps at one position, each fed with the tokens of the one before; needs a GPU."""
        with torch.inference_mode():
            graph = self.step_graph(position)
            return time_launches(
                graph.replay, calls=1, effort=effort, wait=lambda _: torch.cuda.synchronize()
            )

    def step_graph(self, position: int) -> torch.cuda.CUDAGraph:
        """Returns a compiled step at one position as a graph, fed with the tokens of its last replay."""
        layer = torch.compile(_layer, dynamic=False, fullgraph=True)
        positions = torch.tensor([position], device=self.tokens.device)

        def run() -> None:
            self.tokens.copy_(self._next(self.tokens, positions, position + 1, layer))

        side = torch.cuda.Stream()
        with torch.inference_mode():
            # Compilation and the libraries' first-use setup must not be captured.
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    run()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # The threads of NCCL may call CUDA meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run()
        return graph

    def _next(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        length: int,
        layer: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """Returns the most likely token after each sequence, [batch, 1]."""
        weights, config = self.weights, self.config
        hidden = weights["embed"][tokens]
        angles = self.angles[:, positions].to(hidden.device)
        sizes = (config.heads, config.kv_heads, config.head_dim)
        for of_layer, caches in zip(weights["layers"], self.caches, strict=True):
            hidden = layer(
                of_layer,
                hidden,
                angles,
                positions,
                caches,
                length,
                sizes,
                config.norm_eps,
                self.joined,
            )
        last = _norm(hidden[:, -1:], weights["final_norm"], config.norm_eps)
        logits = linear(last, weights.get("lm_head", weights["embed"]))
        return logits.argmax(dim=-1)


def time_decoder(
    config: ModelConfig, params: Params, prompts: np.ndarray, setting: Setting
) -> dict[str, float]:
    """Returns times of uncompiled prompts and of steps at mid-generation, in the columns of `benchmarks.generate`."""
    peer = TorchDecoder(config, params, len(prompts), setting.context + setting.new_tokens)
    seconds = []
    for _ in range(setting.repeats + 1):
        start = time.perf_counter()
        peer.prefill(prompts)
        seconds.append(time.perf_counter() - start)
    timing = peer.time_step(setting.context + setting.new_tokens // 2, Effort())
    ms = timing.us / 1e3
    return {
        "prompt_ms": statistics.median(seconds[1:]) * 1e3,
        "ms_per_token": ms,
        "spread_ms": timing.spread * ms,
    }


def _layer(
    weights: Weights,
    hidden: torch.Tensor,
    angles: torch.Tensor,
    positions: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    length: int,
    sizes: tuple[int, int, int],
    eps: float,
    joined: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Returns a layer's output [batch, tokens, hidden_size]; writes the caches in place."""
    heads, kv_heads, head_dim = sizes
    batch, tokens, _ = hidden.shape
    qkv = linear(_norm(hidden, weights["norms"][0], eps), weights["qkv"])
    qkv = qkv.view(batch, tokens, heads + 2 * kv_heads, head_dim).transpose(1, 2)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    if "qk_norm" in weights:
        q, k = (_norm(x, weight, eps) for x, weight in zip((q, k), weights["qk_norm"], strict=True))
    q, k = (_rotate(x, angles) for x in (q, k))
    for cache, new in zip(caches, (k, v), strict=True):
        cache.index_copy_(2, positions, new)
    keys, values = (cache[:, :, :length] for cache in caches)
    mixed = scaled_dot_product_attention(q, keys, values, is_causal=tokens > 1, enable_gqa=True)
    mixed = mixed.transpose(1, 2).reshape(batch, tokens, -1)
    hidden = hidden + joined(linear(mixed, weights["o"]))
    gates, ups = linear(_norm(hidden, weights["norms"][1], eps), weights["gate_up"]).chunk(
        2, dim=-1
    )
    return hidden + joined(linear(silu(gates) * ups, weights["down"]))


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def _rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    cos, sin = angles
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
