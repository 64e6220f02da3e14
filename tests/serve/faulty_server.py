"""`jaxkv` with the engine process of `tests.serve.faulty_engine`."""

import functools
import sys

from jaxkv.cli import main
from jaxkv.serve import engine_process

if __name__ == "__main__":
    engine_process.EngineProcess = functools.partial(
        engine_process.EngineProcess, program="tests.serve.faulty_engine"
    )
    sys.exit(main())
