"""The bridge on a GPU: order of the two frameworks' streams, in-place writes, capture."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import pallas_kernels
from jaxkv.cache.owner import CacheOwner
from jaxkv.cache.spec import group_layers
from jaxkv.cache.state import Cache
from jaxkv.cache.variants import gqa, place
from tests.torch_bridge.tiny import greedy, prompts, tiny_model
from torch_bridge import JaxkvCache, LeaseLeaked, from_torch, kernels, lease, to_torch
from torch_bridge.inside import torch_function, why_not_captured
from torch_bridge.sharing import leases as lease_module
from torch_bridge.sharing.kept_lease import KeptLease

pytestmark = [pytest.mark.gpu, pytest.mark.torch]
CUDA = "cuda"
SLEEP = 400_000  # cycles, about a quarter of a millisecond


def owner(pages=64, page_size=64):
    layout = group_layers(place([gqa(8, 128, dtype="float32", page_size=page_size)]))
    return CacheOwner(layout, {"gqa": pages})


@jax.jit(donate_argnums=0)
def slowly_fill(cache, value):
    """Fills the cache with a value that takes a while to be known."""
    busy = jnp.ones((1024, 1024))
    for _ in range(6):
        busy = jnp.tanh(busy @ busy)
    late = value + 0 * busy[0, 0]
    return Cache(arrays=tuple(jnp.full_like(a, late) for a in cache.arrays), keys=cache.keys), late


bounds = jax.jit(lambda cache: (cache.arrays[0].min(), cache.arrays[0].max()))


def race(owner, iterations, cycles=SLEEP):
    """Lets both frameworks fill the cache in turns, and returns what each saw of the other."""
    by_jax, by_torch = [], torch.zeros(iterations, 2, device=CUDA)
    for i in range(iterations):
        with lease(owner) as views:
            torch.cuda._sleep(cycles)
            views["layer0.key"].fill_(float(i))
            views.commit()
        by_jax.append(bounds(owner.handle().cache))
        owner.run(slowly_fill, jnp.float32(i + 0.5))
        with lease(owner) as views:
            pages = views["layer0.key"]
            by_torch[i, 0], by_torch[i, 1] = pages.min(), pages.max()
            del pages
            views.commit()
    jax_saw = [(float(low), float(high)) for low, high in by_jax]
    return jax_saw, [tuple(pair) for pair in by_torch.tolist()]


def test_both_sides_see_each_others_writes_a_thousand_times():
    jax_saw, torch_saw = race(owner(), 1000)
    assert jax_saw == [(i, i) for i in range(1000)]
    assert torch_saw == [(i + 0.5, i + 0.5) for i in range(1000)]


def test_the_race_is_lost_without_the_fence(monkeypatch):
    done = jnp.zeros(64).block_until_ready()
    monkeypatch.setattr(lease_module, "fence", lambda device: done)
    # Long enough for a host that is busy with other things.
    jax_saw, _ = race(owner(), 20, 200 * SLEEP)
    assert jax_saw != [(i, i) for i in range(20)]


def test_torch_waits_for_jax_to_have_read():
    held = owner()
    read = jax.jit(lambda cache, busy: cache.arrays[0].max() + 0 * busy[0, 0])
    grind = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ y), x))
    out = []
    for i in range(20):
        with lease(held) as views:
            views["layer0.key"].fill_(float(i))
            views.commit()
        busy = grind(jnp.ones((1024, 1024)))
        out.append(read(held.handle().cache, busy))
        with lease(held) as views:
            views["layer0.key"].fill_(-1.0)
            views.commit()
    assert [float(x) for x in out] == list(range(20))


def test_a_lease_does_not_make_the_host_wait():
    held = owner()
    with lease(held) as views:  # compiles
        views.commit()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000_000)
    start.record()
    with lease(held) as views:
        views.commit()
    assert not start.query()
    end.synchronize()
    torch.cuda.synchronize()


def test_xla_would_refuse_a_donation_while_a_view_lives():
    held = owner()
    views = lease(held)
    kept = views["layer0.key"][1]
    with pytest.raises(LeaseLeaked, match=r"layer0\.key"):
        views.commit()
    del kept
    views.commit()
    view = to_torch(held.handle().cache.arrays[0])
    with pytest.raises(LeaseLeaked, match="outside of a lease"):
        lease(held)
    del view
    with lease(held) as views:
        views.commit()


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_misaligned_memory_is_refused_before_xla_sees_it(offset):
    tensor = torch.zeros(64, dtype=torch.uint8, device=CUDA)[offset:]
    with pytest.raises(ValueError, match="begins"):
        from_torch(tensor)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, inside inductor
def test_kernels_write_into_torchs_own_memory_and_agree_with_jax():
    pools = [torch.zeros(32, 16, 8, 128, dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
    pointers = [pool.data_ptr() for pool in pools]
    new = [torch.randn(24, 8, 128, dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
    slots = torch.randperm(512, device=CUDA)[:24].to(torch.int32)
    torch.cuda._sleep(SLEEP)
    kernels.page_write(pools, new, slots)
    for pool, values, pointer in zip(pools, new, pointers, strict=True):
        wanted = torch.zeros(512, 8, 128, dtype=torch.bfloat16, device=CUDA)
        wanted[slots.long()] = values
        assert torch.equal(pool.view(512, 8, 128), wanted)
        assert pool.data_ptr() == pointer
    q = torch.randn(2, 32, 128, dtype=torch.bfloat16, device=CUDA)
    table = torch.arange(32, dtype=torch.int32, device=CUDA).view(2, 16)
    lengths = torch.tensor([250, 3], dtype=torch.int32, device=CUDA)
    call = partial(kernels.paged_attention, scale=0.1)
    ours = call(q, *pools, table, lengths)
    arrays = [from_torch(tensor) for tensor in (q, *pools, table, lengths)]
    theirs = jax.jit(partial(pallas_kernels.paged_attention, scale=0.1))(*arrays)
    assert torch.equal(ours, to_torch(theirs))
    compiled = torch.compile(lambda *a: call(*a) * 2, fullgraph=True)
    assert torch.equal(compiled(q, *pools, table, lengths), ours * 2)


@pytest.mark.parametrize("is_other", [False, True])
def test_a_lease_that_rests_is_ordered_whatever_streams_torch_uses(is_other):
    held = owner()
    kept = KeptLease(held)
    first = torch.cuda.Stream()
    second = torch.cuda.Stream() if is_other else first
    for i in range(20):
        with torch.cuda.stream(first):
            views = kept.borrow()
            torch.cuda._sleep(4 * SLEEP)
            views["layer0.key"].fill_(float(i))
            kept.put_down(views)
        with torch.cuda.stream(second):
            views = kept.borrow()
            views["layer0.key"].add_(0.5)
            kept.put_down(views)
            del views
        # Asked for on the default stream, which has waited for neither.
        low, high = bounds(held.handle().cache)
        assert (float(low), float(high)) == (i + 0.5, i + 0.5)
    assert kept.num_taken == 20


def test_results_outlive_torchs_kernels_that_read_them():
    q = torch.randn(64, 32, 128, dtype=torch.bfloat16, device=CUDA)
    pools = [torch.randn(64, 16, 8, 128, dtype=torch.bfloat16, device=CUDA) for _ in range(2)]
    table = torch.arange(64, dtype=torch.int32, device=CUDA).view(64, 1)
    lengths = torch.full((64,), 16, dtype=torch.int32, device=CUDA)
    call = partial(kernels.paged_attention, q, *pools, table, lengths, scale=0.1, return_lse=True)
    wanted = call()[0].float().sum()
    spoil = jax.jit(lambda: jnp.full((64, 32, 128), jnp.nan, jnp.bfloat16))
    sums = []
    for _ in range(50):
        out, _ = call()
        torch.cuda._sleep(SLEEP)
        sums.append(out.float().sum())
        del out
        spoil()
    assert all(torch.equal(got, wanted) for got in sums)


def test_jax_is_refused_while_torch_records_a_graph():
    tensor = torch.zeros(64, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        with pytest.raises(RuntimeError, match="records a CUDA graph"):
            from_torch(tensor)


def test_generation_on_a_side_stream_gives_the_same_tokens():
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        pad_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(CUDA, torch.bfloat16).eval()
    model.set_attn_implementation("jaxkv")
    ids, mask = (x.to(CUDA) for x in prompts(2, 100, pads=(0, 30)))
    cache = JaxkvCache(model, max_tokens=1024)
    wanted = greedy(model, ids, mask, 12, past_key_values=cache)
    taken = cache.stats().leases_taken
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    cache.reset(keep_prefix=False)
    with torch.cuda.stream(side):
        got = greedy(model, ids, mask, 12, past_key_values=cache)
    side.synchronize()
    assert torch.equal(got, wanted)
    assert cache.stats().leases_taken == taken == 1


@pytest.mark.parametrize("implementation", ["sdpa", "jaxkv"])
def test_generation_equals_transformers_own_cache(implementation):
    model = tiny_model("llama").to(CUDA)
    ids, mask = (x.to(CUDA) for x in prompts(3, 40, pads=(0, 7, 21)))
    wanted = greedy(model, ids, mask, 24)
    cache = JaxkvCache(model, max_tokens=1024)
    model.set_attn_implementation(implementation)
    for _ in range(2):
        assert torch.equal(greedy(model, ids, mask, 24, past_key_values=cache), wanted)
        cache.reset(keep_prefix=True)
    assert cache.stats().tokens_reused > 0


def test_generation_on_our_kernels_in_bfloat16_gives_sdpas_logits():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(CUDA, torch.bfloat16).eval()
    ids, mask = (x.to(CUDA) for x in prompts(2, 100, pads=(0, 30)))
    options = {"output_logits": True, "return_dict_in_generate": True}
    wanted = greedy(model, ids, mask, 4, **options).logits
    model.set_attn_implementation("jaxkv")
    cache = JaxkvCache(model, max_tokens=1024)
    got = greedy(model, ids, mask, 4, past_key_values=cache, **options).logits
    torch.testing.assert_close(got[0], wanted[0], rtol=2e-2, atol=2e-2)


def test_torch_runs_inside_a_program_on_xlas_stream_and_in_place():
    def double(pages):
        torch.cuda._sleep(SLEEP)
        pages.mul_(2)

    step = torch_function(double, in_place=[0])
    program = jax.jit(lambda pages: step(pages + 1)[0], donate_argnums=0)
    pages = jnp.zeros((256, 256))
    for _ in range(10):
        pages = program(pages)
    assert float(pages.min()) == float(pages.max()) == 2.0 * (2**10 - 1)


def test_the_probe_says_whether_python_is_called_at_each_run():
    reason = why_not_captured()
    print("captured:", reason or "yes")
    assert reason is None or "called Python" in reason


def test_no_key_of_weights_before_a_write_through_data_is_reused():
    model = tiny_model("llama").to(CUDA)
    ids, mask = (one.to(CUDA) for one in prompts(1, 40))
    cache = JaxkvCache(model, max_tokens=256)
    for reused in (0, 32):
        greedy(model, ids, mask, 3, past_key_values=cache)
        cache.reset()
        assert cache.stats().tokens_reused == reused
    model.model.layers[0].self_attn.k_proj.weight.data[3, 5] += 4
    wanted = greedy(model, ids, mask, 8)
    assert torch.equal(greedy(model, ids, mask, 8, past_key_values=cache), wanted)
    assert cache.stats().tokens_reused == 32
