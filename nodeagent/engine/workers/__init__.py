"""The worker processes of a split model, and rank 0, which commands them."""
