"""The packages contain no call that runs code or reads pickles, by their syntax trees."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for package in ("jaxkv", "pallas_kernels", "torch_bridge")
    for path in (ROOT / package).rglob("*.py")
)
MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "shelve",
    "yaml",
    "code",
    "codeop",
    "runpy",
    "socket",
    "requests",
    "urllib.request",
    "http.client",
    "multiprocessing",
    "telnetlib",
    "ftplib",
    "smtplib",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load",
    "np.load",
    "numpy.load",
    "jnp.load",
    "yaml.load",
    "os.system",
    "os.popen",
    "torch.hub.load",
    "torch.jit.load",
    "builtins.eval",
    "builtins.exec",
}
LOADERS = {"AutoModel", "AutoModelForCausalLM", "AutoConfig", "AutoTokenizer", "AutoProcessor"}
KEYWORDS = {"trust_remote_code", "allow_pickle"}


def dotted(node):
    """Returns `a.b.c` for an attribute of a name, else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def is_forbidden_module(name):
    return any(name == module or name.startswith(module + ".") for module in MODULES)


def offences_of_import(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if is_forbidden_module(alias.name)]
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return [
            name
            for name in names
            if is_forbidden_module(name) or name in CALLS or name.split(".")[-1] in LOADERS
        ]
    return []


def offences_of_call(node):
    if not isinstance(node, ast.Call):
        return []
    name = dotted(node.func)
    found = [name] if name in BUILTINS | CALLS else []
    if name.endswith("import_module") and node.args and isinstance(node.args[0], ast.Constant):
        found += [node.args[0].value] if is_forbidden_module(str(node.args[0].value)) else []
    for keyword in node.keywords:
        if keyword.arg in KEYWORDS or (
            keyword.arg == "shell" and getattr(keyword.value, "value", 1)
        ):
            found.append(f"{keyword.arg}=")
    return found


def offences(source):
    """Returns (line, what) of everything forbidden in a source text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        what = offences_of_import(node) + offences_of_call(node)
        if isinstance(node, ast.Name | ast.Attribute) and dotted(node).split(".")[-1] in LOADERS:
            what.append(dotted(node))
        found += [(getattr(node, "lineno", 0), name) for name in what]
    return found


# The server and its engine process, which talk over sockets.
SERVER = ROOT / "jaxkv" / "serve"

# Carries messages between the processes of one program.
CHANNEL = ROOT / "jaxkv" / "links" / "channel.py"

# Asks the server whose address the user of `jaxkv inspect` gives, follows no redirect, and reads JSON.
ASKS_A_SERVER = SERVER / "dashboard" / "sources.py"

# Converts tokenizers with Transformers, in a process of its own that sees tokenizer files only.
CONVERSION = ROOT / "jaxkv" / "text" / "conversion_process.py"

# Sends kernels, which are Python objects, to processes that it has started, over pipes that no other process has.
PIPES = ROOT / "pallas_kernels" / "lowering_helpers.py"


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if path not in (CONVERSION, ASKS_A_SERVER, PIPES)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_packages_hold_nothing_that_runs_or_unpickles_what_it_reads(path):
    found = offences(path.read_text(encoding="utf-8"))
    if SERVER in path.parents or path == CHANNEL:
        found = [(line, what) for line, what in found if what != "socket"]
    assert found == []


def test_the_command_that_asks_a_server_uses_the_standard_librarys_client_alone():
    source = ASKS_A_SERVER.read_text(encoding="utf-8")
    uses = {"urllib.request", "http.client.HTTPException", "http.client.HTTPMessage"}
    assert {what for _, what in offences(source)} == uses


def test_the_conversion_of_tokenizers_uses_one_loader_with_remote_code_off():
    source = CONVERSION.read_text(encoding="utf-8")
    loader = "AutoTokenizer"
    uses = {f"transformers.{loader}", loader, "trust_remote_code="}
    assert {what for _, what in offences(source)} == uses
    [call] = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and dotted(node.func) == f"{loader}.from_pretrained"
    ]
    options = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    assert options["trust_remote_code"] is False
    assert options["local_files_only"] is True


def test_processes_that_lower_kernels_read_pickles_from_their_pipes_alone():
    source = PIPES.read_text(encoding="utf-8")
    assert {what for _, what in offences(source)} == {"pickle"}
    tree = ast.parse(source)
    reads = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and dotted(node.func) in ("pickle.load", "pickle.loads", "pickle.Unpickler")
    }
    # The last is a message that the first or the second has read.
    assert reads == {"pickle.load(answers)", "pickle.load(given)", "pickle.loads(packed)"}
    pipes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Assign)}
    assert "given, answers = (process.stdin, process.stdout)" in pipes
    assert "given, answers = (sys.stdin.buffer, os.fdopen(os.dup(1), 'wb'))" in pipes
    assert "packed = pickle.load(given)" in pipes


def test_the_packages_were_found():
    assert len(SOURCES) > 20


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import os, dill as d",
        "import urllib.request",
        "from pickle import loads",
        "from urllib import request",
        "from concurrent import futures\nimport multiprocessing.pool",
        "import marshal as m",
        "eval('1')",
        "exec(text)",
        "f = compile(source, 'x', 'exec')",
        "__import__(name)",
        "import torch\ntorch.load(path)",
        "from torch import load",
        "np.load(path)",
        "import yaml",
        "f(trust_remote_code=False)",
        "f(allow_pickle=True)",
        "subprocess.run('ls', shell=True)",
        "subprocess.run('ls', shell=flag)",
        "os.system('ls')",
        "importlib.import_module('pickle')",
        "transformers.AutoTokenizer.from_pretrained(x)",
        "from transformers import AutoModelForCausalLM",
    ],
)
def test_each_forbidden_construct_is_noticed(source):
    assert offences(source)


@pytest.mark.parametrize(
    "source",
    [
        "import json, re\nre.compile('x')",
        "lowered.compile()",
        "subprocess.run(['ls'], shell=False)",
        "from jaxkv.models.encode import x",
        "library.load(path)",
    ],
)
def test_what_only_looks_alike_is_left_alone(source):
    assert offences(source) == []
