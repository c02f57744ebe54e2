"""Replicas that may die and come back: the state that a joining one takes over, and what two must
have in common. Quorums, heartbeats and transports are torchft's."""
