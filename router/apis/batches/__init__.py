"""OpenAI's files and batches: relayed to the scheduler, which stores them."""
