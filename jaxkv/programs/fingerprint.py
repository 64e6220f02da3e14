"""The name of a stored program: a hash of its trace and of everything else that its compilation depends on.

The trace holds the whole program but for our kernels: most are one equation with their sizes and options
(`pallas_kernels.deferred`). So the hash also covers the source of our kernels and the tuned schedules, which
they may read. Computing a name lowers nothing.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import Mesh, NamedSharding
from jaxlib._jax import Device

from jaxkv.programs.topology import topology_digest
from pallas_kernels.sources import kernel_sources

# Words in the names of settings that change no program: where files are kept, what is logged.
_HARMLESS = ("cache", "dump", "log", "traceback", "pprint", "transfer_guard", "source", "visible")
_VARIABLES = ("XLA_", "MOSAIC_", "LIBTPU_")
# Variables that only size memory.
_OF_MEMORY = ("XLA_PYTHON_CLIENT_", "XLA_PJRT_GPU_HOST_MEMORY_")
# A compiled program holds choices among the algorithms of these libraries.
_LIBRARIES = ("nvidia-cublas", "nvidia-cudnn", "jax-cuda")


def devices_of(specs: object) -> tuple[Device, ...]:
    """Returns the devices that a program of these argument types runs on.

    Several devices have the order of their mesh. There are none in the result if the arguments do not share one mesh.
    """
    places = {spec.sharding for spec in jax.tree.leaves(specs) if spec.sharding is not None}
    devices = {device for place in places for device in place.device_set}
    if not devices:
        default = jax.config.jax_default_device
        return (default if isinstance(default, Device) else jax.devices()[0],)
    if len(devices) == 1:
        return tuple(devices)
    meshes = {place.mesh if isinstance(place, NamedSharding) else None for place in places}
    mesh = meshes.pop()
    return tuple(mesh.devices.flat) if isinstance(mesh, Mesh) and not meshes else ()


def name_traced(
    name: str,
    traced: jax.stages.Traced,
    specs: object,
    devices: Sequence[Device],
    options: Mapping[str, Any],
) -> str:
    """Returns the name that a program is stored under: `name` and a hash.

    The hash covers the trace with its constants, the arguments, the compiler options and the environment.

    Args:
        name: the program's name in profiles.
        traced: the program's trace.
        specs: pytrees of `jax.ShapeDtypeStruct` with shardings, one per argument.
        devices: devices that the program runs on, in the order of their mesh.
        options: compiler options by name.
    """
    leaves, tree = jax.tree.flatten(specs)
    digest = hashlib.sha256()
    for part in (
        sorted(environment(devices).items()),
        sorted(options.items()),
        tree,
        [(spec.shape, str(spec.dtype), str(spec.sharding)) for spec in leaves],
        traced.out_tree,
        traced.jaxpr,
    ):
        digest.update(str(part).encode() + b"\0")
    for constant in _constants(traced.jaxpr.jaxpr, traced.jaxpr.consts, set()):
        # A branch of a kernel may capture a variable of the trace; the trace's text has its name.
        if isinstance(constant, Tracer):
            digest.update(str(constant.aval).encode())
            continue
        array = np.asarray(constant)
        digest.update(f"{array.shape}{array.dtype}".encode() + array.tobytes())
    return f"{name}-{digest.hexdigest()}"


def _constants(jaxpr: Jaxpr, own: Any, seen: set[int]) -> Iterator[Any]:  # noqa: ANN401 - arrays of any library
    """Yields the arrays whose values are not in the text of a trace, in a fixed order."""
    yield from own
    seen.add(id(jaxpr))
    for equation in jaxpr.eqns:
        yield from (
            variable.val
            for variable in equation.invars
            if isinstance(variable, Literal) and np.ndim(variable.val)
        )
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda node: isinstance(node, ClosedJaxpr)
        ):
            consts = inner.consts if isinstance(inner, ClosedJaxpr) else ()
            inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            if isinstance(inner, Jaxpr) and id(inner) not in seen:
                yield from _constants(inner, consts, seen)


def environment(devices: Sequence[Device]) -> dict[str, Any]:
    """Returns by name the versions, hardware, settings and environment variables that compilation depends on.

    Args:
        devices: devices that programs run on, in the order of their mesh; all are of one kind.
    """
    device = devices[0]
    settings = {
        name: str(getattr(jax.config, name, jax.config.values[name]))
        for name in sorted(jax.config.values)
        if not any(word in name for word in _HARMLESS)
    }
    variables = {
        name: os.environ[name]
        for name in sorted(os.environ)
        if name.startswith(_VARIABLES) and not name.startswith(_OF_MEMORY)
    }
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": device.client.platform_version,
        "device": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "libraries": _libraries() if device.platform == "gpu" else {},
        # Kernels have code for the host that launches them.
        "host_processor": _host_processor(),
        "kernel_sources": kernel_sources(),
        "settings": settings,
        "variables": variables,
        **(_together(devices) if len(devices) > 1 else {}),
    }


def _together(devices: Sequence[Device]) -> dict[str, Any]:
    """Returns by name what the programs of several devices depend on besides.

    An executable names its devices by their ids, and XLA chooses the kernels of its collectives by the links between
    GPUs. These are in JAX's description of all devices of the machine.
    """
    return {
        "devices": {str(at): f"{one.device_kind} {one.id}" for at, one in enumerate(devices)},
        "topology": topology_digest(devices),
    }


@cache
def _libraries() -> dict[str, str]:
    """Returns the installed versions of NVIDIA's libraries whose algorithms programs name, and of JAX's plugin."""
    found = [(one.metadata["Name"].lower(), one.version) for one in metadata.distributions()]
    return {name: version for name, version in sorted(found) if name.startswith(_LIBRARIES)}


@cache
def _host_processor() -> str:
    """Returns the model name and feature flags of the host's CPU."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    return "\n".join(
        dict.fromkeys(line for line in lines if line.startswith(("model name", "flags")))
    )
