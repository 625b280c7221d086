"""Whether a run fits, and whether its host work hides, before there is a device to try it on."""
