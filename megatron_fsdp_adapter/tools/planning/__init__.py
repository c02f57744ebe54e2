"""`plan`: records the engine's operations of a step and times them by tables of machines."""
