"""Pure choice: which requests are admitted and which replica answers."""
