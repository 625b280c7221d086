"""Parts for `benchmarks/on_gpu.py` that fail in different ways, after a first result."""

import os
import threading


def parts(_):
    def fails(end):
        def work(part):
            part.note("a case", found=f"the result of {part.name}")
            end()

        return work

    def lucky():
        raise ValueError("expected luck, got none")

    ends = {"raises": lucky, "aborts": os.abort, "hangs": threading.Event().wait, "ends": dict}
    return {name: fails(end) for name, end in ends.items()}


def broken(_):
    raise ImportError("no such library")
