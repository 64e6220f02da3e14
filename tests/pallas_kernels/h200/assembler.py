"""What ptxas says of the kernels that a process compiles: registers, spills, products that wait for one another."""

import contextlib
import os
import re
import sys


@contextlib.contextmanager
def assembled(folder):
    """Yields a dictionary that holds the facts at the end of the block.

    ptxas prints past Python. A folder for its words (`MOSAIC_GPU_DUMP_TO`) would be filled with all else too, which
    takes as long as compiling.
    """
    found = {}
    sys.stdout.flush()
    stdout, file = os.dup(1), folder / "assembled"
    with file.open("w") as sink:
        os.dup2(sink.fileno(), 1)
        try:
            yield found
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
    text = file.read_text()
    found["registers"] = [int(number) for number in re.findall(r"Used (\d+) registers", text)]
    found["spilled"] = sum(int(number) for number in re.findall(r"(\d+) bytes spill", text))
    found["serialised"] = "serialized" in text
