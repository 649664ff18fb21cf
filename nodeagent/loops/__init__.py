"""The agent's periodic jobs: converge, prefetch, report."""
