"""Megatron-LM's training loop as one of several replicas that may die and come back
(`--fsdp-elastic`). Each replica is a job of its own, with an unmodified script; torchft's manager
joins them."""
