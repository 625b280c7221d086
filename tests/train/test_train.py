"""The quickstart job: settings, text, model, and the command itself at a tiny size."""

import csv
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

from benchmarks import kill_test
from train import finetune, job, models
from train.command_line import load_settings, read_command_line, to_toml
from train.data import Batches
from train.meter import Meter
from train.optimizers import (
    decayed,
    learning_rate,
    make_optimizer,
    skipped_steps,
    weight_dtype,
)
from train.run_folder import WRITTEN, new_run_folder
from train.settings import Settings, SettingsError, Start
from train.skipping import NotFiniteError, SkippedSteps
from train.tasks import standard_library
from train.tasks.standard_library import Windows
from zenflow_jax import AutoSelect, AutoWindow, EngineStats, EpochSelect, find_state

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"

TINY = {
    "corpus_megabytes": 0.3,
    "sequence_length": 16,
    "batch_size": 2,
    "width": 16,
    "layers": 1,
    "heads": 2,
    "ffn": 24,
    "steps": 13,
    "warmup_steps": 2,
    "log_every": 4,
    "eval_batches": 2,
    "update_interval": 2,
}

# Validation loss in nats: gradients of weights that differ by float32 rounding go through bfloat16.
# Measured 1.4e-4; weights without a float32 master are off by 5e-3, one stale step by 7e-2.
SAME_TRAINING_ATOL = 2e-3


pytestmark = pytest.mark.usefixtures("promotion_as_users_have_it")


def config_file(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def tiny_command(folder: Path, **changed) -> list[str]:
    values = TINY | {"output_dir": str(folder / "runs")} | changed
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    return [str(config_file(folder, text))]


# --- settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("learning_rat = 1e-3", "`learning_rat`.*Did you mean `?learning_rate"),
        ("max_steps = 5", "`max_steps`.*Did you mean `?steps"),
        ("zzz = 1", r"got `zzz`\..*learning_rate"),
        ('steps = "30"', r"`steps`: expected a whole number, got '30' \(a string\)"),
        ("steps = 30.0", r"`steps`: expected a whole number, got 30\.0"),
        ("steps = true", "`steps`: expected a whole number, got True"),
        ("progress = 1", "`progress`: expected true or false, got 1"),
        ("[steps]\nmany = 3", "`steps`: expected a whole number, got .*a table"),
        ('optimizer = "adam"', '`optimizer`: expected "zenflow" or "adamw".*got .adam.'),
        ("learning_rate = nan", "`learning_rate`: expected a finite number above 0, got nan"),
        ("batch_size = 0", "`batch_size`: expected a finite number above 0, got 0"),
        ("validation_share = 10", "`validation_share`: expected a share.*got 10"),
        ("width = 250", "`width`: expected a multiple of 8.*such as 256, got 250"),
        ("b1 = 1.0", "`b1`: expected a decay"),
        ("seed = 4294967296", "`seed`: expected a number below"),
        ("steps = 3\nwidth 4", "expected TOML .*line 2"),
        ('run = ".."', "`run`: expected the name of a folder"),
        ('run = "a/b"', "`run`: expected the name of a folder"),
        ('update_interval = "often"', 'expected a whole number or "auto", got .often'),
        ("update_interval = true", 'a whole number or "auto", got True'),
        ("select_interval = 64.0", 'a whole number or "auto" or "epoch", got 64.0'),
        ("auto_window_max_interval = 0", "AutoWindow.max_interval.*got 0"),
        ("auto_window_share = 99", "AutoWindow.share.*got 99"),
        ("auto_select_keep = -0.1", "AutoSelect.keep.*got -0.1"),
        ("full_warm_up_share = 1", "`full_warm_up_share`: expected a share of the steps .*got 1"),
        ("full_warm_up_share = nan", "`full_warm_up_share`: expected a share .*got nan"),
        (
            "full_warm_up_share = 0.05\nfull_warm_up_rounds = 20",
            "`full_warm_up_share`: expected it or `full_warm_up_rounds`, got both: 0.05 and 20",
        ),
        ("warmup_share = 0.1\nwarmup_steps = 3", "`warmup_share`: expected it or `warmup_steps`"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_the_file_and_a_remedy(tmp_path, text, expected):
    path = config_file(tmp_path, text)
    with pytest.raises(SettingsError, match=f"(?s)^{re.escape(str(path))}.*{expected}"):
        load_settings(path)


def test_a_missing_file_is_an_error_that_names_the_one_that_was_meant(tmp_path):
    config_file(tmp_path, "")
    with pytest.raises(SettingsError, match="config file .*No such file.*Did you mean job"):
        load_settings(tmp_path / "jobb.toml")
    with pytest.raises(SettingsError, match="config file .*directory"):
        load_settings(tmp_path)


def test_a_whole_number_becomes_a_float_and_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "windows.toml"
    path.write_text("weight_decay = 1\nmax_grad_norm = 2", encoding="utf-8-sig")
    settings = load_settings(path)
    assert isinstance(settings.weight_decay, float)
    assert isinstance(settings.max_grad_norm, float)


def test_the_command_line_goes_over_the_file_and_the_file_over_the_defaults(tmp_path):
    text = 'steps = 30\nlearning_rate = 0.5\nmax_grad_norm = 1.0\nselect_interval = "auto"'
    path = config_file(tmp_path, text)
    given = [str(path), "--learning-rate", "1e-2", "--max-grad-norm", "None", "--no-rolling"]
    given += ["--update-interval", "auto", "--mesh", "tensor=8"]
    command = read_command_line(given, program="train")
    assert command.settings == Settings(
        steps=30,
        learning_rate=1e-2,
        max_grad_norm=None,
        rolling=False,
        select_interval="auto",
        update_interval="auto",
        mesh="tensor=8",
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "-5"], "`steps`: expected a finite number of at least 0, got -5."),
        (["--learning-rate", "nan"], "`learning_rate`: expected"),
        (["--run", "../../evil"], "`run`: expected the name of a folder in output_dir"),
        (["--timeline", "x.bmp"], "`--timeline`: expected a file that ends in"),
        (["--steps", "ten"], "--steps: no type matching"),
        (["--optimizer", "sgd"], "invalid choice 'sgd' for argument '--optimizer'"),
        (["--stepz", "4"], "unknown option --stepz. Did you mean --steps"),
        (["--select-interval", "often"], "{auto,epoch}"),
        (["--gradient-accumulation-steps", "4"], "Did you mean --micro-batches?"),
        (["--qqq"], "unknown option --qqq. All are in"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_a_mistake_in_the_arguments_is_one_line_and_code_2(arguments, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        sys.exit(finetune.main([str(QUICKSTART), *arguments]))
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert expected in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"output_dir": 'a "b" \\ c', "select_interval": 8, "learning_rate": 1e-9},
        {"update_interval": "auto", "auto_window_share": 0.5, "auto_window_max_interval": 3},
        {"select_interval": "auto", "auto_select_keep": 1.0, "auto_select_max_windows": 2},
        {"select_interval": "epoch", "full_warm_up_share": 0.05},
        {"window_scaling": "none", "staleness": 2, "rolling": False},
        {"window_scaling": 0.5, "provisional_share": 0.25},
    ],
    ids=lambda changed: ", ".join(changed),
)
def test_settings_written_as_toml_read_back_as_the_same_settings(tmp_path, changed):
    settings = Settings(**changed)
    assert load_settings(config_file(tmp_path, to_toml(settings))) == settings


@pytest.mark.parametrize(
    ("words", "window", "select"),
    [
        ({"update_interval": 3, "select_interval": 12}, 3, 12),
        ({"update_interval": "auto", "select_interval": "auto"}, AutoWindow(), AutoSelect()),
        (
            {
                "update_interval": "auto",
                "auto_window_max_interval": 5,
                "auto_window_share": 0.5,
                "select_interval": "auto",
                "auto_select_keep": 0.5,
                "auto_select_max_windows": 7,
            },
            AutoWindow(5, 0.5),
            AutoSelect(0.5, 7),
        ),
        ({"update_interval": 3, "select_interval": "epoch"}, 3, EpochSelect(6)),
    ],
    ids=str,
)
def test_words_for_intervals_become_the_rules_of_the_library(words, window, select):
    tx = make_optimizer(Settings(steps=9, **words), steps_per_epoch=6)
    schedule = find_state(tx.init({"kernel": jnp.ones((4, 4))})).schedule
    assert (schedule.window, schedule.select) == (window, select)


@pytest.mark.parametrize(
    ("share", "steps", "rounds"),
    [(0.0, 400, 0), (0.05, 400, 20), (0.05, 401, 21), (0.07, 100, 7), (1e-3, 10, 1)],
)
def test_a_share_of_full_warm_up_is_one_of_the_steps_rounded_up(share, steps, rounds):
    assert Settings(full_warm_up_share=share, steps=steps).warm_up_rounds == rounds


def test_a_warm_up_may_be_a_share_of_the_steps_or_a_number_of_them():
    assert Settings(warmup_share=0.1, steps=45).learning_rate_warm_up == 5
    assert Settings(warmup_steps=3).learning_rate_warm_up == 3
    assert Settings(full_warm_up_rounds=3).warm_up_rounds == 3


@pytest.mark.parametrize("argv", [[], ["--steps", "3"]], ids=["nothing", "an option first"])
def test_a_command_without_a_config_file_says_how_to_call_it(argv, capsys):
    assert finetune.main(argv) == 2
    assert "expected the path of a config file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"unknown": 1}, "`unknown`"),
        ({"corpus_megabytes": 1e-6}, "expected text of at least two files.*corpus_megabytes"),
        ({"sequence_length": 10_000_000}, "expected text for at least one window"),
        ({"topk_ratio": 1.5}, "topk_ratio.*got 1.5"),
        ({"select_interval": 3}, "select_interval"),
    ],
    ids=str,
)
def test_a_mistake_ends_the_command_with_one_message_code_2_and_no_folder(
    tmp_path, capsys, changed, expected
):
    assert finetune.main(tiny_command(tmp_path, **changed)) == 2
    message = capsys.readouterr().err
    assert re.match(f"(?s)error: .*{expected}", message)
    assert "Traceback" not in message
    assert not (tmp_path / "runs").exists()


def test_an_output_dir_that_is_a_file_ends_the_command_with_code_2(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    command = tiny_command(tmp_path, output_dir=str(tmp_path / "taken"), optimizer="adamw")
    assert finetune.main(command) == 2
    assert "--output-dir" in capsys.readouterr().err


# --- text -----------------------------------------------------------------------------------


def library_split(seed: int) -> standard_library.Split:
    root = standard_library.folder()
    files = standard_library.source_files(root)
    return standard_library.split_files(
        root, files, seed=seed, max_bytes=500_000, validation_share=0.2
    )


def test_the_split_follows_the_seed_and_no_file_is_on_both_sides():
    split = library_split(0)
    assert split == library_split(0) != library_split(4)
    assert set(split.train).isdisjoint(split.validation)
    assert split.train
    assert split.validation
    folders = {part for path in split.train + split.validation for part in path.parts[:-1]}
    assert folders.isdisjoint(standard_library.SKIPPED_FOLDERS)


def test_windows_overlap_by_one_byte_so_that_each_byte_is_predicted_once(tmp_path):
    (tmp_path / "a.py").write_bytes(b"abcde")
    (tmp_path / "b.py").write_bytes(b"fg")
    windows = standard_library.windows(tmp_path, (Path("a.py"), Path("b.py")), sequence_length=4)
    assert [bytes(w) for w in windows] == [b"\0abcd", b"de\0fg"]


# --- model ----------------------------------------------------------------------------------


def tiny_model(optimizer="zenflow"):
    sizes = Settings(width=16, layers=1, heads=2, ffn=24, optimizer=optimizer)
    return models.builder(sizes)()


@pytest.mark.slow
def test_weights_of_all_optimizers_start_from_the_same_draw():
    windows = jax.random.randint(jax.random.key(1), (3, 9), 0, 256)
    rounded, master = tiny_model("zenflow"), tiny_model("adamw")
    for low, high in zip(
        jax.tree.leaves(nnx.state(rounded)), jax.tree.leaves(nnx.state(master)), strict=True
    ):
        assert (low.dtype, high.dtype) == ([jnp.float32, jnp.bfloat16][low.ndim == 2], jnp.float32)
        np.testing.assert_array_equal(low, high.astype(low.dtype))
    # Both multiply the same bfloat16 numbers, so this is equality and not nearness.
    np.testing.assert_array_equal(rounded(windows), master(windows))


# --- optimizers -----------------------------------------------------------------------------


def test_the_adamw_job_keeps_updates_that_bfloat16_weights_would_lose():
    # Near 1 a bfloat16 steps by 2**-8. A hundred updates of 1e-4 must still add up.
    settings = Settings(optimizer="adamw", learning_rate=1e-4, weight_decay=0.0, steps=10**9)
    tx, grads = make_optimizer(settings), {"w": jnp.ones((4, 4))}
    params = {"w": jnp.ones((4, 4), weight_dtype("adamw", "bfloat16"))}
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(100):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["w"], jnp.full((4, 4), 0.99), atol=1e-4)


def test_weight_decay_spares_the_norms():
    model = tiny_model()
    mask = jax.tree.leaves(decayed(nnx.as_pure(nnx.state(model, nnx.Param))))
    assert mask == [leaf.ndim == 2 for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


# --- meter ----------------------------------------------------------------------------------


def meter_of(log_every, stats=None, **more):
    return Meter(log_every=log_every, steps=20, stats=stats, **more)


def metered(meter, loss, skipped=0):
    """A step of ten tokens."""
    return meter.step(jnp.float32(loss), skipped=jnp.int32(skipped), tokens=10)


def test_the_meter_reads_a_loss_only_when_it_is_an_interval_old():
    meter = meter_of(2)
    meter.start()
    rows = [metered(meter, i) for i in range(1, 8)]
    assert [row and (row.step, row.loss) for row in rows] == [
        None, None, None, (2, 1.5), None, (4, 3.5), None,
    ]  # fmt: skip
    assert [(row.step, row.loss) for row in meter.drain()] == [(6, 5.5), (7, 7.0)]
    assert meter.drain() == []


def test_the_meter_counts_steps_that_are_done_since_the_start(monkeypatch):
    seconds = iter([0, 1, 5, 6, 7])
    monkeypatch.setattr("train.meter.time.perf_counter", lambda: next(seconds))
    waited = iter([0.0, 0.25, 0.25, 0.25, 0.25])
    meter = meter_of(2, stats=lambda: EngineStats(wait_s=next(waited)))
    meter.start()  # at second 0
    assert [metered(meter, i) for i in range(3)] == [None] * 3
    with meter.paused():  # from second 1 to 5, which do not count
        pass
    # At second 6 the first four losses exist: four steps of ten tokens.
    assert metered(meter, 3)[:5] == (2, 0.5, 20.0, 0.125, 0)
    assert meter.since_start() == (3, 40 / 3, 0.25 / 3)


def test_the_loss_of_an_interval_is_of_its_steps_that_were_not_skipped():
    figures = [(1, 0), (jnp.nan, 1), (3, 1), (jnp.inf, 2), (9, 3), (jnp.nan, 4), (7, 4)]
    meter = meter_of(2)
    meter.start()
    rows = [metered(meter, *figures[0])]
    # A run that is stopped and goes on, in mid-interval, gives the same rows.
    for i, taken in enumerate(figures[1:], start=1):
        meter = meter_of(2, steps_done=i, state=meter.state())
        meter.start()
        rows.append(metered(meter, *taken))
    rows = [row for row in [*rows, *meter.drain()] if row]
    assert [(row.step, row.skipped) for row in rows] == [(2, 1), (4, 1), (6, 2), (7, 0)]
    np.testing.assert_equal([row.loss for row in rows], [1, 3, np.nan, 7])


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (5, 1), (1, 5), (10, 3)])
def test_a_run_goes_on_with_rows_of_other_intervals(before, after):
    rows, meter, done = [], None, 0
    for end, every in ((9, before), (20, after)):
        meter = meter_of(every, EngineStats, steps_done=done, state=meter and meter.state())
        meter.start()
        rows += [metered(meter, step) for step in range(done + 1, end + 1)]
        rows += meter.catch_up() if end < 20 else meter.drain()
        done = end
    rows = [row for row in rows if row]
    steps = list(range(before, 10, before))
    steps += [n for n in range(max([0, *steps]) + 1, 21) if n % after == 0 or n == 20]
    assert [(row.step, row.reselections) for row in rows] == [(step, 0) for step in steps]
    means = [np.mean(range(a + 1, b + 1)) for a, b in zip([0, *steps], steps, strict=False)]
    np.testing.assert_allclose([row.loss for row in rows], means)


def test_the_schedule_of_a_row_is_of_its_interval_and_carries_a_length_on():
    now = EngineStats()
    meter = meter_of(2, stats=lambda: now)
    meter.start()
    rows = []
    for step, lengths, more in (
        (2, {}, {}),
        (4, {1: 1, 3: 1}, {"reselections": 1}),
        (6, {1: 1, 3: 1}, {"reselections": 1}),
        (8, {1: 1, 3: 2}, {"reselections": 2, "kept_share": 0.5}),
    ):
        now = EngineStats(steps=step, windows=sum(lengths.values()), window_lengths=lengths, **more)
        rows += [metered(meter, 1.0), metered(meter, 1.0)]
    rows = [row[5:] for row in [*rows, *meter.drain()] if row]
    assert rows == [
        (None, None, 0),  # no window has closed yet
        (2.0, None, 1),
        (2.0, None, 1),  # none has closed in these steps: as before
        (3.0, 0.5, 2),
    ]


# --- steps that are skipped -----------------------------------------------------------------


def test_steps_that_are_skipped_change_nothing_in_adamw_and_are_counted():
    tx = make_optimizer(Settings(optimizer="adamw", max_grad_norm=1.0, steps=9))
    params = {"kernel": jnp.ones((2, 3)), "scale": jnp.ones(3)}
    update = jax.jit(tx.update)
    good = jax.tree.map(jnp.sin, params)
    _, state = update(good, tx.init(params), params)
    for bad in (jnp.nan, jnp.inf, jnp.float32(3e38)):  # finite, but its square is not
        updates, after = update(good | {"scale": params["scale"] * bad}, state, params)
        assert all(not np.any(x) for x in jax.tree.leaves(updates))
        assert int(skipped_steps(after)) == int(skipped_steps(state)) + 1
        jax.tree.map(np.testing.assert_array_equal, after.inner, state.inner)
        state = after
    clipped = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate(1e-3, 0, 9), weight_decay=0.01, mask=decayed),
    )
    theirs = clipped.init(params)
    for _ in range(2):
        expected, theirs = jax.jit(clipped.update)(good, theirs, params)
    ours, _ = update(good, state, params)
    jax.tree.map(np.testing.assert_array_equal, ours, expected)


def counted(watch, totals):
    for total in totals:
        watch.step(jnp.int32(total))
    watch.finish()


def test_a_run_stops_after_so_many_skipped_steps_in_a_row():
    words = {"most": 3, "first": 1, "skipped": 0, "remedy": "Look there."}
    with pytest.raises(NotFiniteError, match="none in steps 4 to 6, .*all skipped.*Look there"):
        counted(SkippedSteps(**words), [0, 1, 1, 2, 3, 4, 5, 6])
    watch = SkippedSteps(**words)
    counted(watch, [1, 2, 2, 3, 4, 4])
    assert watch.total == 4


def test_a_run_of_skipped_steps_alone_is_an_error_however_short():
    words = {"most": 10, "skipped": 5, "remedy": "Look there."}
    with pytest.raises(NotFiniteError, match="none in steps 8 to 9"):
        counted(SkippedSteps(first=8, **words), [6, 7])
    counted(SkippedSteps(first=8, **words), [])  # of no step, nothing is known


# --- the command ----------------------------------------------------------------------------


def metrics(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def run_folders(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "runs").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "zenflow"])
def test_the_command_trains_and_leaves_its_record(tmp_path, capsys, optimizer):
    command = tiny_command(tmp_path, optimizer="adamw", learning_rate=1e-2)
    picture = tmp_path / "timeline.svg"
    options = {"adamw": [], "zenflow": ["--timeline", str(picture)]}[optimizer]
    assert finetune.main([*command, "--optimizer", optimizer, *options]) == 0

    assert run_folders(tmp_path) == [f"001-{optimizer}"]
    folder = tmp_path / "runs" / f"001-{optimizer}"
    rows = metrics(folder)
    assert [int(row["step"]) for row in rows] == [4, 8, 12, 13]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list(folder.glob("events.out.tfevents.*"))
    assert load_settings(folder / "settings.toml").optimizer == optimizer

    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == TINY["steps"]
    assert summary["validation_after"]["loss"] < summary["validation_before"]["loss"]
    assert 0 <= summary["wait_share"] <= 1
    # adamw has nothing on the host; zenflow sends at least the bfloat16 gradient of most channels.
    moved = summary["bytes_per_parameter_and_step"]
    assert (moved == 0) if optimizer == "adamw" else (1 < moved < 4)
    shown = capsys.readouterr().out
    assert f"validation after {TINY['steps']} steps: loss" in shown
    # Signs of life, and how long it will be.
    assert re.search(r"compiling the training step\nstep  1/13  compiled, \d+\.\d s\n", shown)
    assert re.search(r"step  4/13 .* \d:\d\d:\d\d left\n", shown)
    assert "bytes moved per parameter and step" in shown

    of_schedule = ("window_length", "kept_share", "reselections")
    recorded = {tuple(row[name] for name in of_schedule) for row in rows}
    figures = ("windows", "mean_window_length", "reselections", "kept_share")
    if optimizer == "adamw":
        assert recorded == {("", "", "")}
        assert [summary[name] for name in figures] == [None] * 4
        assert "window" not in shown
    else:
        # Leaves take turns in two groups, one of which has a first window of one step.
        assert recorded == {("1.75", "", "2"), ("2.0", "", "2")}
        # The other's seventh window has the thirteenth step alone.
        assert [summary[name] for name in figures] == [14, 13 / 7, 2, None]
        assert "mean window length" in shown
        assert f"timeline of the last steps: {picture}" in shown
        assert "<svg" in picture.read_text(encoding="utf-8")[:1000]


@pytest.mark.slow
def test_windows_and_selections_that_adapt_are_in_the_metrics_and_the_summary(tmp_path, capsys):
    changed = {"update_interval": "auto", "select_interval": "auto", "full_warm_up_share": 0.1}
    assert finetune.main(tiny_command(tmp_path, auto_window_max_interval=4, **changed)) == 0
    folder = tmp_path / "runs" / "001-zenflow"
    rows = metrics(folder)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))

    # Two steps of warm-up are windows of one step, and the fourth step's is no longer than two.
    assert 1 <= float(rows[0]["window_length"]) <= 4 / 3
    assert all(1 <= float(row["window_length"]) <= 4 for row in rows)
    assert 2 + 11 / 4 <= summary["windows"] <= 2 + 11
    np.testing.assert_allclose(summary["windows"] * summary["mean_window_length"], TINY["steps"])

    selections = [int(row["reselections"]) for row in rows]
    assert selections == sorted(selections)
    assert 1 <= selections[0]
    assert selections[-1] == summary["reselections"] <= summary["windows"]
    assert 0 < float(rows[-1]["kept_share"]) <= 1
    assert float(rows[-1]["kept_share"]) == summary["kept_share"]
    assert "score kept" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("no_picture")
def test_channels_are_selected_at_the_end_of_every_epoch(tmp_path):
    changed = {"corpus_megabytes": 0.02, "steps": 9, "log_every": 1, "update_interval": 1}
    root = standard_library.folder()
    split = standard_library.split_files(
        root, standard_library.source_files(root), seed=0, max_bytes=20_000, validation_share=0.1
    )
    windows = standard_library.windows(root, split.train, TINY["sequence_length"])
    # So large that it takes four batches, the last of them not full, whatever this Python's text.
    changed["batch_size"] = len(windows) // 4 + 1
    assert Batches(Windows(windows), batch_size=changed["batch_size"], seed=0).per_epoch == 4

    assert finetune.main(tiny_command(tmp_path, select_interval="epoch", **changed)) == 0
    rows = metrics(tmp_path / "runs" / "001-zenflow")
    # Also after the first step, because the channels that a run starts with were chosen by nobody.
    assert [int(row["reselections"]) for row in rows] == [1, 1, 1, 2, 2, 2, 2, 3, 3]


@pytest.mark.parametrize("name", ["timeline.gif", "timeline", "none/timeline.png"])
def test_a_file_for_the_timeline_that_cannot_be_is_refused_at_the_start(tmp_path, name):
    with pytest.raises(SettingsError, match="`--timeline`: expected a file that ends in .*folder"):
        Start(timeline=str(tmp_path / name))


def test_adamw_has_no_timeline(tmp_path, capsys):
    command = [*tiny_command(tmp_path, optimizer="adamw"), "--timeline", str(tmp_path / "x.png")]
    assert finetune.main(command) == 2
    message = capsys.readouterr().err
    assert re.search("`--timeline`: expected an optimizer with .*got adamw", message)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_run_whose_steps_are_all_skipped_ends_with_an_error_and_no_model(tmp_path, capsys):
    command = tiny_command(tmp_path, learning_rate=1e30, max_skipped=5, log_every=2, save_every=2)
    assert finetune.main(command) == 2
    shown = capsys.readouterr()
    assert re.search(
        r"error: expected gradients .* got none in steps \d+ to \d+.*1e\+30", shown.err
    )
    assert "2 skipped" in shown.out
    folder = tmp_path / "runs" / "001-zenflow"
    # The first step has made weights of which nothing can be computed.
    assert [row["skipped"] for row in metrics(folder)][:2] == ["1", "2"]
    assert "step 2 was skipped: no checkpoint of it" in shown.out
    assert not (folder / "checkpoints").exists()
    assert not (folder / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("no_picture")
def test_the_model_of_keep_best_is_that_of_the_step_that_did_best(tmp_path, capsys, monkeypatch):
    losses = {0: 5.0, 3: 4.0, 6: 1.0, 9: 2.0, 12: 3.0, 13: 2.0}
    figures = ({"loss": loss} for loss in losses.values())
    monkeypatch.setattr(job, "make_validate", lambda *_: lambda _: next(figures))
    command = tiny_command(tmp_path, optimizer="adamw", save_every=3, keep_best=True, keep=2)
    assert finetune.main(command) == 0
    folder = tmp_path / "runs" / "001-adamw"
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    with open(folder / "validation.csv", newline="", encoding="utf-8") as file:
        written = {int(row["step"]): float(row["value"]) for row in csv.DictReader(file)}
    assert written == losses
    assert summary["best_step"] == 6
    assert "model.safetensors is that of step 6, which did best" in capsys.readouterr().out
    assert_weights_of_checkpoint(folder, 6, folder)

    # Also of the others, by themselves.
    command += ["--run", "001-adamw", "--export"]
    for which, step in (("best", 6), ("12", 12)):
        target = tmp_path / which
        assert finetune.main([*command, which, str(target)]) == 0
        assert_weights_of_checkpoint(folder, step, target)
    assert finetune.main([*command, "7", str(tmp_path / "new")]) == 2
    expected = r"`--export`: expected one of .* \(6, 12, 13\), got 7"
    assert re.search(expected, capsys.readouterr().err)
    assert finetune.main([*command, "best", str(target)]) == 2
    assert "expected a new or an empty folder" in capsys.readouterr().err
    assert finetune.main([*command, "best", str(tmp_path / "new"), "--width", "32"]) == 2
    expected = "`width`: expected 16, .*got 32. Pass --width 16, or give the settings.toml"
    assert re.search(expected, capsys.readouterr().err)

    # The end has no checkpoint; a run without keep_best, or one that has gone on since, may be best
    # there or not.
    for best_step, loss, step in ((None, 0.5, None), (13, 0.5, None), (13, 2.0, 6)):
        after = {"best_step": best_step, "validation_after": {"loss": loss}}
        (folder / "summary.json").write_text(json.dumps(summary | after), encoding="utf-8")
        target = tmp_path / f"{best_step} {loss}"
        assert finetune.main([*command, "best", str(target)]) == 0
        said = "has the model of" if step is None else f"has the weights of checkpoint {step} "
        assert said in capsys.readouterr().out.replace("\n", " ")


def assert_weights_of_checkpoint(run, step, where):
    arrays = kill_test.final_arrays(run / "checkpoints" / str(step))
    for name, x in load_file(where / "model.safetensors").items():
        np.testing.assert_array_equal(x, arrays[f"params.{name}"])


@pytest.mark.slow
@pytest.mark.usefixtures("no_picture")
def test_windows_of_one_step_without_overlap_train_like_adamw(tmp_path):
    command = tiny_command(tmp_path, learning_rate=1e-2, update_interval=1, staleness=0)
    losses = []
    for optimizer in ("adamw", "zenflow"):
        assert finetune.main([*command, "--optimizer", optimizer]) == 0
        (summary,) = (tmp_path / "runs").glob(f"*-{optimizer}/summary.json")
        losses.append(json.loads(summary.read_text(encoding="utf-8"))["validation_after"]["loss"])
    np.testing.assert_allclose(*losses, rtol=0, atol=SAME_TRAINING_ATOL)


def test_a_folder_with_files_that_are_no_runs_is_not_written_to(tmp_path, capsys):
    for number, name in enumerate(("settings.toml", "loss.png", "model.safetensors")):
        folder = tmp_path / "runs" / str(number)
        folder.mkdir(parents=True)
        (folder / name).write_text("precious")
        assert finetune.main([*tiny_command(tmp_path), "--run", folder.name]) == 2
        expected = f"`run`: expected a new folder or one of a run, got {folder}, .* a {name}"
        assert re.search(expected, capsys.readouterr().err)
        assert [(p.name, p.read_text()) for p in folder.iterdir()] == [(name, "precious")]


@pytest.mark.slow
@pytest.mark.usefixtures("no_picture")
def test_files_of_the_user_beside_those_of_a_run_stay(tmp_path):
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    precious = [run / f"{name}.part" for name in WRITTEN] + [tmp_path / "2.part", run / "model.old"]
    precious += [tmp_path / "best.part"]
    for path in precious:
        path.write_text("precious")
    command = [*tiny_command(tmp_path, optimizer="adamw", steps=2), "--run", "a"]
    assert finetune.main(command) == 0
    for which in ("2", "best"):
        assert finetune.main([*command, "--export", which, str(tmp_path / which)]) == 0
    assert {path.read_text() for path in precious} == {"precious"}
    assert not [path for path in tmp_path.rglob(".*")]


def test_every_run_gets_a_folder_of_its_own_with_the_next_number(tmp_path):
    runs = tmp_path / "runs"
    (runs / "010-adamw").mkdir(parents=True)
    (runs / "notes").mkdir()
    made = [new_run_folder(runs, label).name for label in ("zenflow", "zenflow", "adamw")]
    assert made == ["011-zenflow", "012-zenflow", "013-adamw"]
