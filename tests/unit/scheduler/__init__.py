"""The scheduler's decisions."""
