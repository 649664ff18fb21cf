"""Fuzzing: files that lie, made by the thousand from files that do not."""
