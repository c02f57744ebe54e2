"""The machine below the engine: streams, events, storage, collectives; on CUDA or the host."""
