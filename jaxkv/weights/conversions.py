"""Messages about models whose files jaxkv cannot read: the form of the files, and the command that converts them."""

from collections.abc import Collection

from jaxkv.wording import clip

_CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
    "M.from_pretrained({model}).save_pretrained({folder}); "
    'T.from_pretrained({model}).save_pretrained({folder})"'
)
# The weights are plain numbers once they are read, but Transformers refuses to save a model with the quantiser of GGUF.
_CONVERT_GGUF = (
    'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
    "model = M.from_pretrained({model}, gguf_file={file}); model.hf_quantizer = None; "
    "del model.config.quantization_config; model.save_pretrained({folder}); "
    'T.from_pretrained({model}, gguf_file={file}).save_pretrained({folder})"'
)
_MERGE = (
    'python -c "from peft import AutoPeftModelForCausalLM as M; '
    'M.from_pretrained({model}).merge_and_unload().save_pretrained({folder})"'
)
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def instead_of_config(names: Collection[str], model: str) -> str:
    """Returns the form of a model without config.json, if its files show it, and what to do.

    Args:
        names: names of the model's files.
        model: path of its folder, or its name on the Hugging Face Hub.
    """
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    if gguf:
        return f"; {gguf_advice(model, gguf[0])}"
    if "adapter_config.json" in names:
        merge = _MERGE.format(model=repr(model), folder=repr(_converted(model)))
        return (
            f"; it holds an adapter (PEFT): merge it into its model with `{merge}`, and give that "
            f"model's directory, or the directory of a merged model"
        )
    if "model_index.json" in names:
        return "; it is a pipeline of diffusers, and jaxkv runs language models alone"
    if "snapshots" in names:
        return (
            "; it is a folder of the Hugging Face cache: give snapshots/<revision> inside it, or the name of "
            "the model, such as Qwen/Qwen3-0.6B"
        )
    if "params.json" in names:
        return (
            "; it is in the format of its authors: take the one that was converted for Transformers"
        )
    return "; wanted a folder with config.json and weights in safetensors, as Transformers saves a model"


def instead_of_weights(names: Collection[str], model: str) -> str:
    """Returns the form of the weights of a model without a file of the expected name, if it shows, and what to do.

    Args:
        names: names of the model's files.
        model: path of its folder, or its name on the Hugging Face Hub.
    """
    pickled = sorted(name for name in names if name.endswith(_PICKLED))
    if pickled:
        convert = _CONVERT.format(model=repr(model), folder=repr(_converted(model)))
        return (
            f"; {clip(pickled[0])} is never read, as it can run code: if you trust it, convert it to safetensors with "
            f"Transformers, `{convert}`, or take a revision of the model that has them"
        )
    gguf = sorted(name for name in names if name.endswith(".gguf"))
    if gguf:
        return f"; {gguf_advice(model, gguf[0])}"
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if len(others) > 1:
        return (
            f"; it holds {clip(others[0])} and others under other names: take a model that Transformers saved, with "
            "the index that belongs to its files"
        )
    if others:
        return (
            f"; it holds {clip(others[0])} under another name: take a model that Transformers saved, or if the file is "
            "of one, call it model.safetensors in a folder of your own"
        )
    return "; copy or download the model's weights in safetensors too"


def gguf_advice(model: str, name: str) -> str:
    """Returns what to do with a GGUF file.

    Args:
        model: path of its folder, or the name on the Hugging Face Hub.
        name: the file.
    """
    convert = _CONVERT_GGUF.format(
        model=repr(model), file=repr(clip(name)), folder=repr(_converted(model))
    )
    return (
        f"{clip(name)} is in GGUF, which jaxkv does not read: take the model's safetensors files, or convert it with "
        f"Transformers (pip install transformers torch gguf accelerate): `{convert}`"
    )


def _converted(model: str) -> str:
    """Returns a name for the folder of the converted model."""
    return f"{model.rstrip('/').rpartition('/')[2] or 'model'}-safetensors"
