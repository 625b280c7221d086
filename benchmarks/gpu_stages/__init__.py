"""The stages of `python -m benchmarks.on_gpu`, one question per file.

    facts.py       the machine and the speed of its parts
    correct.py     whether its results are correct; `checks.py` contains the questions
    layerwise.py   whether layer-by-layer training matches AdamW, and how fast it is
    ways.py        whether all ways of sending gradients give the same results
    step_times.py  the time of a training step, compared with all alternatives
    headline.py    the largest model that can be trained here, but not with AdamW

Each stage is a function `run(stage)` in a separate process (`__main__.py`), the only process with
jax on the GPU. It records each result at once (`notes.py`), so that neither an abort nor the time
limit loses earlier results. `sizes.py` chooses the stages' models and peers, and `report.py` turns
the notes into a report.
"""
