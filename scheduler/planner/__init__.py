"""The planner process: it reads the fleet, forecasts demand and makes the long computations.

A plan for five thousand nodes takes half a second of CPU. A first one takes seconds, and so does
one of a small fleet that starts several replicas, because these are laid out together. In a thread
of the scheduler it would delay every connection; in a process of its own it delays none. The
scheduler starts the process, sends requests and writes the decisions. The planner writes only the
state of its demand forecast. All state that it holds can be lost: it is read from the store again.

`client` is the scheduler's side, `__main__` the process, `messages` the requests and replies, and
`server` answers them.
"""
