"""Models and their files: artifacts, shapes, adapters."""
