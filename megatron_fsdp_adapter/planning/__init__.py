"""`plan`: the engine's own program of a step, timed on a table of what a machine takes."""
