"""Loading a model directory runs no code from it, unpickles nothing and opens no socket."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jaxkv

CANARY = "import pathlib; pathlib.Path(__file__).with_name('CANARY').write_text('ran')\n"
MODULES = (
    "modeling_llama.py",
    "configuration_llama.py",
    "tokenization_llama.py",
    "model.py",
    "__init__.py",
    "sitecustomize.py",
    "usercustomize.py",
    "jinja2.py",
    "jaxkv.py",
    "torch.py",
    "conftest.py",
)
# Prints every event that has no place in loading; paths of the directory stand for anything found there.
PROGRAM = """
import json, os, sys

directory = sys.argv[1]
seen = []

def watch(event, arguments):
    if event.startswith(("socket.", "pickle.", "ctypes.dlopen", "os.system", "os.exec", "os.posix_spawn")):
        seen.append(event)
    if event == "subprocess.Popen":
        seen.append([event, os.path.basename(arguments[1][2])])
    if event in ("import", "exec", "compile", "open"):
        text = [str(a) for a in arguments if isinstance(a, (str, bytes, os.PathLike))]
        text += [a.co_filename for a in arguments if hasattr(a, "co_filename")]
        if event != "open" and any(t.startswith(directory) for t in text):
            seen.append([event, *text])
        if event == "open" and any(t.startswith(directory) and t.endswith((".py", ".pyc", ".bin")) for t in text):
            seen.append([event, *text])

import jax
jax.devices()
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.registry import load_config
from jaxkv.text.tokenizer import load_tokenizer
from jaxkv.models.registry import load_params

sys.addaudithook(watch)
config = load_config(directory)
params = load_params(directory, Decoder(config), dtype="float32")
tokenizer = load_tokenizer(directory)
assert tokenizer.decode(tokenizer.encode("a")) == "a"
seen.append(["chat", tokenizer.encode_chat([{"role": "user", "content": "a"}])])
assert {"torch", "transformers"}.isdisjoint(sys.modules)
print(json.dumps(seen))
"""


def test_a_directory_full_of_code_is_loaded_without_running_any(tmp_path, kit):
    directory = tmp_path / "model"
    directory.mkdir()
    for name in MODULES:
        (directory / name).write_text(CANARY)
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch CANARY'\ntR.")
    kit.save_file(kit.checkpoint_tensors(kit.CONFIG), directory / "model.safetensors")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": kit.CONFIG.vocab_size,
        "hidden_size": kit.CONFIG.hidden_size,
        "num_hidden_layers": kit.CONFIG.num_layers,
        "num_attention_heads": kit.CONFIG.heads,
        "num_key_value_heads": kit.CONFIG.kv_heads,
        "head_dim": kit.CONFIG.head_dim,
        "intermediate_size": kit.CONFIG.ffn_size,
        "max_position_embeddings": kit.CONFIG.max_positions,
        "rms_norm_eps": 1e-6,
    }
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "auto_map": {"AutoTokenizer": ["tokenization_llama.Evil", None]},
        "tokenizer_class": "Evil",
        "chat_template": "{{ messages[0].content }}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(directory)],
        # The code lies where Python would look first, were it not told otherwise.
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(jaxkv.__file__).parents[1]),
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        ["subprocess.Popen", "template_process.py"],
        ["chat", [0]],
    ]
    assert not (directory / "CANARY").exists()
