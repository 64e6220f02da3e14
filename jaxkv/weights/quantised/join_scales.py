"""Joins the tensors of each quantised weight of a checkpoint to one `QuantisedTensor`."""

import re
from collections.abc import Mapping

from jaxkv.errors import BadCheckpoint
from jaxkv.weights.quantised import (
    awq,
    bitsandbytes,
    eight_bit,
    gptq,
    mxfp4,
    packed_floats,
    packed_rows,
)
from jaxkv.weights.quantised.quantised_tensor import QuantisedTensor
from jaxkv.weights.quantised.scheme import Scheme
from jaxkv.weights.safetensors import StoredTensor
from jaxkv.wording import clip

_READERS = {
    "awq": awq.read,
    "bitsandbytes": bitsandbytes.read,
    "eight_bit": eight_bit.read,
    "gptq": gptq.read,
    "mxfp4": mxfp4.read,
    "packed_floats": packed_floats.read,
    "packed_rows": packed_rows.read,
}

_OF_ACTIVATIONS = re.compile(
    r".*\.(input_scale|input_scale_ub|input_global_scale|input_zero_point|output_scale|output_zero_point"
    r"|[qkv]_scale|[qkv]_zero_point|(k_proj|v_proj)\.output_scale)"
)
"""Names of the scales of activations and of keys and values, which are not quantised by them here."""


def with_scales(
    tensors: Mapping[str, StoredTensor], scheme: Scheme | None
) -> dict[str, StoredTensor | QuantisedTensor]:
    """Returns a checkpoint's tensors by the names of the weights that they mean.

    Tensors without scales are returned unchanged, and scales of activations left out.

    Raises:
        BadCheckpoint: a shape or dtype contradicts the format, or a weight is stored twice.
    """
    joined: dict[str, StoredTensor | QuantisedTensor] = dict(tensors)
    if scheme is None:
        return joined
    for name in tensors:
        if _OF_ACTIVATIONS.fullmatch(name):
            joined.pop(name)
            continue
        found = next(
            (
                found
                for reader in scheme.readers
                if (found := _READERS[reader](name, tensors, scheme))
            ),
            None,
        )
        if found is None:
            continue
        made, used = found
        for part in used:
            joined.pop(part, None)
        if made.name in joined:
            shown = clip(repr(made.name))
            raise BadCheckpoint(f"{made.path} holds {shown} twice, with scales and without")
        joined[made.name] = made
    return joined
