"""The embedded PyTorch engine: one model, one process, one Unix socket; knows nothing of the agent.

`step` is the corridor (batch, run, sample, commit, emit); `decide/` holds its decisions and is
pure; `runner`, `models/` and `layers/` hold the tensors; `server` and `openai` hold the HTTP.
"""

import os

# torch's threads wait for one another some 100 microseconds by spinning, then they sleep: longer
# than a step's gaps between products, each of which would cost a wake-up. By itself their library
# spins for milliseconds: on a processor shared with others that was nine tenths of the engine's
# time. It reads this once, when torch is first imported: below.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
