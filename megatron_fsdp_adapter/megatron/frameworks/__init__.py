"""Programs on top of Megatron-Core: Megatron-Bridge, PEFT, frameworks of reinforcement learning."""
