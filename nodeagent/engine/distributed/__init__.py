"""One model over several processes of one machine: the ranks.

Rank 0 is the front: it alone has the queue, the sampler and the socket. What it decides for a step
it tells the others (`plan`), and all run the same `Runner` over their shares of the model
(`share`), meeting in the few places where a number needs them all (`ranks`). The others are forked
before anything is loaded (`crew`), follow (`follower`), and end with the front; where one ends
first, the engine ends.
"""
