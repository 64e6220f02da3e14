"""Switches on the checks of annotated shapes and types, for the tests' conftest and for programs that tests start."""

import importlib.util


def check_shapes():
    """Lets beartype, where it is installed, check every function of our packages that is imported from now on."""
    # Imported before the hook: they check what users give them by themselves, and the tests give them nonsense.
    import jaxkv.config.blocks
    import jaxkv.config.engine
    import jaxkv.config.model
    import jaxkv.config.sampling
    import jaxkv.text.prompts  # noqa: F401

    if importlib.util.find_spec("beartype") is not None:
        from jaxtyping import install_import_hook

        install_import_hook(["jaxkv", "pallas_kernels"], "beartype.beartype")
