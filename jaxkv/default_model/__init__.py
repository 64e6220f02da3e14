"""The path of the default model in this package. README.md in this folder describes how it was made."""

from importlib.resources import files
from pathlib import Path


def path() -> Path:
    """The default model's Hugging Face directory, which is this package's own folder."""
    return Path(str(files(__name__)))
