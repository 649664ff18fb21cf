"""Root-mean-square normalisation."""

from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalise rows of `x` by their root mean square, in fp32, and scale them by `weight`."""
    if weight.dim() == 1:
        return torch_rms_norm(x, weight.shape, weight, epsilon)
    # A weight for each head: torch's kernel knows only one for all.
    return torch_rms_norm(x, x.shape[-1:], None, epsilon) * weight
