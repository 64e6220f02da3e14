"""Times Hugging Face Transformers' continuous batching on the workload of `benchmarks.engine`, with random weights too.

    python -m benchmarks.hf_serving --shape qwen3-0.6b --seconds 60

All settings are Transformers' defaults: attention (flash kernels where they are installed, else torch's SDPA over
gathered pages), CUDA graphs, batch size. A run that exceeds its time is stopped, and reports the tokens so far.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from benchmarks.engine import parser, show
from benchmarks.record import save_record
from jaxkv.bench.figures import Timeline, figures_of
from jaxkv.bench.shapes import SHAPES
from jaxkv.bench.workload import Workload
from jaxkv.config.model import ModelConfig
from jaxkv.engine.request import Request


def build(config: ModelConfig, dtype: str, device: str) -> Any:  # noqa: ANN401 - torch is optional
    """Returns Transformers' model of the same sizes, with random weights."""
    kinds = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
    rope: dict[str, Any] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind == "llama3":
        rope |= {
            "factor": config.rope.factor,
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
            "original_max_position_embeddings": config.rope.original_max_positions,
        }
    theirs = kinds[config.family](
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rope_parameters=rope,
        tie_word_embeddings=config.tie_embeddings,
        rms_norm_eps=config.norm_eps,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(theirs, dtype=getattr(torch, dtype)).eval()


class Server:
    """Transformers' manager of continuous batching over one model.

    Args:
        model: a model of `build`.
        requests: the requests to come, from which it chooses its sizes.
    """

    def __init__(self, model: Any, requests: Sequence[Request]) -> None:  # noqa: ANN401 - torch is optional
        start = time.perf_counter()
        longest = max(request.max_tokens for request in requests)
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(
                max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(),
            workload_hints=WorkloadHints(
                max_prompt_length=max(len(request.prompt) for request in requests),
                max_generated_length=longest,
                num_requests=len(requests),
            ),
        )
        with torch.no_grad():
            self._manager.warmup()
        self._manager.start()
        settled = self._manager.continuous_batching_config
        self.about = {
            "attention": model.config._attn_implementation,
            "cuda_graphs": str(settled.use_cuda_graph),
            "overlapped": settled.use_async_batching,
            "warm_up_s": time.perf_counter() - start,
        }

    def serve(self, requests: Sequence[Request], seconds: float) -> tuple[list[Timeline], bool]:
        """Serves all requests at once; returns the times of their tokens, and whether the time limit was reached."""
        start = time.perf_counter()
        lines: dict[str, Timeline] = {}
        for request in requests:
            name = self._manager.add_request(
                list(request.prompt),
                max_new_tokens=request.max_tokens,
                record_timestamps=True,
            )
            lines[name] = Timeline(prompt_tokens=len(request.prompt), arrived=0.0)
        left = set(lines)
        while left and time.perf_counter() - start < seconds and self._manager.is_running():
            result = self._manager.get_result(timeout=0.5)
            if result is not None and result.is_finished():
                left.discard(result.request_id)
                lines[result.request_id].tokens = [at - start for at in result.timestamps or ()]
                lines[result.request_id].failed = result.error is not None
        # Unfinished requests count with the tokens they have produced.
        for name, state in list(self._manager.batch_processor.scheduler.active_requests.items()):
            if name in left:
                lines[name].tokens = [at - start for at in state.timestamps or ()]
        return [line for line in lines.values() if line.tokens], bool(left)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the workload once."""
    began = time.perf_counter()
    made = parser("Times Hugging Face Transformers' continuous batching.")
    made.add_argument("--seconds", type=float, default=60.0, help="for the workload, at most")
    options = made.parse_args(arguments)
    config = SHAPES[options.shape]
    workload = Workload(
        requests=options.requests,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
    )
    requests = workload.draw(config.vocab_size)
    model = build(config, options.dtype, "cuda" if torch.cuda.is_available() else "cpu")
    server = Server(model, requests)
    print(f"ready after {time.perf_counter() - began:.1f} s: {server.about}", flush=True)
    timelines, cut = server.serve(requests, options.seconds)
    figures = figures_of(timelines).as_dict()
    spreads = {
        f"{name}_{which}": number
        for name in ("ttft_ms", "tpot_ms", "itl_ms")
        for which, number in (figures[name] or {}).items()
    }
    row = {
        "server": f"transformers {transformers.__version__}",
        **server.about,
        "cut": cut,
        **{name: value for name, value in figures.items() if not name.endswith("_ms")},
        **spreads,
    }
    show(row)
    save_record(f"engine-{options.shape}-transformers", [row], folder=options.folder)
    sys.stdout.flush()
    # The manager's threads may still be inside a step.
    os._exit(0)


if __name__ == "__main__":
    main()
