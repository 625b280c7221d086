"""README.md's table of GPUs, models and commands: its values follow from shapes."""

import json
import re
import shlex
from pathlib import Path

import pytest

from train.cli.command_line import read_command_line
from train.plan import planning as script_planning
from zenflow_jax.planning import GPUS, HOST_RESERVE, MAX_FRACTION

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_scripts_run")]

README = Path(__file__).parents[2] / "README.md"
DEVICES = {"RTX 4090": "rtx4090", "L40S": "l40s", "H100": "h100"}
NAMES = "hidden_size intermediate_size num_hidden_layers num_attention_heads".split()
QWEN3 = {
    "model_type": "qwen3",
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
LLAMA2 = {
    "model_type": "llama",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
TIED = {"tie_word_embeddings": True}
CONFIGS = {
    "Qwen/Qwen3-1.7B": QWEN3 | TIED | dict(zip(NAMES, (2048, 6144, 28, 16), strict=True)),
    "meta-llama/Llama-2-7b-hf": LLAMA2 | dict(zip(NAMES, (4096, 11008, 32, 32), strict=True)),
    "Qwen/Qwen3-8B": QWEN3 | dict(zip(NAMES, (4096, 12288, 36, 32), strict=True)),
    "Qwen/Qwen3-14B": QWEN3 | dict(zip(NAMES, (5120, 17408, 40, 40), strict=True)),
}
COMMAND = r"`zenflow-finetune (.+? --model (\S+) .+?)`"
ROW = re.compile(rf"\| (.+?), (\d+) GB \| {COMMAND} \| (\d+) GB \| (\d+) GB \|")
TEXT = README.read_text(encoding="utf-8")
ROWS = ROW.findall(TEXT)
PER_PARAMETER = re.compile(r"(\d+) to (\d+) on the host")


def test_all_rows_are_read():
    assert sorted({row[3] for row in ROWS}) == sorted(CONFIGS)
    assert len(ROWS) == 6


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Returns a function that plans a row, with more options."""
    monkeypatch.setattr(script_planning, "has_compiler", lambda: False)

    def plan(row, *options):
        gpu, memory, command, model = row[:4]
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model]))
        words = shlex.split(command.replace(model, str(tmp_path)))
        machine = ["--device", DEVICES[gpu], "--host-memory", memory]
        run = read_command_line([*words, *machine, *options], program="zenflow-plan")
        return script_planning.plan_run(run.settings, run.planning, chosen=True, say=print).plan

    return plan


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[3]}")
def test_each_row_matches_its_plan(planned, row):
    gpu, memory, _, model, on_device, on_host = row
    plan = planned(row)
    billions = float(re.search(r"([\d.]+)b", model.lower())[1])
    assert plan.parameters / 1e9 == pytest.approx(billions, rel=0.06)
    assert round(plan.host_bytes / 1e9) == int(on_host)
    assert plan.host_bytes + HOST_RESERVE <= int(memory) * 1e9
    # The compiler adds gradients and activations.
    assert (
        plan.device_bytes / 1e9 < int(on_device) <= MAX_FRACTION * GPUS[DEVICES[gpu]].memory / 1e9
    )


def test_other_optimizers_need_the_memory_in_the_text_and_engines_the_bytes_per_parameter(planned):
    sentence = (
        r"`--optimizer (\w+)`, `(\w+)` or `(\w+)`, the third run needs (\d+), (\d+) or (\d+) GB"
    )
    *names, first, second, third = re.search(sentence, TEXT).groups()
    plans = [planned(ROWS[2], "--optimizer", name) for name in names]
    assert [round(x.host_bytes / 1e9) for x in plans] == [int(first), int(second), int(third)]
    least, most = map(int, PER_PARAMETER.search(TEXT).groups())
    engines = [planned(row) for row in ROWS if "--stream weights" not in row[2]]
    each = [round(x.host_bytes / x.parameters) for x in engines]
    assert (min(each), max(each)) == (least, most)
