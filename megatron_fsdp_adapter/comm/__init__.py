"""What collectives and their memory may be instead of the backend's own: handed to `core`."""
