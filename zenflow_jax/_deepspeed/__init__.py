"""DeepSpeed's configs: what to use here for one, and what of it cannot be had.

A pure translation, which imports nothing of DeepSpeed. `from_deepspeed` is in `options.py` and goes
through a config once, block by block: `optimizer.py`, `zero.py`, and the rest itself. Each block
knows which of its keys were taken (`blocks.py`); what nobody took is reported, with the reasons in
`keys.py`. All that is said here of DeepSpeed is as in version 0.19.8. Users read docs/deepspeed.md.
"""

from zenflow_jax._deepspeed.options import DeepSpeedOptions, from_deepspeed

__all__ = ["DeepSpeedOptions", "from_deepspeed"]
