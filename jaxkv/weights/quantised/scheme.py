"""`Scheme`: how the weights of a checkpoint are quantised, as its `quantization_config` tells it."""

import re
from dataclasses import dataclass
from typing import Literal

Reader = Literal["eight_bit", "packed_rows", "awq", "gptq", "mxfp4"]
"""A format of tensors, which the module of that name in `jaxkv.weights.quantised` reads."""

_MOST_REPEATS = 6
_REPEAT = re.compile(r"(?<!\\)[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")


@dataclass(frozen=True)
class Scheme:
    """The format of a checkpoint. Which tensors are quantised, and in what groups, the tensors themselves decide.

    Attributes:
        name: the format, for messages.
        readers: the forms of tensors that may occur.
        code: name in `pallas_kernels.formats.few_bits.CODES` of most weights.
        group: columns that share a scale, of most weights; `None` for one scale per row.
        block: rows and columns of a block with one scale; `None` for no blocks.
        ignored: names of modules that are not quantised, as `names` compares them.
        experts_alone: whether experts alone are quantised.
        zero_is_one_less: whether stored zero points are one less than the zero points (GPTQ's first version).
        symmetric: whether all zero points are said to be in the middle; a file that has others is refused.
        rounds_rows: whether activations are meant to be rounded to float8_e4m3fn too, with a scale per token or one for
            the matrix; see `FewBits`.
    """

    name: str
    readers: tuple[Reader, ...]
    code: str
    group: int | None = None
    block: tuple[int, int] | None = None
    ignored: tuple[str, ...] = ()
    experts_alone: bool = False
    zero_is_one_less: bool = False
    symmetric: bool = False
    rounds_rows: bool = False

    def ignores(self, weight: str) -> bool:
        """Whether a weight is expected to be stored as it is, by its name in the checkpoint.

        It serves to plan memory: a name that is wrong about it changes no number.
        """
        module = weight.removesuffix(".weight")
        if self.experts_alone and ".experts." not in weight:
            return True
        return any(names(pattern, module) for pattern in self.ignored)


def names(pattern: str, module: str) -> bool:
    """Whether an entry of an `ignore` list means a module.

    An entry is a module's name, the name of a module around it, or a regular expression after "re:". Expressions come
    from an untrusted file, so one that could take long to match means nothing.
    """
    if pattern.startswith("re:"):
        expression = pattern.removeprefix("re:")
        slow = len(_REPEAT.findall(expression)) > _MOST_REPEATS
        if slow or _REPEATED_GROUP.search(expression) or len(expression) > 200:
            return False
        try:
            return re.match(expression, module) is not None
        except re.error:
            return False
    pieces = [re.escape(piece) for piece in pattern.split("*")]
    if len(pieces) > _MOST_REPEATS:
        return False
    return re.fullmatch(rf"(.*\.)?{'.*'.join(pieces)}(\..*)?", module) is not None
