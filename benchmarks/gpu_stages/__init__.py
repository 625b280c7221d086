"""The stages of `python -m benchmarks.on_gpu`, one question per file.

    facts.py       the machine, and the speed of its parts
    correct.py     whether the arithmetic is right on it; `checks.py` has the questions
    layerwise.py   whether models that do not fit train as AdamW does, and how fast
    step_times.py  the time of a training step, compared with all alternatives
    headline.py    the largest model that trains here but could not with AdamW

Each has `run(stage)` and runs in a separate process (`__main__.py`), the only one with jax on the
GPU. It records each result at once (`notes.py`), so that neither an abort nor the time limit loses
earlier results. `sizes.py` chooses the stages' models and peers, `programs.py` compiles their steps
without a GPU, and `report.py` turns the notes into a report.
"""
