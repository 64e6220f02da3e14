"""LoRA adapters that requests name: those that are loaded, and what a request remembers of its own."""
