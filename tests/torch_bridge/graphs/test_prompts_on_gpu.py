"""Prompts replayed as CUDA graphs, and checksums of weights replayed as one: the results of ordinary calls."""

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

import torch_bridge
from jaxkv import SamplingParams
from tests.torch_bridge.graphs.test_graphs_on_gpu import CUDA, agree, model_of, on_gpu, say
from tests.torch_bridge.tiny import check
from torch_bridge import JaxkvCache
from torch_bridge.graphs.recorded_sum import RecordedSum
from torch_bridge.graphs.recorder import CudaRecorder
from torch_bridge.graphs.replay_order import ReplayOrder
from torch_bridge.transformers_cache.checksum import read_later, sum_on_device

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


def caches(model):
    return (JaxkvCache(model, max_tokens=2048, graphs=graphs) for graphs in (False, True))


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_prompts_of_any_length_give_the_tokens_of_ordinary_forwards(rows):
    model = model_of()
    plain, cache = caches(model)
    for number, columns in enumerate((60, 33, 17, 52)):
        ids, mask = on_gpu(rows, columns, [5 * row % 15 for row in range(rows)], seed=number)
        wanted = say(model, ids, mask, 6, plain)
        agree(say(model, ids, mask, 6, cache), wanted)
        for one in (plain, cache):
            one.reset(keep_prefix=False)
    stats = cache.stats()
    assert (stats.prompts_replayed, stats.why_prompt_not_replayed) == (3 if rows == 1 else 1, None)
    assert (stats.steps_replayed, stats.why_not_replayed) == (20, None)
    check(cache)


def test_the_second_turn_of_a_chat_is_replayed_behind_its_kept_pages():
    model = model_of()
    plain, cache = caches(model)
    for number in range(3):
        ids, mask = on_gpu(1, 400, seed=number)
        turns = []
        for holder in (plain, cache):
            say(model, ids[:, :330], mask[:, :330], 1, holder)
            holder.reset()
            turns.append(say(model, ids, mask, 12, holder))
            holder.reset()
        agree(turns[1], turns[0])
    stats = cache.stats()
    assert stats.tokens_reused == 3 * 320
    assert (stats.prompts_replayed, stats.why_prompt_not_replayed) == (4, None)


def test_windows_are_replayed_too():
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    config = MistralConfig(
        vocab_size=96, hidden_size=256, intermediate_size=256, num_hidden_layers=2, **sizes,
        pad_token_id=0, eos_token_id=None, sliding_window=24, initializer_range=0.1,
    )  # fmt: skip
    model = MistralForCausalLM(config).to(CUDA, torch.bfloat16).eval()
    model.set_attn_implementation("jaxkv")
    plain, cache = caches(model)
    for number in range(3):
        ids, mask = on_gpu(2, 100, (0, 9), seed=number)
        agree(say(model, ids, mask, 6, cache), say(model, ids, mask, 6, plain))
        cache.reset()
        plain.reset()
    assert cache.stats().prompts_replayed == 2, cache.stats()


def test_generate_replays_packed_prompts():
    model = model_of()
    plain, cache = caches(model)
    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    same = []
    for number in range(4):
        ids, _ = on_gpu(3, 50, seed=number)
        texts = [line[: 50 - 9 * row].tolist() for row, line in enumerate(ids)]
        both = [torch_bridge.generate(model, texts, sampling, cache=one) for one in (plain, cache)]
        tokens = [[one.outputs[0].token_ids for one in outputs] for outputs in both]
        same += [one == other for one, other in zip(*tokens, strict=True)]
    stats = cache.stats()
    assert stats.prompts_replayed == 3, stats
    # Rounding may turn a tie.
    assert sum(same) >= 9, same


def test_prompts_on_another_stream_and_of_a_moved_weight_are_right():
    model = model_of()
    plain, cache = caches(model)
    for number in range(4):
        if number == 3:
            proj = model.model.layers[0].mlp.up_proj
            proj.weight = torch.nn.Parameter(proj.weight.detach() * -1)
        ids, mask = on_gpu(1, 90, seed=number)
        wanted = say(model, ids, mask, 4, plain)
        with torch.cuda.stream(torch.cuda.Stream() if number == 2 else torch.cuda.current_stream()):
            got = say(model, ids, mask, 4, cache)
        torch.cuda.synchronize()
        agree(got, wanted)
        for one in (plain, cache):
            one.reset(keep_prefix=False)
    stats = cache.stats()
    assert stats.prompts_replayed == 3, stats
    assert "replaced or moved" in str(stats.why_recorded_again)


def test_a_replayed_checksum_is_that_of_the_same_work_and_follows_the_bits():
    device = torch.device(CUDA, torch.cuda.current_device())
    parts = [
        torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
        for size in (3, 70_000, 1 << 24, 5_000_016, 100)
    ]
    summed = RecordedSum(CudaRecorder(device), ReplayOrder(device))
    wanted = int(sum_on_device(parts))
    assert [int(summed(parts)) for _ in range(3)] == [wanted] * 3
    assert summed.is_recorded
    for part in parts:
        for place in (0, len(part) - 1):
            part[place] += 1
            assert int(summed(parts)) == int(sum_on_device(parts)) != wanted
            part[place] -= 1
    other = [parts[0].clone(), *parts[1:]]
    assert int(summed(other)) == wanted
    assert not summed.is_recorded


def test_a_number_that_is_read_later_is_the_one_before_its_memory_was_written_again():
    number = torch.tensor(1 << 40, device=CUDA)
    busy = torch.randn(4096, 4096, device=CUDA)
    for _ in range(20):
        busy = busy @ busy
    read = read_later(number)
    number.zero_()
    assert read() == 1 << 40


def test_a_second_turn_after_a_change_of_weights_is_computed_from_its_first_token():
    model = model_of()
    plain, cache = caches(model)
    for number in range(4):
        ids, mask = on_gpu(1, 60, seed=number)
        say(model, ids[:, :40], mask[:, :40], 1, cache)
        cache.reset()
        if number == 3:
            model.model.layers[0].self_attn.k_proj.weight.data.neg_()
        reused = cache.stats().tokens_reused
        agree(say(model, ids, mask, 6, cache), say(model, ids, mask, 6, plain))
        assert cache.stats().tokens_reused == reused + (0 if number == 3 else 32)
        for one in (plain, cache):
            one.reset(keep_prefix=False)
    assert cache.stats().prompts_replayed >= 3
