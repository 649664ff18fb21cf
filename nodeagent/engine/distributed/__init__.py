"""Splits one model over several processes, the ranks: shards and collectives.

`shards` computes which part of the model each rank holds; `collectives` is how ranks exchange
tensors while they compute. Models import both. The processes themselves are in `workers`.
"""
