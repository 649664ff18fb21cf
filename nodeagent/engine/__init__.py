"""The embedded PyTorch engine: one model on one Unix socket, independent of the agent.

Entry point: `python -m nodeagent.engine`. The main path of a token is `core/step.py`: schedule
(`scheduler`), run (`core.model_runner`, `model`, `kernels`), sample (`sampling`).

Packages, each of which imports only those below it:
`encoder`, `server`: HTTP; `loading`: from configuration to engine; `workers`: ranks 1 and up;
`core`: the step; `speculative`, `sampling`, `structured`, `chat`, `tokenizer`: tokens and text;
`model`, `weights`, `kernels`, `distributed`: tensors; `scheduler`, `kvcache`: which sequences run,
in which blocks.
"""

import os

# OpenMP threads wait for each other by spinning, then they sleep. Spinning for some 100
# microseconds is longer than the gaps between the matrix products of a step, each of which would
# otherwise cost a wake-up. By default the library spins for milliseconds: on a shared processor
# that took nine tenths of the engine's time. It reads this once, when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
