"""Megatron-Core's distributed optimizer on shards: step, clipping, state, Muon and Lion."""
