"""A Hugging Face Hub on this machine, of models that a test makes, and its cache in the layout of the real one."""

import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


def commit_of(files):
    """Returns a commit hash for a model's files."""
    named = sorted((name, etag_of(content)) for name, content in files.items())
    return hashlib.sha1(repr(named).encode()).hexdigest()


def etag_of(content):
    return hashlib.sha256(content).hexdigest()


@dataclass
class Model:
    """One model on the hub.

    Attributes:
        files: name -> bytes.
        is_gated: files need a token, whose account then has access if `grants` holds it.
        grants: tokens with access.
        is_private: without one of `grants` there is no such model.
    """

    files: dict[str, bytes]
    is_gated: bool = False
    is_private: bool = False
    grants: tuple[str, ...] = ()

    @cached_property
    def commit(self):
        return commit_of(self.files)


@dataclass
class FakeHub:
    """What the server answers from, and what it was asked.

    Attributes:
        models: name -> model.
        endpoint: the server's address.
        asked: method and path of each request.
        downloaded: names of the files whose content was sent.
        status: all requests are answered with this status, if it is not None.
    """

    models: dict[str, Model] = field(default_factory=dict)
    endpoint: str = ""
    asked: list[str] = field(default_factory=list)
    downloaded: list[str] = field(default_factory=list)
    status: int | None = None

    def answer(self, method, path, token):
        """Returns status, headers and content."""
        self.asked.append(f"{method} {path}")
        if self.status is not None:
            return self.status, {}, b""
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        name = api[1] if api else resolve[1] if resolve else None
        model = self.models.get(name)
        if model is None or (model.is_private and token not in model.grants):
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        revision = api[3] if api else resolve[2]
        if revision not in (None, "main", model.commit):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if api:
            return 200, {}, json.dumps(_listing(name, model, api[2] == "tree")).encode()
        if model.is_gated and token not in model.grants:
            return 403 if token else 401, {"X-Error-Code": "GatedRepo"}, b""
        content = model.files[resolve[3]]
        if method == "GET":
            self.downloaded.append(resolve[3])
        return 200, {"X-Repo-Commit": model.commit, "ETag": f'"{etag_of(content)}"'}, content


def _listing(name, model, as_tree):
    if as_tree:
        return [
            {"type": "file", "path": file, "size": len(content), "oid": etag_of(content)}
            for file, content in model.files.items()
        ]
    siblings = [{"rfilename": file} for file in model.files]
    return {"id": name, "sha": model.commit, "siblings": siblings, "gated": model.is_gated}


@contextmanager
def serving():
    """Yields a `FakeHub` that answers on a port of this machine."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            status, headers, content = hub.answer(self.command, path, token)
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, *values):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def files_in(directory):
    """Returns the files of a folder: name -> bytes."""
    return {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.is_file()}


def write_cache(cache, name, files, *, ref="main", shared=()):
    """Writes a model into a cache as the hub does; returns the snapshot's folder.

    Args:
        cache: the cache's folder.
        name: of the model.
        files: name -> bytes.
        ref: a branch that is known to be at this revision; `None` for none.
        shared: names of files whose blob is a link into the store that all models share.
    """
    folder, commit = cache / f"models--{name.replace('/', '--')}", commit_of(files)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for file, content in files.items():
        etag = etag_of(content)
        blob = folder / "blobs" / etag
        if file in shared:
            store = cache / "blobs" / etag[:2]
            store.mkdir(parents=True, exist_ok=True)
            (store / etag).write_bytes(content)
            blob.symlink_to(f"../../blobs/{etag[:2]}/{etag}")
        else:
            blob.write_bytes(content)
        (snapshot / file).symlink_to(f"../../blobs/{etag}")
    if ref is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return snapshot
