"""Pure choice: who is admitted and which replica answers."""
