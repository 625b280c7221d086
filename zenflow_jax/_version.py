"""The library's version, and the layout number of saved state."""

__version__ = "0.3.0"

#: The layout number of a run's saved state: the arrays of `ZenFlowState`, the tree of
#: `HostEngine.state`, and the files of `EngineSave`. Raise it by one whenever a released version
#: would fail on this version's files, or misread them: when an array appears, disappears, or
#: changes its name, shape, dtype, place or meaning. Other layouts are rejected.
LAYOUT = 4
#: The name of the arrays with that number, which includes the first minor version that writes it.
#: Checkpoint libraries compare names, so a failed restore shows both.
LAYOUT_NAME = f"layout_{LAYOUT}_of_zenflow_jax_0_4"
