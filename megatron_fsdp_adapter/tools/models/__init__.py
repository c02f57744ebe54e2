"""One description of a model, which `estimate`, `plan`, `doctor --prove` and the scripts share."""
