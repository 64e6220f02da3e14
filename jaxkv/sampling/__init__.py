"""Sampling: the table of parameters, the features of programs, and the sampler on the device."""
