"""One short file an architecture."""
