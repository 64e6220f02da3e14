"""The engine process with a fault that the variable `FAULT` names, for tests of the server."""

import os
import sys
import time

from jax.errors import JaxRuntimeError

from jaxkv.engine.engine import Engine
from jaxkv.engine.step_pipeline import StepPipeline
from jaxkv.serve import engine_program

PROGRAM = "tests.serve.faulty_engine"
HEALTHY_STEPS = 8


def in_step(fault):
    """After some steps that are all right, every step begins with the fault."""
    step, count = Engine.step, iter(range(10**9))

    def faulty(engine):
        if next(count) >= HEALTHY_STEPS:
            fault()
        step(engine)

    Engine.step = faulty


def in_result(message):
    """After some results that are all right, every result of the device is an error."""
    receive, count = StepPipeline.receive, iter(range(10**9))

    def faulty(pipeline):
        found = receive(pipeline)
        if next(count) >= HEALTHY_STEPS:
            raise JaxRuntimeError(message)
        return found

    StepPipeline.receive = faulty


FAULTS = {
    "none": lambda: None,
    "hung step": lambda: in_step(lambda: time.sleep(3600)),
    "slow steps": lambda: in_step(lambda: time.sleep(0.02)),
    "broken device": lambda: in_result("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS: in a kernel"),
    "no memory, ever": lambda: in_result("RESOURCE_EXHAUSTED: out of memory"),
}


if __name__ == "__main__":
    FAULTS[os.environ["FAULT"]]()
    code = engine_program.main()
    sys.stderr.flush()
    os._exit(code)
