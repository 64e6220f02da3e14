"""The version of jaxkv, for modules that import nothing else."""

__version__ = "0.1.0"
