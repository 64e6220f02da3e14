"""The engine's side of the tiers below the device: prefixes in host memory, and in files."""
