"""`LLM(data_parallel_size=2)`: the tokens of one `LLM`, from two processes; what all do, and what a loss costs."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

import jaxkv
from jaxkv import LLM, AsyncLLM, SamplingParams
from jaxkv.errors import BadCheckpoint, ReplicaLost
from jaxkv.replicas.front import ReplicatedLLM
from tests.one_layer import one_layer_model

SMALL = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "block_size": 16,
    "seed": 3,
    "progress": False,
}
PROMPTS = ["def add(", "import os\n", "class Node:\n    ", "for i in range(", "x = [", "return "]
# Greedy requests, and draws with log-probabilities: each replica compiles for every other combination of features.
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
LONG = "def area(width, height):\n    return width * height\n" * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of one layer: each replica compiles for itself."""
    return one_layer_model(tmp_path_factory.mktemp("model") / "one-layer")


@pytest.fixture(scope="module")
def two(folder):
    """Two replicas."""
    with LLM(folder, data_parallel_size=2, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def one(folder):
    """An `LLM` without replicas."""
    with LLM(folder, **SMALL) as llm:
        yield llm


def tokens(outputs):
    return [sample.token_ids for output in outputs for sample in output.outputs]


def steps(llm):
    return [stats.steps for stats in llm.replica_stats()]


def alive(pid):
    return os.path.exists(f"/proc/{pid}")


def gone(pids, seconds=20.0):
    """Whether processes are gone by the end of some seconds."""
    latest = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < latest:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_greedy_tokens_are_those_of_one_llm_and_both_replicas_work(one, two):
    assert isinstance(two, ReplicatedLLM)
    # The replicas find on disk what one LLM has compiled, so it comes first here and below.
    wanted = tokens(one.generate(PROMPTS, GREEDY))
    before = steps(two)
    found = two.generate(PROMPTS, GREEDY)
    assert tokens(found) == wanted
    assert [output.prompt for output in found] == PROMPTS
    assert len({output.request_id for output in found}) == len(PROMPTS)
    assert all(later > earlier for later, earlier in zip(steps(two), before, strict=True))


# Draws depend on a request's seed alone (tests/test_row_seeds.py), and tokens on no replica (the test above).
@pytest.mark.slow
def test_the_seed_of_the_llm_gives_the_same_draws_whichever_replica_makes_them(one, two):
    params = SamplingParams(temperature=1.0, max_tokens=6, logprobs=2)
    others, drawn = one.generate(PROMPTS, params), two.generate(PROMPTS, params)
    assert tokens(drawn) == tokens(others)
    for output, other in zip(drawn, others, strict=True):
        assert [set(each) for each in output.logprobs] == [set(each) for each in other.logprobs]
        assert output.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-4)


def test_samples_of_a_prompt_stay_together(two):
    before = steps(two)
    [output] = two.generate("def ", n=3, temperature=1.0, logprobs=2, max_tokens=5, seed=9)
    assert len(output.outputs) == 3
    assert len({tuple(sample.token_ids) for sample in output.outputs}) > 1
    assert sum(later > earlier for later, earlier in zip(steps(two), before, strict=True)) == 1


def test_a_prompt_finds_the_prefix_that_a_replica_has_cached(two):
    two.generate(LONG, GREEDY)
    [again] = two.generate(LONG + "area(", GREEDY)
    assert again.usage.cached_tokens >= 32
    assert two.explain(LONG + "area(").num_reused >= 32


def test_a_stream_has_the_text_of_the_whole_output_and_ends_when_it_is_closed(two):
    [whole] = two.generate(LONG, GREEDY)
    pieces = list(two.stream(LONG, GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].usage.output_tokens == 8
    endless = two.stream("def ", ENDLESS)
    next(endless)
    endless.close()
    latest = time.monotonic() + 20
    while two.stats().running and time.monotonic() < latest:
        time.sleep(0.02)
    assert two.stats().running == 0


def test_prompts_that_cannot_be_served_are_refused_by_index_before_any_runs(two):
    before = steps(two)
    for prompts, options, message in (
        (["a", ""], {}, "prompt 1: .*at least one token"),
        (["a", [5000000]], {}, "prompt 1: token id 5000000 is outside"),
        (["a" * 3000, "b"], {}, "prompt 0: "),
        (["a", "b"], {"lora": "none"}, "prompt 0: requests can name no adapter"),
        (["a"], {"no_such": 1}, "no option 'no_such'"),
        (["a"], {"logits_processors": {"none": {}}}, "none"),
    ):
        with pytest.raises(ValueError, match=message):
            two.generate(prompts, max_tokens=4, **options)
    with pytest.raises(ValueError, match="a stream has one sample"):
        two.stream("a", n=2)
    assert steps(two) == before


# tests/replicas/test_messages.py sends grammars and errors of both kinds, and tests/structured follows grammars.
@pytest.mark.slow
def test_grammars_and_errors_of_requests_come_from_the_replica(two):
    [output] = two.generate(
        "a number: ", structured_outputs=jaxkv.StructuredOutputs(regex="[0-9]{3}"), max_tokens=8
    )
    assert output.text.isdigit()
    with pytest.raises(ValueError, match="regex"):
        two.generate("a", structured_outputs=jaxkv.StructuredOutputs(regex="[0-9"), max_tokens=8)


@pytest.mark.slow
def test_scores_are_those_of_one_llm_in_the_order_of_the_prompts(one, two):
    for scores, wanted in zip(two.score(PROMPTS), one.score(PROMPTS), strict=True):
        np.testing.assert_allclose(scores, wanted, atol=1e-4)
    outputs = [[[11, 12]], [[13], [14, 15, 16]], [[17]]]
    found, wanted = (llm.score(PROMPTS[:3], outputs) for llm in (two, one))
    assert [len(each) for each in found] == [2, 1, 3, 1]
    for scores, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(scores, other, atol=1e-4)


@pytest.mark.slow
def test_a_rollout_is_that_of_one_llm(one, two):
    params = SamplingParams(temperature=1.0, n=2, max_tokens=4, seed=5)
    made, wanted = two.rollout(PROMPTS[:3], params), one.rollout(PROMPTS[:3], params)
    np.testing.assert_array_equal(made.output_ids, wanted.output_ids)
    np.testing.assert_allclose(made.logprobs, wanted.logprobs, atol=1e-4)


def test_statistics_are_added_up(two):
    each, both = two.replica_stats(), two.stats()
    assert both.steps == sum(one.steps for one in each)
    assert both.cache_bytes == 2 * each[0].cache_bytes
    assert both.device == each[0].device


def test_new_weights_reach_both_and_drop_what_was_cached(folder, two):
    params, _ = jaxkv.load_model(folder, dtype="float32")
    two.generate(LONG, GREEDY)
    version = two.update_weights(params)
    assert two.weight_version == version
    output, other = two.generate([LONG, PROMPTS[0]], GREEDY)
    assert output.usage.cached_tokens == 0
    assert {*output.weight_versions, *other.weight_versions} == {version}
    with pytest.raises(
        ValueError, match=r"differ in 1 names, \['odd'\] for one; nothing was changed"
    ):
        two.update_weights({**params, "odd": np.zeros(3)})
    assert len(two.group.live) == 2


def test_both_sleep_and_wake_up(two):
    two.sleep()
    with pytest.raises(RuntimeError, match="the engine sleeps"):
        two.generate("a", GREEDY)
    two.wake_up()
    assert len(two.generate(PROMPTS, GREEDY)) == len(PROMPTS)
    with pytest.raises(ValueError, match="level must be"):
        two.sleep(3)


def test_prefixes_go_to_a_file_of_each_and_back(two, tmp_path):
    two.sleep()
    two.wake_up()
    two.generate([LONG, "# another text\n" * 6], GREEDY)
    saved = two.save_prefixes(tmp_path / "kept.safetensors")
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["kept.0-of-2.safetensors", "kept.1-of-2.safetensors"]
    two.sleep()
    two.wake_up()
    loaded = two.load_prefixes(tmp_path / "kept.safetensors")
    assert (loaded.tokens, loaded.pages) == (saved.tokens, saved.pages)
    for text in (LONG, "# another text\n" * 6):
        [output] = two.generate(text, GREEDY)
        assert output.usage.cached_tokens >= 16
    (tmp_path / "kept.1-of-2.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"kept\.1-of-2\.safetensors is missing"):
        two.load_prefixes(tmp_path / "kept.safetensors")
    with pytest.raises(FileNotFoundError, match="there is neither"):
        two.load_prefixes(tmp_path / "other.safetensors")


def test_asyncio_callers_share_the_replicas_and_may_leave(one, two):
    async def work():
        async with AsyncLLM(two) as served:
            outputs = await asyncio.gather(*(served.generate(text, GREEDY) for text in PROMPTS))
            assert tokens(outputs) == tokens(one.generate(PROMPTS, GREEDY))
            async with contextlib.aclosing(served.stream("def ", ENDLESS)) as pieces:
                async for _ in pieces:
                    break
            leaving = asyncio.create_task(served.generate("def ", ENDLESS))
            await asyncio.sleep(0.05)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            with pytest.raises(ValueError, match="at least one token"):
                await served.generate("")
            made = await served.rollout(PROMPTS[:2], GREEDY)
            assert made.output_ids.shape[0] == 2
            assert len(await served.score(PROMPTS)) == len(PROMPTS)
            # More tokens than a `SamplingParams` has by default, so it is the adapter that is refused.
            with pytest.raises(ValueError, match="can name no adapter"):
                await served.score(["a"], [[[11] * 20]], lora="none")
            await served.sleep()
            await served.wake_up()
            late = asyncio.create_task(served.generate("def ", ENDLESS))
            await asyncio.sleep(0.05)
        with pytest.raises(RuntimeError, match="was closed"):
            await late
        with pytest.raises(RuntimeError, match="was closed"):
            await served.generate("a")

    asyncio.run(work())
    assert len(two.generate(PROMPTS, GREEDY)) == len(PROMPTS)


def test_a_loop_that_is_closed_below_a_stream_keeps_no_other_caller_waiting(two):
    served, loop = AsyncLLM(two), asyncio.new_event_loop()
    streams = [served.stream(text, ENDLESS) for text in ("a", "b")]
    for stream in streams:
        loop.run_until_complete(anext(stream))
    loop.close()
    assert len(two.generate(PROMPTS, GREEDY)) == len(PROMPTS)
    latest = time.monotonic() + 20
    while two.stats().running and time.monotonic() < latest:
        time.sleep(0.02)
    assert all(replica._reader.is_alive() for replica in two.group.replicas)


def test_a_caller_that_leaves_while_its_request_is_sent_aborts_it(two, monkeypatch):
    begin = two.group.begin

    def late(*args, **options):
        time.sleep(0.2)
        begun.append(begin(*args, **options))
        return begun[-1]

    async def work():
        async with AsyncLLM(two) as served:
            leaving = asyncio.create_task(served.generate("def ", ENDLESS))
            await asyncio.sleep(0.1)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            await asyncio.sleep(0.3)

    begun = []
    monkeypatch.setattr(two.group, "begin", late)
    asyncio.run(work())
    assert begun[0].cancelled()


def test_scores_whose_caller_leaves_while_they_are_sent_are_aborted(two, monkeypatch):
    begin = two.begin_scores

    def late(*args):
        time.sleep(0.2)
        begun.extend(begin(*args))
        return begun

    async def work():
        async with AsyncLLM(two) as served:
            leaving = asyncio.create_task(served.score(PROMPTS))
            await asyncio.sleep(0.1)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            await asyncio.sleep(0.3)

    begun = []
    for replica in two.group.replicas:
        monkeypatch.setattr(replica, "call", lambda *args, **options: Future())
    monkeypatch.setattr(two, "begin_scores", late)
    asyncio.run(work())
    assert [one.cancelled() for one in begun] == [True, True]


@pytest.mark.parametrize("served", [False, True])
def test_an_error_of_one_replica_aborts_the_scores_of_the_others(two, monkeypatch, served):
    failed, left = Future(), Future()
    failed.set_exception(RuntimeError("broken"))
    for replica, result in zip(two.group.replicas, (failed, left), strict=True):
        monkeypatch.setattr(replica, "call", lambda *args, result=result, **options: result)

    async def score():
        with pytest.raises(RuntimeError, match="broken"):
            await AsyncLLM(two).score(PROMPTS) if served else two.score(PROMPTS)
        # The end of the loop would cancel what is left.
        assert left.cancelled()

    asyncio.run(score())


def test_an_error_of_one_prompt_aborts_the_rest_of_a_rollout(two, monkeypatch):
    results = [Future(), Future()]
    results[0].set_exception(RuntimeError("broken"))
    left = iter(results)
    monkeypatch.setattr(two.group, "begin", lambda *args, **options: next(left))

    async def roll_out():
        with pytest.raises(RuntimeError, match="broken"):
            await AsyncLLM(two).rollout(PROMPTS[:2], GREEDY)
        await asyncio.sleep(0.1)
        # The end of the loop would cancel what is left.
        assert results[1].cancelled()

    asyncio.run(roll_out())


def test_what_only_a_single_llm_has_is_refused_with_a_way_out(two):
    for name in ("params", "engine", "model", "layout", "budget", "lock"):
        with pytest.raises(AttributeError, match=f"has no {name}: "):
            getattr(two, name)
    with pytest.raises(AttributeError, match="there is no beam search"):
        two.beam_search(["a"])
    model = jaxkv.load_model()
    with pytest.raises(ValueError, match=r"LLM\.from_parts has one"):
        LLM.from_parts(model[1], model[0], data_parallel_size=2)


def not_importable(logits, history):
    return logits


def test_options_are_refused_before_any_process_is_started(monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    inner = lambda logits, history: logits  # noqa: E731
    for options, message in (
        ({"data_parallel_size": 0}, "data_parallel_size must be an int in"),
        ({"data_parallel_size": 2, "no_such": 1}, "no option 'no_such'"),
        ({"data_parallel_size": 2, "load_format": "x"}, "load_format must be"),
        ({"data_parallel_size": 2, "tensor_parallel_size": 0}, "tensor_parallel_size must be"),
        (
            {"data_parallel_size": 2, "logits_processors": {"p": inner}},
            "'p' must be a function at the top of a module",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(**SMALL | options)
    with pytest.raises(BadCheckpoint):
        LLM("/no/such/folder", data_parallel_size=2)


# Processes without a model show it in tests/replicas/test_group.py: a replica that cannot load the model ends all.
@pytest.mark.slow
def test_a_replica_that_refuses_the_model_ends_all_of_them():
    with pytest.raises(ValueError, match="max_model_len"):
        LLM(data_parallel_size=2, **SMALL | {"max_model_len": 10**6})


@pytest.mark.slow
def test_requests_of_a_killed_replica_run_again_and_the_others_go_on(folder, one, caplog):
    with LLM(folder, data_parallel_size=2, **SMALL) as llm:
        pids = [replica.pid for replica in llm.group.replicas]
        params = ENDLESS
        wanted = one.generate(PROMPTS * 8, params)
        stream = llm.stream("a", params)
        next(stream)
        threading.Timer(0.5, lambda: os.kill(pids[0], signal.SIGKILL)).start()
        assert tokens(llm.generate(PROMPTS * 8, params)) == tokens(wanted)
        assert gone(pids[:1])
        assert f"replica 0 of 2 (process {pids[0]}) has ended by signal 9" in caplog.text
        with pytest.raises(ReplicaLost, match="replica 0 of 2"):
            list(stream)
        assert len(llm.replica_stats()) == 1
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(ReplicaLost, match=r"replica \d of 2"):
            llm.generate(PROMPTS, params)
        with pytest.raises(ReplicaLost):
            llm.stats()
    assert gone(pids)


@pytest.mark.slow
def test_a_replica_that_is_lost_while_it_checks_a_call_costs_the_call_nothing(folder, one):
    """It has not even been noticed yet that it has ended."""
    with LLM(folder, data_parallel_size=2, **SMALL) as llm:
        os.kill(llm.group.replicas[0].pid, signal.SIGKILL)
        assert tokens(llm.generate(PROMPTS, GREEDY)) == tokens(one.generate(PROMPTS, GREEDY))


@pytest.mark.slow
def test_an_interrupt_aborts_what_was_begun(two):
    # Replicas that compile do not answer meanwhile.
    two.generate(PROMPTS * 80, max_tokens=2, ignore_eos=True)
    main = threading.get_ident()
    threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        two.generate(PROMPTS * 80, max_tokens=100, ignore_eos=True)
    latest = time.monotonic() + 60
    while two.stats().running + two.stats().waiting and time.monotonic() < latest:
        time.sleep(0.02)
    assert two.stats().running + two.stats().waiting == 0
    assert len(two.generate(PROMPTS, GREEDY)) == len(PROMPTS)


@pytest.mark.slow
def test_each_replica_may_divide_the_model_among_devices(folder, one):
    with LLM(folder, data_parallel_size=2, tensor_parallel_size=2, **SMALL) as llm:
        assert tokens(llm.generate(PROMPTS, GREEDY)) == tokens(one.generate(PROMPTS, GREEDY))
        params, _ = jaxkv.load_model(folder, dtype="float32")
        llm.update_weights(params)
        assert tokens(llm.generate(PROMPTS, GREEDY)) == tokens(one.generate(PROMPTS, GREEDY))


@pytest.mark.slow
def test_a_closed_llm_refuses_calls_and_leaves_no_process():
    llm = LLM(data_parallel_size=2, **SMALL)
    pids = [replica.pid for replica in llm.group.replicas]
    llm.close()
    llm.close()
    assert gone(pids)
    with pytest.raises(ReplicaLost, match="was closed"):
        llm.generate("a")
    dropped = LLM(data_parallel_size=2, **SMALL)
    pids = [replica.pid for replica in dropped.group.replicas]
    del dropped
    assert gone(pids)
