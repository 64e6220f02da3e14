"""Converts tokenizers that are published in other forms to the JSON of a tokenizer.json.

SentencePiece models and Mistral's tekken.json are read here, with the ids of their own libraries. Other forms are
converted by Transformers, in a process of its own, if it is installed.
"""

import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from jaxkv.errors import BadCheckpoint
from jaxkv.text.sentencepiece_file import (
    looks_like_sentencepiece,
    read_sentencepiece,
    to_tokenizer_json,
)
from jaxkv.text.special_tokens import read_special_tokens
from jaxkv.text.tekken_file import NAMED, tekken_to_json
from jaxkv.weights.directory import (
    has_file,
    parse_json_object,
    path_inside,
    read_bytes,
    read_json_if_there,
    read_text,
)
from jaxkv.wording import clip

_LOG = logging.getLogger(__name__)

MAX_SECONDS = 600
MAX_BYTES = 128 * 2**20
_TEKKEN = "tekken.json"
_FORMS = (
    ("tokenizer.model",),
    ("tokenizer.model.v3",),
    (_TEKKEN,),
    ("tiktoken.model",),
    ("vocab.json", "merges.txt"),
    ("qwen.tiktoken",),
)
"""Files of a tokenizer without tokenizer.json; the first form that is there is read."""

_BESIDE = ("special_tokens_map.json", "added_tokens.json")
_PROGRAM = str(Path(__file__).with_name("conversion_process.py"))
_KEPT_ENVIRONMENT = (
    "PATH",
    "PYTHONPATH",
    "PYTHONHOME",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TMPDIR",
)
_PACKAGES = "'transformers>=5' sentencepiece protobuf tiktoken"
# A tokenizer of text has at least a token for each byte; a result with fewer is that of a converter that failed.
_FEWEST_TOKENS = 128


def published_form(folder: Path) -> tuple[str, ...]:
    """Returns the files of a tokenizer in another form than tokenizer.json; empty if there are none."""
    return next((form for form in _FORMS if all(has_file(folder, name) for name in form)), ())


def convert(
    folder: Path, form: tuple[str, ...], settings: Mapping[str, object]
) -> tuple[str, dict[str, object]]:
    """Returns the text of a tokenizer.json, and the tokenizer_config.json with what the form itself names.

    Args:
        folder: the model directory.
        form: the tokenizer's files there.
        settings: its tokenizer_config.json.

    Raises:
        BadCheckpoint: the files are malformed, or only Transformers converts them and is not installed or fails; the
            message says what to run.
    """
    name = form[0]
    where = f"{folder / name}"
    if name == _TEKKEN:
        tree = parse_json_object(read_text(folder, name, max_bytes=MAX_BYTES), where)
        return json.dumps(tekken_to_json(tree, where)), {**NAMED, **settings}
    if name.startswith("tokenizer.model"):
        content = read_bytes(folder, name, max_bytes=MAX_BYTES)
        if looks_like_sentencepiece(content):
            model = read_sentencepiece(content, where)
            if model.is_convertible():
                added = read_special_tokens(folder, settings).added
                tree = to_tokenizer_json(model, settings, added)
                return json.dumps(tree), {**model.named(), **settings}
    return _with_transformers(folder, form, settings)


def _with_transformers(
    folder: Path, form: tuple[str, ...], settings: Mapping[str, object]
) -> tuple[str, dict[str, object]]:
    """Converts in a process that sees links to the tokenizer's files, its settings and the model's type, no code."""
    files = " and ".join(form)
    start = f"{folder} has {files} but no tokenizer.json"
    otherwise = f"; or remove {files} to serve token ids alone"
    if "auto_map" in settings or form[0].endswith(".tiktoken"):
        raise BadCheckpoint(
            f"{start}, and only Python code of its authors reads that, which is never run; take a tokenizer.json "
            f"that was made for this model{otherwise}"
        )
    if importlib.util.find_spec("transformers") is None:
        raise BadCheckpoint(
            f"{start}, and Transformers, which converts it, is not installed; run: pip install {_PACKAGES}{otherwise}"
        )
    with tempfile.TemporaryDirectory(prefix="jaxkv-tokenizer-") as made:
        source, target = Path(made, "source"), Path(made, "target")
        source.mkdir()
        for name in (*form, *_BESIDE):
            if has_file(folder, name):
                (source / name).symlink_to(path_inside(folder, name))
        config = read_json_if_there(folder, "config.json")
        kind = {key: config[key] for key in ("model_type", "tokenizer_class") if key in config}
        (source / "config.json").write_text(json.dumps(kind))
        if settings:
            (source / "tokenizer_config.json").write_text(json.dumps(dict(settings)))
        reason = _run(source, target)
        if reason is not None:
            raise BadCheckpoint(
                f"{start}, and Transformers cannot convert it: {clip(reason, 300)}; what it may need comes with: "
                f"pip install {_PACKAGES}{otherwise}"
            )
        text = read_text(target, "tokenizer.json", max_bytes=MAX_BYTES)
        known = read_json_if_there(target, "tokenizer_config.json")
    _LOG.warning(
        '%s; Transformers converted it, as it will at each start. To keep the result, run: python -c "from '
        "transformers import AutoTokenizer; AutoTokenizer.from_pretrained('%s').save_pretrained('%s')\"",
        start,
        folder,
        folder,
    )
    return text, {**known, **settings}


def _run(source: Path, target: Path) -> str | None:
    """Runs the conversion in a process; returns why it failed, or `None`."""
    kept = {key: os.environ[key] for key in _KEPT_ENVIRONMENT if key in os.environ}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(target.parent), "TQDM_DISABLE": "1"}
    try:
        done = subprocess.run(
            # Run as a file, so that the process imports neither jaxkv nor a module beside the file.
            [sys.executable, "-P", _PROGRAM, str(source), str(target), str(_FEWEST_TOKENS)],
            env=kept | offline,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MAX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {MAX_SECONDS} s"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return (done.stderr.splitlines() or [f"it ended with status {done.returncode}"])[-1]
    return json.loads(lines[-1]).get("error")
