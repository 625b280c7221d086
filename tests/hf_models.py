"""Makes, loads and runs the models in `fixtures/`, and compares results with `transformers`."""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.tiny_tokenizer import write_byte_level, write_wordpiece
from train.huggingface.loading import load_weights, make_model, read_folder
from train.huggingface.tensors import leaf_name

FIXTURES = Path(__file__).parent / "fixtures"
DECODERS = ["llama2", "llama3", "llama_linear", "mistral", "qwen2", "qwen3"]
FAMILIES = [*DECODERS, "bert", "bert_masked"]

# The fixture's scaling of rotations, as in configs before transformers 5. In a head of 8, one pair
# of channels keeps its speed, one is on the ramp and two are slowed down.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

# Relative to the largest output. The same float32 operations in another order, two layers of sums
# over at most 24 numbers, differed by 6e-7.
TOLERANCE = 3e-6


def make(pretrained, *, labels=None, weight_dtype=jnp.float32, compute_dtype=None, **options):
    """Returns a model's definition, and its weights' shapes."""
    options |= {"weight_dtype": weight_dtype, "compute_dtype": compute_dtype or weight_dtype}
    labels = labels or pretrained.labels or 2
    return _traced(pretrained.config, labels, tuple(options.items()))


@functools.cache
def _traced(config, labels, options):
    """Returns a model's definition and shapes, traced once for all tests."""

    def split():
        model = make_model(config, labels=labels, rngs=nnx.Rngs(0), **dict(options))
        graphdef, params = nnx.split(model)
        return graphdef, nnx.as_pure(params)

    return jax.eval_shape(split)


def load(folder, **options):
    """Returns a folder's contents, its model's definition, and its model's weights."""
    pretrained = read_folder(folder)
    graphdef, shapes = make(pretrained, **options)
    return pretrained, graphdef, load_weights(pretrained, shapes)


def expected(name):
    return load_file(FIXTURES / name / "expected.safetensors")


@functools.partial(jax.jit, static_argnums=(0, 1))
def outputs(name, graphdef, params):
    """Returns this project's outputs for the inputs of `transformers`; padding is 0."""
    data, model = expected(name), nnx.merge(graphdef, params)
    if name in DECODERS:
        return model(data["input_ids"])
    inputs = data["input_ids"], data["token_type_ids"], data["attention_mask"]
    if name == "bert":
        return model(*inputs)
    return model.run_blocks(*model.block_inputs(*inputs)) * inputs[2][..., None].astype(np.float32)


def expected_of(name):
    data = expected(name)
    if name == "bert_masked":
        return data["hidden"] * data["attention_mask"][..., None]
    return data["logits"]


def assert_close(actual, desired, tolerance=TOLERANCE, floor=0.0):
    atol = tolerance * max(np.abs(desired).max(), floor)
    np.testing.assert_allclose(actual, desired, rtol=0, atol=atol)


def copied(name, tmp_path):
    return shutil.copytree(FIXTURES / name, tmp_path / "model")


def change_config(folder, **changes):
    """Sets keys in config.json; None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def names(tree):
    return [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


TOKENIZERS = dict.fromkeys(DECODERS, write_byte_level) | {"bert": write_wordpiece}


def write_model(folder: Path, name: str) -> Path:
    """Writes the model of a fixture, with the vocabulary of a tokenizer, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = TOKENIZERS[name](folder)
    config = json.loads((FIXTURES / name / "config.json").read_text(encoding="utf-8"))
    tensors = load_file(FIXTURES / name / "model.safetensors")
    rng = np.random.default_rng(0)
    for key, x in tensors.items():
        if x.shape[0] == config["vocab_size"]:
            shape = (vocabulary, *x.shape[1:])
            tensors[key] = rng.normal(scale=0.1, size=shape).astype(x.dtype)
    save_file(tensors, folder / "model.safetensors")
    text = json.dumps(config | {"vocab_size": vocabulary})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder
