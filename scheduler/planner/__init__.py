"""The process beside the scheduler: it reads the fleet, forecasts, and decides what takes long.

A plan for five thousand nodes is half a second of computing, a first one is seconds. In a thread
each of them would hold up whoever the scheduler talks with; here nobody waits for it. The scheduler
starts it, asks, and writes what was decided; the planner writes only what it learned of demand.
All that it holds can be lost: it is read from the store again.

`process` is the scheduler's side, `__main__` the other; `questions` is what is said between them,
`desk` what answers.
"""
