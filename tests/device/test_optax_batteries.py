"""The tests that optax's wheel ships for its own optimizers, run on `zenflow(..., offload=False)`.

Nothing of them is copied. optax writes its list of optimizers into its test classes while these
are made, so the module is read from the installed wheel, the list in its syntax tree is exchanged
for `CASES`, and the result is executed under a name of its own. Every case that then fails is in
`EXCEPTIONS` with its reason and with the words that it must fail with.

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

# Case, words in its failure, reason.
FLOAT32_UPDATES = (
    "The update is float32 whatever the leaf: only so does adding it to a low-precision parameter "
    "give the cast of the float32 master."
)
EXCEPTIONS = [
    (r"test_preserve_dtype\d+ .*'bfloat16'", r"float32.* != dtype\(bfloat16\)", FLOAT32_UPDATES),
    (
        r"test_state_shape_dtype_shard_stability\d+ .*numpy\.(bfloat16|float16)",
        "cond branches must have equal output types",
        FLOAT32_UPDATES + " The case has the gradients in place of the update in a `cond`.",
    ),
    (
        r"test_\w+\d+ .*numpy\.(float64|complex64|complex128)",
        "expected leaves of float32, bfloat16 or float16",
        "All arithmetic is float32 and real; other leaves are refused rather than rounded.",
    ),
    (
        r"test_explicit_dtype\d+ ",
        "has no attribute '(sgd|adam|adamw)'",
        "It is about `mu_dtype` of three optimizers of optax's; zenflow's moments are float32.",
    ),
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
    """(id, test case, its exception or None) of every case in the batteries."""
    for name, (module_name, class_name, values) in BATTERIES.items():
        for case in unittest.TestLoader().loadTestsFromTestCase(
            load(module_name, class_name, values)
        ):
            # "test_method3 (opt_name='zenflow', ..., dtype='bfloat16')"
            described = case.id().split(f"{class_name}.", 1)[1]
            matching = [e for e in EXCEPTIONS if re.match(e[0], described)]
            assert len(matching) <= 1, described
            yield f"{name}-{described.split()[0]}", case, matching[0] if matching else None


COLLECTED = list(collect())


@pytest.fixture(autouse=True)
def _settings_as_optax_has_them():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(case):
    result = unittest.TestResult()
    case.run(result)
    assert result.testsRun == 1
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=id) for id, case, exception in COLLECTED if not exception]
)
def test_a_case_that_optax_runs_on_its_own_optimizers_passes(case):
    result = run(case)
    for _, trace in result.errors + result.failures:
        pytest.fail(trace)
    assert not result.skipped


@pytest.mark.parametrize(
    ("case", "words"),
    [pytest.param(case, e[1], id=id) for id, case, e in COLLECTED if e is not None],
)
def test_an_excepted_case_fails_for_the_listed_reason_only(case, words):
    result = run(case)
    assert not result.skipped
    problems = [trace for _, trace in result.errors + result.failures]
    assert problems, "passes; take it out of EXCEPTIONS"
    for trace in problems:
        assert re.search(words, trace.strip()), trace


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("alias-test_optimization", 1),
        ("alias-test_optimizers_can_be_wrapped_in_inject_hyperparams", 1),
        ("alias-test_gradient_accumulation", 1),
        ("contrib-test_optimizers", 2),
        ("contrib-test_optimizers_accept_extra_args", 2),
        ("contrib-test_optimizers_accept_learning_rate_schedule_if_type_annotated_as_such", 2),
    ],
)
def test_the_batteries_are_not_empty(method, settings):
    count = sum(id.rstrip("0123456789") == method and e is None for id, _, e in COLLECTED)
    assert count >= settings
