"""Clients' API keys: their form, their tables and their use."""
