"""The router sends a prompt to the replica that holds its prefix, unless that one is much busier."""

import pytest

from jaxkv.replicas.router import TOKENS_PER_SEQUENCE, Router

LONG = list(range(1000, 3000))


def router(replicas=2, *, cache_tokens=10_000):
    return Router(replicas, block=16, cache_tokens=cache_tokens)


def test_prompts_without_a_common_prefix_take_turns():
    routed = router(3)
    chosen = [routed.choose([number] * 40, [0, 0, 0]) for number in range(6)]
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_the_least_loaded_replica_gets_a_new_prompt():
    assert router(3).choose([1] * 40, [5, 2, 3]) == 1


def test_a_prompt_goes_to_the_replica_with_its_longest_prefix():
    routed = router()
    assert routed.choose(LONG[:800], [0, 0]) == 0
    assert routed.choose([*LONG[:400], *[7] * 400], [1, 0]) == 0
    assert routed.choose([*LONG[:800], 1, 2, 3], [1, 0]) == 0
    # A page that is not full is no prefix.
    assert routed.choose(LONG[:15], [1, 1]) == 1


def test_a_much_busier_replica_is_left_alone_and_both_hold_the_prefix_then():
    routed, prompt = router(), LONG[: 2 * TOKENS_PER_SEQUENCE]
    assert routed.choose(prompt, [0, 0]) == 0
    assert routed.choose(prompt, [1, 0]) == 0
    assert routed.choose(prompt, [3, 0]) == 1
    # Now both hold it, so the load decides.
    assert routed.choose(prompt, [1, 0]) == 1
    assert routed.choose(prompt, [0, 1]) == 0


def test_a_replica_without_a_load_is_never_chosen():
    routed = router()
    assert routed.choose(LONG, [0, None]) == 0
    assert routed.choose(LONG, [None, 100]) == 1
    with pytest.raises(ValueError, match="no replica is left"):
        routed.choose(LONG, [None, None])


def test_prompts_of_another_scope_share_nothing():
    routed = router()
    assert routed.choose(LONG, [0, 0], (b"salt", None)) == 0
    assert routed.choose(LONG, [1, 0], (b"salt", "adapter")) == 1
    assert routed.choose(LONG, [1, 0], (b"salt", None)) == 0


def test_the_record_forgets_as_a_cache_does_the_end_of_a_prompt_first():
    routed = router(cache_tokens=160)
    assert routed.choose(LONG[:160], [0, 0]) == 0
    assert routed.choose([1] * 80, [0, None]) == 0
    # Five blocks of the first prompt are left: 80 tokens, fewer than a sequence is worth.
    assert routed.choose(LONG[:160], [0, 0]) == 0
    routed.forget(0)
    assert routed.choose(LONG[:160], [0, 0]) == 1


def test_what_came_from_a_file_is_a_prefix_too():
    routed = router()
    routed.note(1, LONG)
    assert routed.choose(LONG, [0, 1]) == 1
    routed.forget()
    assert routed.choose(LONG, [0, 1]) == 0
