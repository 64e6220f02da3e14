"""Weights in 8 and 4 bits: the formats of checkpoints, rounding on load, and the parameters that they become.

`config.py` reads a checkpoint's `quantization_config` to a `Scheme`. `join_scales.py` joins the tensors of each weight
to a `QuantisedTensor`, whose rows the module of its format reads (`awq.py`, `gptq.py`, ...); `rounding.py` makes one of
a plain weight. `few_bits_leaf.py` makes of it the parameter, a `pallas_kernels.formats.few_bits.FewBits`.
"""
