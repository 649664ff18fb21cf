"""The parts that models are made of: small modules on a flat batch of tokens."""
