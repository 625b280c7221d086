"""Makes `tests/fixtures/saved/VERSION.zip`: small checkpoints as this version writes them.

    python -m tests.make_saved_fixtures

Run it once for each release that writes another layout, when nothing more will change, and keep
what is there of earlier ones: `tests/test_saved_layout.py` goes on from all of them. What is below
is what the runs were, so none of it may change.

Each checkpoint is of the midst of windows, with updates on their way where they may be.

    files     parameters, optimizer state, and the engine's state by `EngineSave`
    tree      the same run at the same step, all in one tree, with `engine.state()`
    compact   as `files`, with moments in 8 bits and gradients that are added up on the device
    in_graph  parameters and optimizer state of `offload=False`, with an adaptive schedule
    fit       as `files`, after the windows have become shorter than they were at first
"""

import dataclasses
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

import zenflow_jax
from tests.reference import Settings
from tests.runs import Leaf, Leaves, Plan, Training
from zenflow_jax import AutoSelect, AutoWindow, FitWindow

FOLDER = Path(__file__).parent / "fixtures" / "saved"
SAVED = 11  # the step
PLAN = Plan(19, bad=(8, 13), flush_at=(17,))
SETTINGS = Settings(
    b1=0.9,
    b2=0.99,
    eps=1e-8,
    weight_decay=0.1,
    topk_ratio=0.3,
    update_interval=4,
    select_interval=8,
    full_warm_up_rounds=2,
    overlap_step=True,
    rolling=True,
    staleness=2,
    window_scaling=0.5,
    max_grad_norm=5.0,
    send_gradients="during_step",
)
# A resident leaf, masters beside bfloat16, a float32 leaf that is its own master, a stack.
LEAVES: Leaves = (
    Leaf("bias", (5,), None, "bfloat16", decay=False),
    Leaf("columns", (4, 10), -1, "bfloat16"),
    Leaf("rows", (12, 5), -2, "float32"),
    Leaf("stack", (2, 7, 3), -2, "bfloat16"),
)
FEW: Leaves = LEAVES[:2]


def numbers(leaves: Leaves, step: int) -> dict[str, np.ndarray]:
    """Float64 numbers of many sizes, the same ones on every machine: whole numbers made them."""
    found = {}
    for i, leaf in enumerate(leaves):
        size = np.arange(np.prod(leaf.shape), dtype=np.uint32)
        mixed = (size * 40503 + i * 7919 + step * 104729) * np.uint32(2654435761)
        mixed = (mixed ^ (mixed >> 15)) * np.uint32(2246822519)
        mixed = (mixed ^ (mixed >> 13)) * np.uint32(3266489917)
        mixed ^= mixed >> 16
        fractions = (mixed >> 8) / 2**23 - 1
        found[leaf.name] = np.ldexp(fractions, (mixed & 3).astype(np.int32) - 1).reshape(leaf.shape)
    return found


def initial(leaves: Leaves, seed: int = 0) -> dict[str, np.ndarray]:
    """The parameters before the first step."""
    return in_dtypes(leaves, numbers(leaves, seed))


def gradients(leaves: Leaves, step: int, seed: int = 0, bad: bool = False) -> dict[str, np.ndarray]:
    """Those of a step."""
    found = numbers(leaves, seed + step)
    if bad:
        found["columns"][1, 2] = np.nan
    return in_dtypes(leaves, found)


def in_dtypes(leaves: Leaves, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {x.name: np.asarray(values[x.name], np.dtype(x.dtype)) for x in leaves}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run whose checkpoint is kept."""

    leaves: Leaves = LEAVES
    settings: Settings = SETTINGS
    offload: bool = True
    host_state: str = "float32"
    plan: Plan = PLAN
    saved: int = SAVED  # the step

    def begin(self) -> Training:
        """The run before its first step."""
        engine: dict[str, Any] = {}
        if self.offload:
            engine = {"threads": 1, "host_kernel": "numpy", "host_state": self.host_state}
        made_by = {"gradients": gradients, "initial": initial}
        return Training(self.leaves, self.settings, offload=self.offload, **made_by, **engine)


RUNS = {
    "files": Run(),
    "tree": Run(),
    "compact": Run(
        FEW, dataclasses.replace(SETTINGS, send_gradients="per_window"), host_state="compact"
    ),
    "in_graph": Run(
        FEW,
        dataclasses.replace(
            SETTINGS,
            update_interval=AutoWindow(5, 0.4),
            select_interval=AutoSelect(0.6, 3),
            staleness=None,
        ),
        offload=False,
    ),
    "fit": Run(
        FEW,
        dataclasses.replace(
            SETTINGS,
            update_interval=FitWindow(2, after=16),
            select_interval=16,
            staleness=None,
        ),
        plan=Plan(24, bad=(18,), flush_at=(21,)),
        saved=19,
    ),
}


def go(training: Training, plan: Plan, until: int) -> None:
    """Steps of the plan, up to this one."""
    while training.t < until:
        training.step(bad=training.t + 1 in plan.bad)
        training.exchange()
        if training.t in plan.flush_at:
            training.flush()


def items(name: str, training: Training) -> dict[str, Any]:
    """What orbax is told to save of a run, by item."""
    params, opt_state, engine = training.params, training.state, training.engine
    if name == "tree":
        tree = {"params": params, "opt_state": opt_state, "engine": engine.state()}
        return {"run": ocp.args.PyTreeSave(tree)}
    found: dict[str, Any] = {
        "params": ocp.args.StandardSave(params),
        "opt_state": ocp.args.StandardSave(opt_state),
    }
    return found if engine is None else found | {"engine": zenflow_jax.EngineSave(engine)}


def main() -> None:
    path = FOLDER / f"{zenflow_jax.__version__}.zip"
    if path.exists():
        raise SystemExit(
            f"expected no checkpoints of this version, got {path}. What is released stays as it "
            "is; what is not, delete."
        )
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        with zipfile.ZipFile(path, "x", zipfile.ZIP_DEFLATED) as file:
            for found in sorted(x for x in folder.rglob("*") if x.is_file()):
                file.write(found, found.relative_to(folder))


def write(folder: Path) -> None:
    """Saves each run in the folder of its name."""
    for name, run in RUNS.items():
        with run.begin() as training, ocp.CheckpointManager(folder / name) as manager:
            go(training, run.plan, run.saved)
            manager.save(run.saved, args=ocp.args.Composite(**items(name, training)))
            manager.wait_until_finished()


def restored(name: str, folder: Path) -> tuple[Any, Any, Any]:
    """Parameters, optimizer state and engine state of a run, which `write` has saved there."""
    saved = RUNS[name].saved
    with RUNS[name].begin() as fresh, ocp.CheckpointManager(folder / name) as manager:
        params, opt_state = jax.tree.map(
            ocp.utils.to_shape_dtype_struct, (fresh.params, fresh.state)
        )
        if name == "tree":
            engine = zenflow_jax.abstract_engine_state(fresh.state)
            tree = {"params": params, "opt_state": opt_state, "engine": engine}
            args = ocp.args.PyTreeRestore(
                tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)
            )
            found = manager.restore(saved, args=ocp.args.Composite(run=args)).run
            return found["params"], found["opt_state"], found["engine"]
        kinds: dict[str, Any] = {
            "params": ocp.args.StandardRestore(params),
            "opt_state": ocp.args.StandardRestore(opt_state),
        }
        if fresh.engine is not None:
            kinds["engine"] = zenflow_jax.EngineRestore()
        found = manager.restore(saved, args=ocp.args.Composite(**kinds))
        return found.params, found.opt_state, found.get("engine")


if __name__ == "__main__":
    main()
