"""Makes `fixtures/`: tiny random models and chat templates, with the results of `transformers`.

    python -m tests.make_fixtures

Needs torch and transformers; the tests themselves do not. Each model is a folder with
`config.json`, its weights, and `expected.safetensors`: inputs, and outputs in float32. The chat
templates use the same features as models' templates; `chat/expected.json` contains conversations
for each of them. For each conversation, this script adds its text, the prompt for an answer, the
tokens and, if the template marks answers, the answers' mask.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers as hf
from safetensors.numpy import save_file

from tests.hf_models import FIXTURES, LLAMA3
from tests.tiny_tokenizer import BEGIN, END, TURN, TURN_END, write_byte_level

POSITIONS = 12

# All sizes are small, different, so that swapped sizes fail, and even, so that they can be split
# over devices.
SIZES = {
    "vocab_size": 62,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DECODER = SIZES | {"num_key_value_heads": 4, "max_position_embeddings": 512}
DECODER |= {"bos_token_id": 1, "eos_token_id": 2}
ENCODER = SIZES | {"max_position_embeddings": 20, "type_vocab_size": 2, "pad_token_id": 0}


def make_decoders() -> None:
    linear = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    few = DECODER | {"num_key_value_heads": 2}
    llama3 = {"head_dim": 8, "rms_norm_eps": 1e-5}
    llama3 |= {"rope_parameters": LLAMA3 | {"rope_theta": 10_000.0}}
    qwen3 = {"head_dim": 6, "tie_word_embeddings": False}  # the heads are wider than the model
    mistral = {"num_key_value_heads": 1, "sliding_window": 5}  # a window below the length
    models = {
        "llama2": hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
        "llama_linear": hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, rope_parameters=linear)),
        "llama3": hf.LlamaForCausalLM(hf.LlamaConfig(**few, **llama3)),
        "qwen2": hf.Qwen2ForCausalLM(hf.Qwen2Config(**few, tie_word_embeddings=True)),
        "qwen3": hf.Qwen3ForCausalLM(hf.Qwen3Config(**few, **qwen3)),
        "mistral": hf.MistralForCausalLM(hf.MistralConfig(**DECODER | mistral)),
    }
    for name, model in models.items():
        rng = np.random.default_rng(len(name))
        tokens = rng.integers(0, DECODER["vocab_size"], (2, POSITIONS)).astype(np.int32)
        # Like the published Llama 3: bfloat16, in several files.
        options = {"bfloat16": True, "max_shard_size": "12KB"} if name == "llama3" else {}
        _save(name, model, {"input_ids": tokens}, **options)


def make_encoders() -> None:
    rng = np.random.default_rng(0)
    mask = np.ones((3, POSITIONS), np.int32)
    mask[1, 7:] = 0
    mask[2, 1:] = 0
    types = (np.arange(POSITIONS) > 4).astype(np.int32) * mask
    tokens = rng.integers(1, ENCODER["vocab_size"], mask.shape).astype(np.int32) * mask
    inputs = {"input_ids": tokens, "token_type_ids": types, "attention_mask": mask}
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    classifier = hf.BertConfig(**ENCODER, id2label=labels)
    _save("bert", hf.BertForSequenceClassification(classifier), inputs)
    _save("bert_masked", hf.BertForMaskedLM(hf.BertConfig(**ENCODER)), inputs)


def _save(name: str, model, inputs: dict[str, np.ndarray], *, bfloat16=False, **options) -> None:
    """Writes a model in which every weight affects the outputs."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            draw = torch.randn(weight.shape, generator=generator)
            if "embed" in key:
                weight.copy_(draw)
            elif weight.ndim == 2:
                weight.copy_(draw * weight.shape[1] ** -0.5)
            else:
                mean = 1.0 if "norm" in key.lower() and key.endswith("weight") else 0.0
                weight.copy_(mean + 0.3 * draw)
            if bfloat16:
                weight.copy_(weight.bfloat16().float())
        model.eval()
        batch = {key: torch.from_numpy(value).long() for key, value in inputs.items()}
        outputs = model(**batch, output_hidden_states=True)
    results = {"logits": outputs.logits.numpy(), "hidden": outputs.hidden_states[-1].numpy()}
    if bfloat16:  # not earlier, which would also round the rotary frequencies
        model.bfloat16()
    folder = FIXTURES / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, **options)
    save_file(inputs | results, folder / "expected.safetensors")


def make_conversations() -> None:
    path = FIXTURES / "chat" / "expected.json"
    expected = json.loads(path.read_text(encoding="utf-8")) | {"transformers": hf.__version__}
    with tempfile.TemporaryDirectory() as folder:
        write_byte_level(Path(folder), also=[TURN, TURN_END])
        tokenizer = hf.PreTrainedTokenizerFast(
            tokenizer_file=f"{folder}/tokenizer.json", bos_token=BEGIN, eos_token=END
        )
    render = tokenizer.apply_chat_template
    for template in expected.keys() - {"transformers"}:
        source = path.with_name(f"{template}.jinja")
        tokenizer.chat_template = source.read_text(encoding="utf-8")
        for case in expected[template].values():
            messages, tools = case["messages"], case.get("tools")
            marks = {"return_assistant_tokens_mask": template == "marked"}
            encoded = render(messages, tools=tools, tokenize=True, return_dict=True, **marks)
            case["text"] = render(messages, tools=tools, tokenize=False)
            case["prompt"] = render(
                messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True
            )
            case["tokens"] = encoded["input_ids"]
            case["answers"] = encoded.get("assistant_masks")
    text = json.dumps(expected, ensure_ascii=False, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    make_decoders()
    make_encoders()
    make_conversations()
