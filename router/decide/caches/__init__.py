"""What a router knows of prefix caches: sessions, prefixes and their blocks."""
