"""Translates DeepSpeed's configs, as of DeepSpeed 0.19.8, without importing DeepSpeed.

docs/deepspeed.md is the guide for users.
"""

from zenflow_jax.deepspeed._options import DeepSpeedOptions, from_deepspeed

__all__ = ["DeepSpeedOptions", "from_deepspeed"]
