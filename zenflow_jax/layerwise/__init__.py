"""Trains models whose weights do not fit on the device, one program for each layer, exactly."""

from zenflow_jax.layerwise._programs import WeightedLoss
from zenflow_jax.layerwise._scanned import ScannedModel
from zenflow_jax.layerwise._trainer import Trainer

__all__ = ["ScannedModel", "Trainer", "WeightedLoss"]
