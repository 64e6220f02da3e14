"""What runs on the device: the description of a step, the step itself, the choice of tokens."""
