"""Root-mean-square normalisation."""

from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from nodeagent.engine.native.kernels import kernels_for


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalise rows of `x` by their root mean square, in fp32, and scale them by `weight`."""
    if weight.dim() != 1:
        # A weight for each head: the kernels know only one for all.
        return torch_rms_norm(x, x.shape[-1:], None, epsilon) * weight
    own = kernels_for(x)
    if own is not None:
        return own.normalise(x, weight, epsilon)
    return torch_rms_norm(x, weight.shape, weight, epsilon)
