"""The stages of `python -m benchmarks.on_gpu`, one question a file.

    facts.py       what the machine is and how fast its parts are
    correct.py     whether the arithmetic is right on it; what is asked is in `checks.py`

Each has `run(stage)` and runs in a process of its own (`__main__.py`), which alone starts jax on
the GPU. What it finds it writes down at once (`notes.py`), so that what ends it, an abort or the
clock, takes nothing that was found before. `machine.py` looks at a machine without jax,
`report.py` makes the report of the notes.
"""
