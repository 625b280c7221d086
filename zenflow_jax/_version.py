"""The version of the library, and the number of the layout of what it saves."""

__version__ = "0.3.0"

#: The number of the layout of what is saved of a run: the arrays of `ZenFlowState`, the tree of
#: `HostEngine.state`, and the files of `EngineSave`. Raise it by one whenever a released version
#: would fail on what this one writes, or read something else in it: when an array gets another
#: name, shape, dtype, place or meaning, comes or goes. Other layouts are refused.
LAYOUT = 3
#: The name of the arrays that say it, with the first minor version that writes it. Savers compare
#: names: one that cannot restore a tree into the place of another shows both names.
LAYOUT_NAME = f"layout_{LAYOUT}_of_zenflow_jax_0_4"
