"""The input of ranking: each replica's load, rates and estimated wait."""
