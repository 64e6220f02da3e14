"""Compiles the engine's programs for an H200 and prints their properties: `python h200_programs.py decode ...`.

It is a program, because it must set up JAX before anything imports it. One process compiles what all files beside it
describe, since a start of JAX and of the plugin takes five seconds. Names of other models begin with their file's.
"""

import sys

from tests.engine import h200, h200_devices, h200_host, h200_hybrid, h200_latent, h200_windows


def lowerings():
    """Returns, by name, functions that describe what to compile."""
    others = {
        "devices": h200_devices,
        "host": h200_host,
        "hybrid": h200_hybrid,
        "latent": h200_latent,
        "windows": h200_windows,
    }
    return h200.lowerings() | {
        f"{file}_{name}": make
        for file, module in others.items()
        for name, make in module.lowerings().items()
    }


if __name__ == "__main__":
    h200.main(sys.argv[1:], lowerings)
