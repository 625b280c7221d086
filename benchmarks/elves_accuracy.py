"""What do bounds cost? Predictions of fine-tuned models, packed with larger and larger ones.

    python -m benchmarks.elves_accuracy cola DATA MODEL...
    python -m benchmarks.elves_accuracy sst2 DATA MODEL...

MODEL is the folder `model/` of a run. Prints, for each model and bound, the ratio of its file, how
many predictions of the validation set are others than those of the unpacked model, how far the loss
moved, and the score. A bound is used for tensors whose root mean square is above it; the others
stay lossless, as the command would refuse them. Answers: `benchmarks/LOG.md`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from elves.files import PlainFile
from elves.writing import Options, Piece, pack, smallest_rms
from train.data import Sample
from train.pretrained import load_weights, make_model, read_folder
from train.settings import Settings
from train.step import PER_EXAMPLE
from train.tasks.chosen import make_task

POWERS = (-24, -20, -16, -14, -12, -10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=["cola", "sst2"])
    parser.add_argument("data", type=Path)
    parser.add_argument("models", nargs="+", type=Path)
    arguments = parser.parse_args()
    for model in arguments.models:
        curve(arguments.task, arguments.data, model)


def curve(name: str, data: Path, model: Path) -> None:
    settings = Settings(task=name, model=str(model), data=str(data), sequence_length=32)
    origin = read_folder(model)
    task = make_task(settings, origin)
    (source,) = task.validation.values()
    score_of = task.score
    assert score_of is not None
    sample = list(Sample(source, batch_size=64, batches=None, seed=0, mesh=None, buckets=4))

    def split():
        options = {"weight_dtype": jnp.float32, "compute_dtype": jnp.float32}
        made = make_model(origin, labels=len(task.labels), rngs=nnx.Rngs(0), **options)
        graphdef, params = nnx.split(made)
        return graphdef, nnx.as_pure(params)

    graphdef, shapes = jax.eval_shape(split)

    @jax.jit
    def judge(params, batch):
        found = PER_EXAMPLE[task.kind](nnx.merge(graphdef, params), batch)
        return found.losses, found.predictions, batch["rows"]

    def predictions(params):
        parts = [jax.device_get(judge(params, batch)) for batch in sample]
        rows = np.concatenate([rows > 0 for _, _, rows in parts])
        labels = np.concatenate([batch["label"] for batch in sample])[rows]
        losses, found = (np.concatenate([p[i] for p in parts])[rows] for i in (0, 1))
        return losses, found, score_of(found, labels)[task.best]

    plain_losses, plain, score = predictions(load_weights(origin, shapes))
    path = model / "model.safetensors"
    print(f"\n{model}: {len(plain)} examples, loss {plain_losses.mean():.4f}, score {score:.4f}")
    for power in POWERS:
        with tempfile.TemporaryDirectory() as folder:
            lossy, exact, small = packed_in_two(path, 2.0**power, Path(folder))
            tensors = {
                name: tensor._replace(file=exact if tensor.name in small else lossy)
                for name, tensor in origin.tensors.items()
            }
            losses, found, score = predictions(
                load_weights(origin._replace(tensors=tensors), shapes)
            )
            ratio = path.stat().st_size / (lossy.stat().st_size + exact.stat().st_size)
        print(
            f"2^{power}: ratio {ratio:.3f}, {int((found != plain).sum())} other predictions, "
            f"losses by {np.abs(losses - plain_losses).max():.1e} at most, score {score:.4f}"
            f", {len(small)} tensors lossless",
            flush=True,
        )


def packed_in_two(path: Path, bound: float, folder: Path) -> tuple[Path, Path, set[str]]:
    """A file of the tensors that the bound is for, one of the others, and the names of these."""
    with PlainFile(path) as file:
        every = [
            Piece(name, info.dtype, info.shape, file.read(name, 0, info.bytes))
            for name, info in file.tensors.items()
        ]
        sensible = {piece.name: smallest_rms([piece]) for piece in every}
        small = {name for name, largest in sensible.items() if largest and bound > largest[0]}
        lossy, exact = folder / "lossy.safetensors", folder / "exact.safetensors"
        pack(lossy, [piece for piece in every if piece.name not in small], Options(bound=bound))
        pack(exact, [piece for piece in every if piece.name in small], Options())
    return lossy, exact, small


if __name__ == "__main__":
    main()
