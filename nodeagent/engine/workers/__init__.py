"""The processes of a model that is split over several ranks.

Rank 0 has the queue, the sampler and the HTTP server. It sends each step to the other ranks
(`commands`); all ranks run it with their shard of the model, and exchange tensors where a result
needs them all (`distributed.collectives`). The other ranks are forked from rank 0 before anything
is loaded (`worker_group`), or connect from other nodes (`rendezvous`). They end with rank 0, and
if one of them ends first, the engine ends.

Entry points: `rank0.Rank0Executor` on rank 0, `worker.run_worker` on the others.
"""
