"""A request with two legs: one replica reads its prompt, another generates its answer."""
