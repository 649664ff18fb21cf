"""What ranking knows of each replica: its load, its rates and its estimated wait."""
