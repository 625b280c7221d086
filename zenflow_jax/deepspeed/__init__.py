"""Translates DeepSpeed's configs, as of DeepSpeed 0.19.8. It imports nothing of DeepSpeed.

`from_deepspeed` (`_options.py`) goes through the config once, section by section: `_optimizer.py`,
`_zero.py`, and batch and precision itself. A `Section` records which of its keys were read; the
others end in one warning. Users read docs/deepspeed.md.
"""

from zenflow_jax.deepspeed._options import DeepSpeedOptions, from_deepspeed

__all__ = ["DeepSpeedOptions", "from_deepspeed"]
