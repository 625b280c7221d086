"""The tests that optax's wheel ships for its own optimizers, run on `zenflow(..., offload=False)`.

Nothing of them is copied. optax writes its list of optimizers into its test classes while these
are made, so the module is read from the installed wheel, the list in its syntax tree is exchanged
for `CASES`, and the result is executed under a name of its own. Every case that cannot pass is in
`EXCEPTIONS` with its reason.

Checked with optax 0.2.8.
"""

import ast
import importlib.util
import inspect
import re
import types
import unittest
from pathlib import Path

import jax
import optax
import pytest

import zenflow_jax

# Both batteries have targets of one axis, which are resident; the contributed optimizers' also has
# matrices of two rows, one of which is deferred here.
SETTINGS = [
    {"topk_ratio": 0.5, "update_interval": 4, "select_interval": 4},
    {"topk_ratio": 0.0, "update_interval": 2, "full_warm_up_rounds": 3, "max_grad_norm": 1.0},
]


def cases(learning_rate, settings=SETTINGS, **more):
    return [
        {"opt_name": "zenflow", "opt_kwargs": {**kwargs, **fixed}, **more}
        for kwargs in settings
        for fixed in [{"learning_rate": learning_rate, "offload": False}]
    ]


# For each battery: its module, its test class, and what replaces its lists of optimizers.
BATTERIES = {
    "alias": (
        "optax._src.alias_test",
        "AliasTest",
        # Where all is resident, the first settings leave nothing of zenflow's but its AdamW, which
        # the others have as well.
        {"_OPTIMIZERS_UNDER_TEST": cases(1e-1, SETTINGS[1:])},
    ),
    "contrib": (
        "optax.contrib._common_test",
        "ContribTest",
        dict.fromkeys(
            ["_ALL_OPTIMIZERS_UNDER_TEST", "_MAIN_OPTIMIZERS_UNDER_TEST"],
            # At 1e-2 one unit in the last place of a parameter would be more than the 1e-5 of the
            # update that two ways to inject the same numbers may differ by. Not as what optax's
            # wrappers wrap: tests of `mechanize` and `schedule_free` never apply the update.
            cases(3e-2, wrapper_name=None, wrapper_kwargs=None),
        ),
    ),
}

EXCEPTIONS = [
    # The update is float32 whatever the leaf: only so does adding it to a low-precision parameter
    # give the cast of the float32 master.
    r"test_preserve_dtype\d+ .*'bfloat16'",
    r"test_state_shape_dtype_shard_stability\d+ .*numpy\.(bfloat16|float16)",
    # All arithmetic is float32 and real; other leaves are refused.
    r"test_\w+\d+ .*numpy\.(float64|complex64|complex128)",
    # It is about `mu_dtype` of three optimizers of optax's.
    r"test_explicit_dtype\d+ ",
]


def inject_hyperparams(factory, static_args=()):
    """As zenflow's users must call it."""
    ours = [a for a in zenflow_jax.STATIC_ARGS if a in inspect.signature(factory).parameters]
    return optax.inject_hyperparams(factory, (*static_args, *ours))


class Exchange(ast.NodeTransformer):
    """Gives module-level names other values, and leaves out what is not needed."""

    def __init__(self, values, keep_class):
        self.values = {name: ast.parse(repr(x), mode="eval").body for name, x in values.items()}
        self.exchanged = set()
        self.keep_class = keep_class

    def visit_Assign(self, node):
        (target,) = node.targets
        if isinstance(target, ast.Name) and target.id in self.values:
            self.exchanged.add(target.id)
            node.value = self.values[target.id]
        return node

    def visit_ImportFrom(self, node):
        # Only the L-BFGS tests need scikit-learn.
        return None if node.module == "sklearn" else node

    def visit_ClassDef(self, node):
        return node if node.name == self.keep_class else None


def load(module_name, class_name, values):
    """The module's test class, made with `values`."""
    spec = importlib.util.find_spec(module_name)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    exchange = Exchange(values, class_name)
    tree.body = [new for node in tree.body if (new := exchange.visit(node)) is not None]
    assert exchange.exchanged == set(values), f"{module_name} names its optimizers otherwise"

    # Not in sys.modules: nobody else must get this version.
    module = types.ModuleType(f"{module_name} with zenflow")
    exec(compile(ast.fix_missing_locations(tree), spec.origin, "exec"), vars(module))
    namespace = types.SimpleNamespace(zenflow=zenflow_jax.zenflow)
    vars(module).update(
        alias=namespace,
        contrib=namespace,
        _inject=types.SimpleNamespace(inject_hyperparams=inject_hyperparams),
    )
    return vars(module)[class_name]


def collect():
    """Id and test case of every case in the batteries that is no exception."""
    for name, (module_name, class_name, values) in BATTERIES.items():
        for case in unittest.TestLoader().loadTestsFromTestCase(
            load(module_name, class_name, values)
        ):
            # "test_method3 (opt_name='zenflow', ..., dtype='bfloat16')"
            described = case.id().split(f"{class_name}.", 1)[1]
            if not any(re.match(exception, described) for exception in EXCEPTIONS):
                yield pytest.param(case, id=f"{name}-{described.split()[0]}")


COLLECTED = list(collect())
assert len(COLLECTED) >= 30, "optax's wheel has other cases than it had"


@pytest.fixture(autouse=True)
def _settings_as_optax_has_them():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("case", COLLECTED)
def test_a_case_that_optax_runs_on_its_own_optimizers_passes(case):
    result = unittest.TestResult()
    case.run(result)
    for _, trace in result.errors + result.failures:
        pytest.fail(trace)
    assert (result.testsRun, len(result.skipped)) == (1, 0)
