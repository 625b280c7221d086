"""DeepSpeed's sample config, a config for a complete training run, and changes to them."""

import copy
from typing import Any

# The config from DeepSpeed's ZenFlow tutorial.
TUTORIAL = {
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "zenflow": {
            "topk_ratio": 0.05,
            "select_strategy": "auto",
            "select_interval": "auto",
            "update_interval": 4,
            "full_warm_up_rounds": 0,
            "overlap_step": True,
        },
    }
}
TRAINING = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.01},
    },
    "gradient_clipping": 0.5,
    **TUTORIAL,
}
RULES = "zero_optimization.zenflow"
OFFLOAD = "zero_optimization.offload_optimizer"
ADAM = "optimizer.params"
REMOVE = Ellipsis  # prints the same in every test process

# float32 compared with Python's floats, as a share of the highest rate; 545,000 values of
# DeepSpeed's own classes differed by at most 1.9e-7.
RATE_TOLERANCE = 1e-6


def changed(values: dict[str, Any], config: Any = TRAINING) -> Any:
    """Returns the config with other values at paths such as "optimizer.params.lr"."""
    config = copy.deepcopy(config)
    for path, value in values.items():
        *sections, key = path.split(".")
        section = config
        for name in sections:
            section = section.setdefault(name, {})
        if value is REMOVE:
            del section[key]
        else:
            section[key] = value
    return config


def scheduled(name: str, **params: Any) -> dict:
    return {"scheduler": {"type": name, "params": params}}
