"""Array types shared by the decisions that compute with numpy."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NO_FLOATS: Final[Floats] = np.zeros(0)
