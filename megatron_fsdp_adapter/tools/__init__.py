"""Commands and what they compute. Nothing here takes part in training, and nothing imports it."""
