"""Decode steps replayed as CUDA graphs: the tokens of ordinary forwards, and when recordings are dropped."""

import copy
import threading

import jax
import jax.numpy as jnp
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jaxkv.cache.state import Cache
from tests.torch_bridge.tiny import check, greedy, prompts
from torch_bridge import JaxkvCache
from torch_bridge.graphs import recorder, step_graphs

pytestmark = [pytest.mark.gpu, pytest.mark.torch]
CUDA = "cuda"


def model_of(layers=2, seed=0, **more):
    """Returns a model that our kernels support, whose best tokens lead by more than bfloat16's rounding."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 96,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "pad_token_id": 0,
        "eos_token_id": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **more})).to(CUDA, torch.bfloat16).eval()
    model.set_attn_implementation("jaxkv")
    return model


@pytest.fixture(autouse=True)
def decode_steps_alone(monkeypatch):
    """Leaves prompts to the ordinary forward; `test_prompts_on_gpu.py` replays them."""
    monkeypatch.setattr(step_graphs, "MOST_PROMPT_TOKENS", 0)


@pytest.fixture
def model():
    return model_of()


def on_gpu(*sizes, **options):
    return tuple(tensor.to(CUDA) for tensor in prompts(*sizes, **options))


def say(model, ids, mask, count, cache=None, **options):
    """Generates greedily; returns the ids and the logits of each new token."""
    options |= {"output_logits": True, "return_dict_in_generate": True}
    if cache is not None:
        options["past_key_values"] = cache
    out = greedy(model, ids, mask, count, **options)
    return out.sequences, torch.stack(out.logits, 1).float()


def agree(got, wanted, tolerance=0.15):
    """Asserts that logits are close, and ids equal up to a tie, after which texts of rounded numbers may part."""
    ids, logits = got
    others, wanted_logits = wanted
    count = logits.shape[1]
    for row in range(len(ids)):
        differ = (ids[row] != others[row]).nonzero()
        same = count if not len(differ) else int(differ[0]) - (ids.shape[1] - count)
        close = slice(0, same + 1)
        torch.testing.assert_close(
            logits[row, close], wanted_logits[row, close], rtol=0, atol=tolerance
        )
        if same < count:
            best = wanted_logits[row, same].topk(2).values
            assert best[0] - best[1] < 2 * tolerance, (row, same)
    assert (ids == others).float().mean() > 0.5


def both(model, ids, mask, count, max_tokens=1024):
    """Returns ids and logits of ordinary forwards, and of replays with their cache."""
    plain = JaxkvCache(model, max_tokens=max_tokens, graphs=False)
    cache = JaxkvCache(model, max_tokens=max_tokens, graphs=True)
    wanted = say(model, ids, mask, count, plain)
    return wanted, say(model, ids, mask, count, cache), cache


def test_one_row_gives_the_bits_of_ordinary_forwards(model):
    ids, mask = on_gpu(1, 40, pads=(7,))
    wanted, got, cache = both(model, ids, mask, 60, max_tokens=128)
    assert torch.equal(got[0], wanted[0])
    # The page tables are equally wide, and so is the kernel's schedule the same.
    assert torch.equal(got[1], wanted[1])
    assert cache.stats().steps_replayed == 59


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_tokens_are_those_of_ordinary_forwards(model, rows):
    ids, mask = on_gpu(rows, 40, pads=[7 * row % 30 for row in range(rows)])
    wanted, got, cache = both(model, ids, mask, 40)
    stats = cache.stats()
    assert stats.why_not_replayed is None, stats
    assert (stats.steps_replayed, stats.graphs_recorded) == (39, 1)
    assert stats.graph_bytes > 0
    agree(got, wanted)
    assert len(got[0][:, 40:].unique()) > 8
    check(cache)


def test_right_padding_and_holes_give_the_same_tokens(model):
    ids, mask = on_gpu(2, 40)
    mask[0, 30:] = 0
    mask[1, 5:9] = 0
    wanted, got, cache = both(model, ids, mask, 24)
    agree(got, wanted)
    assert cache.stats().steps_replayed == 23


def test_tokens_equal_transformers_own_cache(model):
    ids, mask = on_gpu(2, 40, pads=(0, 9))
    cache = JaxkvCache(model, max_tokens=1024, graphs=True)
    got = say(model, ids, mask, 24, cache)
    model.set_attn_implementation("sdpa")
    agree(got, say(model, ids, mask, 24))
    assert cache.stats().steps_replayed == 23


def test_float32_says_why_it_is_not_replayed_and_is_right():
    model = model_of().float()
    ids, mask = on_gpu(2, 30, pads=(3, 0))
    cache = JaxkvCache(model, max_tokens=512, graphs=True)
    got = greedy(model, ids, mask, 12, past_key_values=cache)
    model.set_attn_implementation("sdpa")
    assert torch.equal(got, greedy(model, ids, mask, 12))
    stats = cache.stats()
    assert stats.steps_replayed == 0
    assert "needs Hopper, 16 bits" in stats.why_not_replayed, stats
    assert torch.rand(4, device=CUDA).shape == (
        4,
    )  # Torch's random numbers are not left in a capture.


def test_forks_resets_and_reuse_share_one_graph(model):
    ids, mask = on_gpu(2, 40, pads=(0, 9))
    plain = JaxkvCache(model, max_tokens=1024, graphs=False)
    cache = JaxkvCache(model, max_tokens=1024, graphs=True)
    first = greedy(model, ids, mask, 6, past_key_values=plain)
    more, ones = on_gpu(2, 3, seed=7)
    shown = torch.cat([mask, torch.ones_like(mask[:, :6]), ones], 1)
    longer = torch.cat([first, more], 1)
    said = []
    for holder in (plain, cache):
        if holder is cache:  # The same tokens, whatever the replayed ones were.
            with torch.no_grad():
                model(ids, attention_mask=mask, position_ids=places(mask), past_key_values=holder)
                for column in range(40, 45):
                    seen = shown[:, : column + 1]
                    model(
                        first[:, column : column + 1],
                        attention_mask=seen,
                        position_ids=places(seen)[:, -1:],
                        past_key_values=holder,
                    )
        child = holder.fork()
        of_child = say(model, longer, shown, 30, child)
        of_parent = say(model, longer, shown, 30, holder)
        holder.reset()
        again = say(model, ids, mask, 30, holder)
        said.append([of_child, of_parent, again])
    for got, wanted in zip(said[1], said[0], strict=True):
        agree(got, wanted)
    stats = cache.stats()
    # One for the calls above, which have other arguments than those of `generate`.
    assert stats.graphs_recorded == 2, stats
    assert stats.why_recorded_again is None
    assert stats.steps_replayed > 90
    assert stats.tokens_reused == plain.stats().tokens_reused > 0


def places(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def test_beams_and_sampling_are_replayed(model):
    ids, mask = on_gpu(2, 30, pads=(3, 0))
    cache = JaxkvCache(model, max_tokens=1024, graphs=True)
    greedy(model, ids, mask, 20, num_beams=4, past_key_values=cache)
    assert cache.stats().steps_replayed == 19
    said = []
    for _ in range(2):
        torch.manual_seed(1)
        cache.reset(keep_prefix=False)
        options = {"attention_mask": mask, "max_new_tokens": 16, "do_sample": True}
        said.append(model.generate(ids, past_key_values=cache, **options))
    assert torch.equal(*said)
    assert cache.stats().why_not_replayed is None


def test_new_values_in_place_need_no_new_graph_and_a_new_parameter_does(model):
    ids, mask = on_gpu(1, 30)
    cache = JaxkvCache(model, max_tokens=512, graphs=True)
    greedy(model, ids, mask, 8, past_key_values=cache)
    other = model_of(seed=5)
    with torch.no_grad():
        model.lm_head.weight.copy_(other.lm_head.weight)
    cache.reset(keep_prefix=False)
    wanted, _, _ = both(model, ids, mask, 8)
    agree(say(model, ids, mask, 8, cache), wanted)
    assert cache.stats().graphs_recorded == 1
    model.model.layers[1].mlp.up_proj.weight = other.model.layers[1].mlp.up_proj.weight
    cache.reset(keep_prefix=False)
    wanted, _, _ = both(model, ids, mask, 8)
    agree(say(model, ids, mask, 8, cache), wanted)
    stats = cache.stats()
    assert stats.graphs_recorded == 2
    assert "replaced or moved" in stats.why_recorded_again


def replayed(model, ids, mask, count, max_tokens=512):
    """Returns the tokens of replayed steps."""
    cache = JaxkvCache(model, max_tokens=max_tokens, graphs=True)
    said = greedy(model, ids, mask, count, past_key_values=cache)
    assert cache.stats().why_not_replayed is None
    return said


def test_weights_that_move_in_the_middle_of_a_text_are_followed(model):
    ids, mask = on_gpu(1, 30)
    wanted = replayed(model, ids, mask, 8)
    cache = JaxkvCache(model, max_tokens=512, graphs=True)
    said = greedy(model, ids, mask, 4, past_key_values=cache)
    model.to("cpu")
    torch.cuda.empty_cache()
    spoil = torch.full((2**26,), 7.0, device=CUDA)
    model.to(CUDA)
    del spoil
    said = greedy(model, said, torch.ones_like(said), 4, past_key_values=cache)
    assert torch.equal(said, wanted)
    assert "replaced or moved" in cache.stats().why_recorded_again


def test_an_attribute_that_is_switched_where_a_text_goes_on_is_followed(model):
    ids, mask = on_gpu(1, 30)
    said = []
    for graphs in (False, True):
        cache = JaxkvCache(model, max_tokens=512, graphs=graphs)
        model.model.layers[0].self_attn.scaling = 64**-0.5
        first = greedy(model, ids, mask, 4, past_key_values=cache)
        model.model.layers[0].self_attn.scaling = 1.0
        said.append(say(model, first, torch.ones_like(first), 8, cache))
    agree(said[1], said[0])
    assert "attributes" in cache.stats().why_recorded_again
    assert cache.stats().steps_replayed == 3 + 7


def test_a_hook_inside_is_called_and_named(model):
    ids, mask = on_gpu(1, 30)
    cache = JaxkvCache(model, max_tokens=512, graphs=True)
    said = say(model, ids, mask, 8, cache)
    wanted, calls = said[0], []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *call: calls.append(1))
    cache.reset(keep_prefix=False)
    agree(say(model, ids, mask, 8, cache), (wanted, said[1]))
    assert len(calls) == 8
    assert "model.layers.1.mlp has hooks" in cache.stats().why_not_replayed
    hook.remove()
    cache.reset(keep_prefix=False)
    assert torch.equal(greedy(model, ids, mask, 8, past_key_values=cache), wanted)
    assert cache.stats().why_not_replayed is None


def test_jax_may_step_in_between(model):
    ids, mask = on_gpu(1, 30)
    cache = JaxkvCache(model, max_tokens=512, graphs=True)
    wanted = replayed(model, ids, mask, 12)
    said = greedy(model, ids, mask, 6, past_key_values=cache)
    same = jax.jit(
        lambda c: (Cache(arrays=tuple(a + 0 for a in c.arrays), keys=c.keys), 0), donate_argnums=0
    )
    moved = jax.jit(
        lambda c: (Cache(arrays=tuple(a * jnp.ones_like(a) for a in c.arrays), keys=c.keys), 0)
    )
    for step in (same, moved):
        cache.owner.run(step)
        ones = torch.ones_like(said)
        said = greedy(model, said, ones, 3, past_key_values=cache)
    assert torch.equal(said, wanted)
    assert "other addresses" in cache.stats().why_recorded_again
    check(cache)


def test_a_failed_recording_falls_back_and_leaves_torch_usable(model, monkeypatch):
    ids, mask = on_gpu(1, 30)
    plain = say(model, ids, mask, 8, JaxkvCache(model, max_tokens=512, graphs=False))
    wanted = replayed(model, ids, mask, 8)
    real = recorder.CudaRecorder.record
    kinds = {
        "OutOfMemoryError": lambda: torch.empty(2**50, device=CUDA),
        "capturing": lambda: torch.ones(1, device=CUDA).item(),
        "injected": lambda: (_ for _ in ()).throw(RuntimeError("injected")),
    }
    for name, fail in kinds.items():

        def record(self, function, pools, fail=fail):
            def failing(pools):
                out = function(pools)
                if torch.cuda.is_current_stream_capturing():
                    fail()
                return out

            return real(self, failing, pools)

        monkeypatch.setattr(recorder.CudaRecorder, "record", record)
        cache = JaxkvCache(model, max_tokens=512, graphs=True)
        assert torch.equal(greedy(model, ids, mask, 8, past_key_values=cache), plain[0]), name
        stats = cache.stats()
        assert stats.steps_replayed == 0
        assert name.lower() in stats.why_not_replayed.lower(), stats
        assert torch.rand(3, device=CUDA).shape == (3,)
        monkeypatch.setattr(recorder.CudaRecorder, "record", real)
        cache = JaxkvCache(model, max_tokens=512, graphs=True)
        assert torch.equal(greedy(model, ids, mask, 8, past_key_values=cache), wanted), name
        assert cache.stats().why_not_replayed is None


def test_other_streams_and_threads_give_the_same_tokens(model):
    ids, mask = on_gpu(2, 30, pads=(0, 4))
    wanted = replayed(model, ids, mask, 24)
    cache = JaxkvCache(model, max_tokens=512, graphs=True)
    for stream in (torch.cuda.Stream(), torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            cache.reset(keep_prefix=False)
            got = greedy(model, ids, mask, 24, past_key_values=cache)
        stream.synchronize()
        assert torch.equal(got, wanted)
    assert cache.stats().graphs_recorded == 1
    said = {}

    def run(number):
        mine = JaxkvCache(model, max_tokens=512, graphs=True)
        for _ in range(3):
            mine.reset(keep_prefix=False)
            said[number] = greedy(model, ids, mask, 24, past_key_values=mine)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 3
    assert all(torch.equal(got, wanted) for got in said.values())


def test_graphs_that_are_replayed_at_once_share_no_workspace():
    """Products that cuBLAS splits write partial sums to the workspace of the capture's handle and stream."""
    device = torch.device("cuda", torch.cuda.current_device())
    weights = [torch.randn(4096, 14336, device=CUDA, dtype=torch.bfloat16) for _ in range(2)]
    x = torch.randn(1, 14336, device=CUDA, dtype=torch.bfloat16)
    recorders = [recorder.CudaRecorder(device) for _ in range(2)]
    works = [
        one.record(lambda _, w=w: [torch.nn.functional.linear(x, w) for _ in range(50)], {})
        for one, w in zip(recorders, weights, strict=True)
    ]
    pooled = {torch.cuda.Stream().cuda_stream for _ in range(40)}
    captured = {work._stream.stream.cuda_stream for work in works}
    assert len(captured) == 2
    assert not captured & pooled
    wanted = [torch.nn.functional.linear(x, w) for w in weights]
    streams = [torch.cuda.Stream() for _ in works]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, work in zip(streams, works, strict=True):
            with torch.cuda.stream(stream):
                outs = work.replay({})
        torch.cuda.synchronize()
        for work, right in zip(works, wanted, strict=True):
            assert all(torch.equal(out, right) for out in work._results)
        assert len(outs) == 50


def test_a_cache_takes_its_graphs_with_it(model):
    ids, mask = on_gpu(1, 30)
    cache = JaxkvCache(model, max_tokens=512, graphs=True)
    wanted = greedy(model, ids, mask, 8, past_key_values=cache)
    assert "forward" in vars(model)
    twin = copy.deepcopy(model)
    del cache
    assert "forward" not in vars(model)
    again = JaxkvCache(twin, max_tokens=512, graphs=True)
    assert torch.equal(greedy(twin, ids, mask, 8, past_key_values=again), wanted)
    assert again.stats().steps_replayed == 7
    check(again)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_gives_the_same_tokens(model):
    ids, mask = on_gpu(1, 30)
    wanted = replayed(model, ids, mask, 8)
    cache = JaxkvCache(model, max_tokens=512, graphs=True)
    compiled = torch.compile(model)
    said = greedy(compiled, ids, mask, 4, past_key_values=cache)
    step = said
    with torch.no_grad():
        for _ in range(4):
            out = compiled(
                step[:, -1:],
                attention_mask=torch.ones_like(step),
                position_ids=torch.full_like(step[:, :1], step.shape[1] - 1),
                past_key_values=cache,
            )
            step = torch.cat([step, out.logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(step, wanted)
