"""How tokens are chosen: the table of parameters, what a program can do with them, and the sampler on the device."""
