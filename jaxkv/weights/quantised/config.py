"""Reads the format of quantised weights from `quantization_config` in a config.json, or from a file beside it.

Activations that a format has in fp8 with a scale per token or per tensor are rounded with a scale per token
(`Scheme.rounds_rows`). Those of int8, and those with a scale per group of columns, are not rounded.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from jaxkv.errors import UnknownConfig
from jaxkv.weights.quantised.scheme import Reader, Scheme
from jaxkv.wording import clip

_INSTEAD = (
    "jaxkv reads compressed-tensors, block fp8, ModelOpt's FP8 and NVFP4, fbgemm_fp8, GPTQ, AWQ, MXFP4 and "
    "bitsandbytes: take a checkpoint in one of these, or the one that is not quantised with quantization='fp8', "
    "'int8' or 'int4'"
)

MODELOPT = "hf_quant_config.json"
BESIDE = (MODELOPT, "quantize_config.json", "quant_config.json")
"""Files beside config.json that may name the format: of ModelOpt, of GPTQ and of AWQ."""

_HINTS = frozenset(
    {"quant_method", "modules_to_not_convert", "modules_to_convert", "ignored_layers", "dequantize"}
    | {"producer", "activation_scheme", "kv_cache_scheme", "kv_cache_quant_algo"}
)
"""Keys that every format may have; static scales of activations and the forms of a cache are not followed."""

_COMPRESSED_HINTS = frozenset(
    {
        "format",
        "config_groups",
        "ignore",
        "global_compression_ratio",
        "quantization_status",
        "version",
    }
)
_GPTQ_HINTS = frozenset(
    {
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "damp_percent",
        "damp_auto_increment",
        "dataset",
    }
    | {
        "disable_exllama",
        "exllama_config",
        "lm_head",
        "max_input_length",
        "meta",
        "model_file_base_name",
    }
    | {
        "model_name_or_path",
        "model_seqlen",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize",
    }
    | {
        "offload_to_disk",
        "offload_to_disk_path",
        "pad_token_id",
        "parallel_packing",
        "static_groups",
        "tokenizer",
    }
    | {
        "true_sequential",
        "use_cuda_fp16",
        "use_exllama",
        "mse",
        "pack_impl",
        "dynamic",
        "hyb_act",
        "act_group_aware",
    }
    | {
        "backend",
        "desc_act",
        "sym",
        "auto_gptq_version",
        "autoround_version",
        "iters",
        "lr",
        "minmax_lr",
        "nsamples",
    }
    | {
        "enable_quanted_input",
        "seqlen",
        "quant_lm_head",
        "low_gpu_mem_usage",
        "gradient_accumulate_steps",
        "scale_dtype",
    }
    | {"enable_minmax_tuning", "to_quant_block_names", "data_type", "packing_format"}
)
_AWQ_HINTS = frozenset(
    {"backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"}
)

_BITSANDBYTES_HINTS = frozenset(
    {"load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype"}
    | {"bnb_4bit_quant_type", "bnb_4bit_quant_storage", "bnb_4bit_use_double_quant"}
    | {"llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "llm_int8_skip_modules"}
    | {"llm_int8_threshold"}
)

_FORMS = (
    ("quant_algo", "ModelOpt"),
    ("producer", "ModelOpt"),
    ("config_groups", "compressed-tensors"),
    ("load_in_4bit", "bitsandbytes"),
    ("load_in_8bit", "bitsandbytes"),
    ("desc_act", "GPTQ"),
    ("w_bit", "AWQ"),
    ("zero_point", "AWQ"),
    ("bits", "MLX"),
)
"""(Key of a quantization_config without a method, the library that writes it), the clearest first."""

_SCALE_FORMS = (None, "float", "ue8m0")
_LARGEST_BLOCK = 2**16


class _Settings(NamedTuple):
    """The settings of one format and the file that has them."""

    values: Mapping[str, object]
    place: str

    def get(self, key: str, default: object = None) -> object:
        value = self.values.get(key)
        return default if value is None else value

    def expect(self, key: str, known: tuple[object, ...]) -> None:
        if self.values.get(key) not in known:
            supported = ", ".join(repr(value) for value in known if value is not None)
            raise UnknownConfig(
                f"{self.place} sets {key} = {clip(repr(self.values.get(key)), 80)}; supported: {supported}; {_INSTEAD}"
            )

    def reject_others(self, known: Collection[str]) -> None:
        for key, value in self.values.items():
            if value not in (None, {}, []) and key not in known and key not in _HINTS:
                raise UnknownConfig(
                    f"{self.place} sets {clip(repr(key), 80)} = {clip(repr(value), 80)}, which is not supported"
                )

    def names(self, *keys: str) -> tuple[str, ...]:
        """Returns the texts of the first list of these keys that there is."""
        for key in keys:
            listed = self.values.get(key)
            if isinstance(listed, Sequence) and not isinstance(listed, str):
                return tuple(entry for entry in listed if isinstance(entry, str))
        return ()

    def group(self, *keys: str) -> int | None:
        """Returns the columns of a group by the first of these keys that there is; `None` for whole rows."""
        value = next((self.values[key] for key in keys if self.values.get(key) is not None), -1)
        if type(value) is not int or not (value == -1 or 0 < value <= _LARGEST_BLOCK):
            raise UnknownConfig(
                f"{self.place}: {keys[0]} must be -1 or an integer in [1, {_LARGEST_BLOCK}], got "
                f"{clip(repr(value), 80)}"
            )
        return None if value == -1 else value


def read_quantised(
    raw: Mapping[str, object], beside: Mapping[str, Mapping[str, object]] | None = None
) -> Scheme | None:
    """Returns the quantised format of a checkpoint; `None` if it is not quantised.

    Args:
        raw: the parsed config.json, which comes first.
        beside: name of a file of `BESIDE` -> its JSON object, empty if there is no such file; `None` for none.

    Raises:
        UnknownConfig: the format or one of its options is not supported; the message names it.
    """
    if raw.get("quantization") is not None and raw.get("quantization_config") is None:
        raise UnknownConfig(
            f"config.json sets quantization, so the weights are in the format of MLX; {_INSTEAD}"
        )
    for key in ("quantization_config", "compression_config"):
        if raw.get(key) is not None:
            return _read(key, raw[key])
    for name, settings in (beside or {}).items():
        if settings and (scheme := _read_beside(name, settings)) is not None:
            return scheme
    return None


def _read(key: str, values: object) -> Scheme:
    place = f"config.json: {key}"
    if not isinstance(values, Mapping):
        raise UnknownConfig(f"{place} must be an object, got {clip(repr(values), 80)}")
    settings = _Settings(values, place)
    method = values.get("quant_method")
    if method is None and key == "compression_config":
        method = "compressed-tensors"
    if method is None and values.get("quant_algo") is not None:
        method = "modelopt"
    # A `Sequence` as a method cannot be looked up.
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise UnknownConfig(
            f"{place} sets quant_method = {clip(repr(method), 80)}{_details(values)}; {_INSTEAD}"
        )
    return reader(settings)


def _read_beside(name: str, values: Mapping[str, object]) -> Scheme | None:
    if name == MODELOPT:
        inner = values.get("quantization")
        if not isinstance(inner, Mapping):
            raise UnknownConfig(f"{name} lacks the format in `quantization`; {_INSTEAD}")
        return None if inner.get("quant_algo") is None else _modelopt(_Settings(inner, name))
    settings = _Settings(values, name)
    return _gptq(settings) if name == "quantize_config.json" else _awq(settings)


def _details(values: Mapping[str, object]) -> str:
    """Returns what a quantization_config that is not read says about its format, as the end of a clause."""
    method = values.get("quant_method")
    if method is None:
        return next((f", in the form of {form}" for key, form in _FORMS if key in values), "")
    detail = values.get("format", values.get("quant_algo"))
    return f" in the format {clip(repr(detail), 80)}" if detail is not None else ""


def _mxfp4(settings: _Settings) -> Scheme:
    settings.reject_others(())
    return Scheme("MXFP4", ("mxfp4",), "float4_e2m1fn", 32, experts_alone=True)


def _fp8(settings: _Settings) -> Scheme:
    settings.expect("fmt", (None, "e4m3", "float8_e4m3fn"))
    settings.expect("activation_scheme", (None, "dynamic", "static"))
    settings.expect("scale_fmt", _SCALE_FORMS)
    if settings.values.get("quant_algo") is not None:
        algorithm = clip(repr(settings.values["quant_algo"]), 80)
        raise UnknownConfig(f"{settings.place} sets quant_algo = {algorithm}; {_INSTEAD}")
    # Qwen3.8's file denies what weight_block_size excludes.
    for key in ("weight_per_tensor", "act_per_tensor"):
        settings.expect(key, (None, False))
    own = {"fmt", "scale_fmt", "weight_block_size", "weight_per_tensor", "act_per_tensor"}
    settings.reject_others(own)
    ignored = settings.names("modules_to_not_convert", "ignored_layers")
    size = settings.get("weight_block_size")
    if size is None:
        return _e4m3("fp8", ignored)
    block = _block(size, f"{settings.place}: weight_block_size")
    name = f"fp8 in blocks of {block[0]} x {block[1]}"
    return Scheme(name, ("eight_bit",), "float8_e4m3fn", block[1], block, ignored)


def _fbgemm(settings: _Settings) -> Scheme:
    settings.reject_others({"activation_scale_ub"})
    return _e4m3("fbgemm_fp8", settings.names("modules_to_not_convert"))


_MODELOPT: Mapping[str, tuple[Reader, str, int | None]] = {
    "FP8": ("eight_bit", "float8_e4m3fn", None),
    "FP8_PER_CHANNEL_PER_TOKEN": ("eight_bit", "float8_e4m3fn", None),
    "NVFP4": ("packed_floats", "float4_e2m1fn", 16),
    "W4A16_NVFP4": ("packed_floats", "float4_e2m1fn", 16),
}
"""`quant_algo` of ModelOpt -> the form of its tensors, and `code` and `group` of `Scheme`."""

_MIXED = "MIXED_PRECISION"
"""`quant_algo` of a checkpoint whose `quantized_layers` have algorithms of their own."""


def _modelopt(settings: _Settings) -> Scheme:
    settings.expect("quant_algo", (*_MODELOPT, _MIXED))
    found = [str(settings.get("quant_algo"))]
    own = {"quant_algo", "config_groups", "exclude_modules", "ignore", "group_size"}
    if found == [_MIXED]:
        own.add("quantized_layers")
        found = _algorithms_of_layers(settings)
    settings.reject_others(own)
    # Most weights of a mixed checkpoint have the fewest bits, and float4_e2m1fn sorts before float8_e4m3fn.
    forms = sorted((_MODELOPT[one] for one in found), key=lambda form: form[1])
    _, code, group = forms[0]
    readers: dict[Reader, None] = dict.fromkeys(reader for reader, _, _ in forms)
    return Scheme(
        f"ModelOpt {' and '.join(found)}",
        tuple(readers),
        code,
        group,
        ignored=settings.names("ignore", "exclude_modules"),
        rounds_rows=any(code == "float8_e4m3fn" for _, code, _ in forms),
    )


def _algorithms_of_layers(settings: _Settings) -> list[str]:
    """Returns the algorithms of a mixed checkpoint; its tensors tell which one a layer has."""
    layers = settings.get("quantized_layers", {})
    if not isinstance(layers, Mapping) or not layers:
        raise UnknownConfig(f"{settings.place} is {_MIXED} and lacks quantized_layers")
    found = set()
    for name, layer in layers.items():
        place = f"{settings.place}: quantized_layers of {clip(repr(name), 80)}"
        if not isinstance(layer, Mapping):
            raise UnknownConfig(f"{place} must be an object, got {clip(repr(layer), 80)}")
        inner = _Settings(layer, place)
        inner.expect("quant_algo", tuple(_MODELOPT))
        found.add(str(inner.get("quant_algo")))
    return sorted(found)


def _e4m3(name: str, ignored: tuple[str, ...]) -> Scheme:
    """Returns a format of float8_e4m3fn for weights, with a scale per tensor or row, and for activations."""
    return Scheme(name, ("eight_bit",), "float8_e4m3fn", ignored=ignored, rounds_rows=True)


def _bitsandbytes(settings: _Settings) -> Scheme:
    four, eight = (
        any(settings.get(f"{prefix}load_in_{bits}bit") is True for prefix in ("", "_"))
        for bits in (4, 8)
    )
    if four is eight:
        raise UnknownConfig(
            f"{settings.place} must set one of load_in_4bit and load_in_8bit of bitsandbytes"
        )
    settings.expect("bnb_4bit_quant_type", (None, "nf4", "fp4"))
    settings.expect("bnb_4bit_quant_storage", (None, "uint8"))
    settings.expect("llm_int8_has_fp16_weight", (None, False))
    settings.reject_others(_BITSANDBYTES_HINTS)
    code = str(settings.get("bnb_4bit_quant_type", "fp4")) if four else "int8"
    return Scheme(
        f"bitsandbytes {code}",
        ("bitsandbytes",),
        code,
        64 if four else None,
        ignored=settings.names("llm_int8_skip_modules"),
    )


def _awq(settings: _Settings) -> Scheme:
    settings.expect("bits", (None, 4))
    settings.expect("w_bit", (None, 4))
    settings.expect("zero_point", (None, True))
    settings.expect("version", (None, "gemm", "GEMM"))
    settings.reject_others(
        {"bits", "w_bit", "zero_point", "version", "group_size", "q_group_size"} | _AWQ_HINTS
    )
    group = settings.group("group_size", "q_group_size")
    ignored = settings.names("modules_to_not_convert")
    return Scheme("AWQ", ("awq",), "int4", group, ignored=ignored)


def _gptq(settings: _Settings) -> Scheme:
    settings.expect("bits", (4, 8))
    settings.expect("checkpoint_format", (None, "gptq", "gptq_v2"))
    settings.expect("format", (None, "gptq", "gptq_v2"))
    settings.expect("pack_dtype", (None, "int32"))
    settings.expect("is_marlin_format", (None, False))
    own = {"bits", "group_size", "checkpoint_format", "format", "pack_dtype", "is_marlin_format"}
    settings.reject_others(own | _GPTQ_HINTS)
    newer = "gptq_v2" in (settings.get("checkpoint_format"), settings.get("format"))
    code = "int4" if settings.get("bits") == 4 else "int8"
    name = f"GPTQ of {settings.get('bits')} bits"
    return Scheme(
        name,
        ("gptq",),
        code,
        settings.group("group_size"),
        zero_is_one_less=not newer,
        symmetric=settings.get("sym") is True,
    )


def _auto_round(settings: _Settings) -> Scheme:
    settings.expect("packing_format", ("auto_round:auto_gptq",))
    settings.expect("data_type", (None, "int"))
    return _gptq(settings)


_COMPRESSED: Mapping[str, tuple[Reader, tuple[tuple[int, str], ...]]] = {
    "pack-quantized": ("packed_rows", ((4, "int"), (8, "int"))),
    "int-quantized": ("eight_bit", ((8, "int"), (8, "float"))),
    "float-quantized": ("eight_bit", ((8, "int"), (8, "float"))),
    "naive-quantized": ("eight_bit", ((8, "int"), (8, "float"))),
    "nvfp4-pack-quantized": ("packed_floats", ((4, "float"),)),
    "mxfp4-pack-quantized": ("packed_floats", ((4, "float"),)),
}
"""Format of compressed-tensors -> the form of its tensors, and the numbers that it has: bits and type."""

_PER_GROUP = "mixed-precision"
"""The format of a checkpoint whose `config_groups` have formats of their own."""


def _compressed(settings: _Settings) -> Scheme:
    form = settings.get("format")
    if not isinstance(form, str) or form not in (*_COMPRESSED, _PER_GROUP):
        raise UnknownConfig(
            f"{settings.place} sets quant_method = 'compressed-tensors' in the format {clip(repr(form), 80)}; "
            f"{_INSTEAD}"
        )
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        raise UnknownConfig(
            f"{settings.place} sets sparsity_config with the format {clip(repr(sparsity['format']), 80)}, and sparse "
            f"weights are not read; {_INSTEAD}"
        )
    settings.reject_others({"sparsity_config", *_COMPRESSED_HINTS})
    groups = settings.get("config_groups", {})
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    if not schemes:
        raise UnknownConfig(f"{settings.place} lacks config_groups")
    found = [_compressed_group(settings, form, group) for group in schemes]
    code, group, _ = found[0]
    block = next((block for _, _, block in found if block is not None), None)
    name = f"compressed-tensors {form} ({code})"
    # Weights of other numbers are never multiplied with rounded activations.
    in_fp8 = [
        one for one, (code, _, _) in zip(schemes, found, strict=True) if code == "float8_e4m3fn"
    ]
    # A group may have a form of its own.
    readers: dict[Reader, None] = dict.fromkeys(reader for reader, _ in _COMPRESSED.values())
    return Scheme(
        name,
        tuple(readers),
        code,
        group,
        block,
        settings.names("ignore"),
        rounds_rows=bool(in_fp8) and all(map(_rounds_rows, in_fp8)),
        other_groups=tuple(size for _, size, block in found[1:] if size and not block),
    )


def _compressed_group(
    settings: _Settings, form: str, group: object
) -> tuple[str, int | None, tuple[int, int] | None]:
    """Returns code, columns of a group, and block of one of `config_groups`."""
    place = f"{settings.place}: config_groups"
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise UnknownConfig(f"{place} has a group without weights")
    own = group.get("format") or form
    if not isinstance(own, str) or own not in _COMPRESSED:
        raise UnknownConfig(f"{place} has the format {clip(repr(own), 80)}; {_INSTEAD}")
    inner = _Settings(weights, f"{place}: weights")
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if (bits, kind) == (4, "int") and group.get("input_activations") is not None:
        raise UnknownConfig(
            f"{place} quantises weights to 4 bits and activations too (W4A8); {_INSTEAD}"
        )
    if (bits, kind) not in _COMPRESSED[own][1]:
        raise UnknownConfig(
            f"{place} has weights of {clip(repr(bits), 20)} bits of type {clip(repr(kind), 20)} in the format "
            f"{own!r}; {_INSTEAD}"
        )
    inner.expect("dynamic", (None, False))
    if bits == 4 and kind == "float":
        return "float4_e2m1fn", 32 if own.startswith("mx") else 16, None
    inner.expect("strategy", (None, "tensor", "channel", "group", "block"))
    block = None
    if weights.get("strategy") == "block":
        block = _block(weights.get("block_structure"), f"{place}: block_structure")
    columns = inner.group("group_size") if weights.get("strategy") == "group" else None
    code = "float8_e4m3fn" if kind == "float" else f"int{bits}"
    return code, block[1] if block else columns, block


def _rounds_rows(group: Mapping[str, object]) -> bool:
    """Whether one of `config_groups` is of fp8 for weights, with a scale per tensor or row, and for activations."""

    def is_fp8(quantised: object, *strategies: str) -> bool:
        return (
            isinstance(quantised, Mapping)
            and (quantised.get("num_bits"), quantised.get("type")) == (8, "float")
            and quantised.get("strategy") in (None, *strategies)
            # Without a strategy a group size means groups.
            and quantised.get("group_size") in (None, -1)
        )

    activations = group.get("input_activations")
    return is_fp8(group["weights"], "tensor", "channel") and is_fp8(activations, "tensor", "token")


def _block(size: object, place: str) -> tuple[int, int]:
    if (
        isinstance(size, Sequence)
        and len(size) == 2
        and all(type(side) is int and 0 < side <= _LARGEST_BLOCK for side in size)
    ):
        return size[0], size[1]
    raise UnknownConfig(
        f"{place} must be two integers in [1, {_LARGEST_BLOCK}], got {clip(repr(size), 80)}"
    )


_READERS: Mapping[str, Callable[[_Settings], Scheme]] = {
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "mxfp4": _mxfp4,
}
"""`quant_method` -> reader of its settings."""
