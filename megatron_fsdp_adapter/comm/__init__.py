"""Collectives and memory that replace the backend's own; options hand them to `core`."""
