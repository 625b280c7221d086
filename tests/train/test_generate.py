"""Continuations of a prompt: the same tokens with and without a cache, and the command."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.compilations import times_compiled
from tests.hf_models import FIXTURES, assert_close, load, write_model
from train import generate
from train.huggingface.tokenizer import read_tokenizer
from train.model.sampling import Sampling, continue_tokens, narrow

PROMPT, MORE = 5, 6  # tokens; the sum exceeds the Mistral fixture's window


# Attention differs between these: windows, head groups, norms.
@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_logits_and_tokens_with_a_cache_equal_those_of_the_whole_sequence(name):
    _, graphdef, params = load(FIXTURES / name, scan_layers=True)
    tokens = np.random.default_rng(0).integers(0, 62, (2, PROMPT + MORE)).astype(np.int32)
    extend = jax.jit(lambda tokens, cache, i: nnx.merge(graphdef, params).extend(tokens, cache, i))
    forward = jax.jit(lambda tokens: nnx.merge(graphdef, params)(tokens))
    whole = forward(tokens)

    cache = nnx.merge(graphdef, params).empty_cache(2, PROMPT + MORE + 3)
    logits, cache = extend(tokens[:, :PROMPT], cache, 0)
    assert_close(logits, whole[:, PROMPT - 1])
    for i in range(PROMPT, PROMPT + MORE):
        logits, cache = extend(tokens[:, i : i + 1], cache, i)
        assert logits.dtype == jnp.float32
        assert_close(logits, whole[:, i])
    assert times_compiled(extend) == 2  # the prompt, and one token

    prompt = tokens[0, :PROMPT].tolist()
    written = list(continue_tokens(graphdef, params, prompt, most=MORE))
    logits = forward(np.array([prompt + written] * 2, np.int32))[0]  # of the compiled shape
    assert written == np.argmax(logits[PROMPT - 1 : -1], axis=-1).tolist()


PROBABILITIES = [0.05, 0.4, 0.1, 0.3, 0.15]


def test_unlikely_tokens_are_not_sampled():
    for sampling, kept in (
        (Sampling(1.0, top_k=2), [1, 3]),
        (Sampling(1.0, top_p=0.4), [1]),
        (Sampling(1.0, top_p=0.41), [1, 3]),
        # Of the remaining two, 0.4 becomes 0.57.
        (Sampling(1.0, top_k=2, top_p=0.5), [1]),
    ):
        logits = narrow(jnp.log(jnp.asarray(PROBABILITIES)), sampling)
        assert np.flatnonzero(np.isfinite(logits)).tolist() == kept
        expected = np.array(PROBABILITIES)[kept]
        shares = np.asarray(jax.nn.softmax(logits))[kept]
        np.testing.assert_allclose(shares, expected / expected.sum(), rtol=1e-5)


def run(capsys, *arguments):
    code = generate.main([str(argument) for argument in arguments])
    return (code, *capsys.readouterr())


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model", "llama2")


def test_the_command_writes_the_continuation_up_to_an_end_token(folder, capsys):
    tokenizer = read_tokenizer(folder, vocabulary=1000)
    prompt = [tokenizer.begin, *tokenizer.tokens.encode("the cat", add_special_tokens=False).ids]
    _, graphdef, params = load(folder, scan_layers=True)
    tokens = list(continue_tokens(graphdef, params, prompt, most=9, ends={tokenizer.end}))
    command = "--model", folder, "the cat", "--max-tokens", 9
    assert run(capsys, *command)[:2] == (0, tokenizer.tokens.decode(tokens) + "\n")
    sampled = run(capsys, *command, "--top-k", 40)[1]
    assert run(capsys, *command, "--top-k", 40)[1] == sampled != tokenizer.tokens.decode(tokens)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, tokens[1]]}))
    assert "2 tokens" in run(capsys, *command)[2].splitlines()[1]


def test_the_class_of_each_text_does_not_depend_on_other_texts(tmp_path, capsys, monkeypatch):
    folder = write_model(tmp_path / "model", "bert")
    origin, graphdef, params = load(folder)
    tokenizer = read_tokenizer(folder, vocabulary=origin.config.vocabulary)
    texts, expected = ["a good film " * 9, "", "why is it\u2028on the dog"], []
    model = jax.jit(lambda *inputs: nnx.merge(graphdef, params)(*inputs))
    for text in texts:
        ids = tokenizer.tokens.encode(text).ids
        ids = np.array([[*ids[:-1][: origin.config.positions - 1], ids[-1]]])
        logits = model(ids, np.zeros_like(ids), np.ones_like(ids))
        share = jax.nn.softmax(logits[0])
        expected.append((("no", "perhaps", "yes")[int(share.argmax())], float(share.max())))
    monkeypatch.setattr(generate, "BATCH", 2)
    monkeypatch.setattr(generate, "PART", 4)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(texts)))
    code, out, _ = run(capsys, "--model", folder, "-")
    lines = [line.split("\t") for line in out.splitlines()]
    assert code == 0
    assert [name for name, _ in lines] == [name for name, _ in expected]
    assert [float(x) for _, x in lines] == pytest.approx([x for _, x in expected], abs=2e-4)
    assert run(capsys, "--model", folder, texts[0])[1] == out.splitlines(keepends=True)[0]
