"""A router's knowledge of prefix caches: sessions, prefixes and their blocks."""
