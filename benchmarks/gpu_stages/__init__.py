"""The stages of `python -m benchmarks.on_gpu`, one question a file.

    facts.py       what the machine is and how fast its parts are
    correct.py     whether the arithmetic is right on it; what is asked is in `checks.py`
    layerwise.py   whether models that do not fit train as AdamW does, and how fast
    step_times.py  what a training step costs beside everything else that a user could do
    headline.py    the largest model that trains here and would not with AdamW

Each has `run(stage)` and runs in a process of its own (`__main__.py`), which alone starts jax on
the GPU. What it finds it writes down at once (`notes.py`), so that what ends it, an abort or the
clock, takes nothing that was found before. `sizes.py` says which models and peers the stages train,
`programs.py` compiles their steps without a GPU, `report.py` makes a report of the notes.
"""
