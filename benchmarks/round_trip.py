"""Does `transformers` load what `save_folder` wrote, and compute the same?

    python -m benchmarks.round_trip FOLDER ...
    python -m benchmarks.round_trip tests/fixtures/*/

Needs torch and transformers. Loads each folder, saves it, loads that again and compares all bits;
then `transformers` computes the logits of both folders for the same random tokens, and so does the
model of train/. Prints the largest differences, in units of the largest logit, one line a folder.
Where the folder's own model has another head or none, the last hidden states stand for the logits.
Answers: `benchmarks/LOG.md`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from flax import nnx

from train.hf_saving import save_folder
from train.pretrained import Pretrained, load_weights, make_model, read_folder

TOKENS = (2, 16)


def load(pretrained: Pretrained, *, scan_layers: bool):
    """A model's definition, and the weights of the folder, in float32."""

    def split():
        options = {
            "weight_dtype": jnp.float32,
            "compute_dtype": jnp.float32,
            "scan_layers": scan_layers,
            "rngs": nnx.Rngs(0),
        }
        model = make_model(pretrained, labels=pretrained.labels or 2, **options)
        graphdef, params = nnx.split(model)
        return graphdef, nnx.as_pure(params)

    graphdef, shapes = jax.eval_shape(split)
    return graphdef, load_weights(pretrained, shapes)


def same_bits(one, other) -> bool:
    equal = jax.tree.map(lambda a, b: np.array_equal(a, b), one, other)
    return jax.tree.all(equal)


def ours(pretrained: Pretrained, graphdef, params, tokens: np.ndarray) -> np.ndarray:
    model = nnx.merge(graphdef, params)
    if pretrained.architecture == "decoder":
        return np.asarray(model(tokens))
    ones = np.ones_like(tokens)
    if pretrained.labels is None:
        return np.asarray(model.stream(tokens, 0 * ones, ones))
    return np.asarray(model(tokens, 0 * ones, ones))


def theirs(pretrained: Pretrained, folder: Path, tokens: np.ndarray) -> np.ndarray:
    if pretrained.architecture == "decoder":
        kind = transformers.AutoModelForCausalLM
    elif pretrained.labels is None:
        kind = transformers.AutoModel
    else:
        kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        outputs = model(input_ids=torch.from_numpy(tokens).long())
    return outputs[0].numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    for folder in parser.parse_args().folders:
        pretrained = read_folder(folder)
        graphdef, params = load(pretrained, scan_layers=False)
        tokens = np.random.default_rng(0).integers(0, pretrained.config.vocabulary, TOKENS)
        tokens = tokens.astype(np.int32)
        with tempfile.TemporaryDirectory() as parent:
            saved = Path(parent) / "saved"
            save_folder(saved, pretrained, params)
            again = load(read_folder(saved), scan_layers=False)[1]
            stacks = load(pretrained, scan_layers=True)
            from_stacks = Path(parent) / "from_stacks"
            save_folder(from_stacks, pretrained, stacks[1])
            bits = same_bits(params, again) and same_bits(
                params, load(read_folder(from_stacks), scan_layers=False)[1]
            )
            original = theirs(pretrained, folder, tokens)
            there = theirs(pretrained, saved, tokens)
        here = ours(pretrained, graphdef, params, tokens)
        scale = np.abs(original).max()
        print(
            f"{folder.name}: same bits {bits}, saved against original "
            f"{np.abs(there - original).max() / scale:.1e}, train/ against original "
            f"{np.abs(here - original).max() / scale:.1e}"
        )


if __name__ == "__main__":
    main()
