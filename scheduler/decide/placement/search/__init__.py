"""The search for a better plan: one draft, changed and rolled back by savepoints."""
