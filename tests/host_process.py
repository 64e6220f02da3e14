"""A process of an engine on several hosts: `python -m tests.host_process PORT NUMBER COUNT SCENARIO`; see `main`."""

import json
import os
import sys
import threading
import time

import jax

from jaxkv import LLM, CacheConfig, SamplingParams, StructuredOutputs

PROMPTS = ["def add(", "import os\n", "class Node:\n    ", "x = ["]
CALLS = (
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, n=2, max_tokens=6, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=4, logprobs=2, max_tokens=5, prompt_logprobs=1),
)
SMALL = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 4,
    "block_size": 16,
    "progress": False,
}
ENDLESS = SamplingParams(temperature=0.0, max_tokens=110, ignore_eos=True)


def say(**facts):
    print(json.dumps(facts), flush=True)


def answers(llm):
    """Returns what a few calls give: tokens, and scores of a text."""
    tokens = [
        [sample.token_ids for output in llm.generate(PROMPTS, params) for sample in output.outputs]
        for params in CALLS
    ]
    return {"tokens": tokens, "scores": [round(float(x), 3) for x in llm.score(PROMPTS)[0]]}


def refusals(llm, tmp):
    """Returns the messages of what several hosts refuse."""
    found = []
    for call in (
        lambda: llm.update_weights(llm.params),
        lambda: llm.load_lora(None),
        lambda: llm.save_prefixes(f"{tmp}/prefixes"),
        lambda: llm.load_prefixes(f"{tmp}/prefixes"),
        lambda: llm.sleep(2),
        lambda: llm.follow(),
    ):
        try:
            call()
        except (ValueError, RuntimeError, FileNotFoundError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def lead(llm, scenario):
    if scenario == "answers":
        say(**answers(llm))
        llm.sleep()
        llm.wake_up()
        [again] = llm.generate(PROMPTS[:1], CALLS[0])
        [grammar] = llm.generate(
            "a: ", structured_outputs=StructuredOutputs(regex="[0-9]{3}"), max_tokens=8
        )
        say(grammar=grammar.text)
        say(again=again.token_ids, refusals=refusals(llm, os.environ["TMPDIR"]))
    if scenario == "killed while it works":
        say(working=True)
        while True:
            llm.generate(PROMPTS, ENDLESS)
    if scenario == "killed while it waits":
        llm.generate(PROMPTS, CALLS[0])
        say(working=True)
        time.sleep(8)
        llm.generate(PROMPTS, CALLS[0])
    if scenario == "fails there":
        llm.generate(PROMPTS, ENDLESS)
    if scenario == "fails here":
        run, left = llm.engine.runner.owner.run, iter(range(30))

        def fail(*arguments):
            if next(left, None) is None:
                raise MemoryError("no memory for this step")
            return run(*arguments)

        llm.engine.runner.owner.run = fail
        llm.generate(PROMPTS, ENDLESS)


def follow(llm, scenario):
    if scenario == "fails there":
        run, left = llm.engine.runner.owner.run, iter(range(30))

        def fail(*arguments):
            if next(left, None) is None:
                raise MemoryError("no memory for this step")
            return run(*arguments)

        llm.engine.runner.owner.run = fail
    try:
        llm.generate(PROMPTS, ENDLESS)
    except RuntimeError as error:
        say(refused=str(error))
    llm.follow()
    say(followed=True)


def main():
    port, number, count, scenario = sys.argv[1:]
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(number))
    options = dict(SMALL, tensor_parallel_size=jax.device_count())
    if scenario == "other options" and number == "1":
        options["max_num_seqs"] = 8
    if scenario == "host tier":
        options["cache"] = CacheConfig(host_bytes=2**20)
    if scenario == "one device each":
        options["tensor_parallel_size"] = 1
    if scenario == "too few":
        options["tensor_parallel_size"] = 2
    with LLM(**options) as llm:
        say(pid=os.getpid(), threads=threading.active_count())
        if scenario == "one device each":
            say(**answers(llm))
        elif number == "0":
            lead(llm, scenario)
        else:
            follow(llm, scenario)


if __name__ == "__main__":
    main()
