"""Root-mean-square normalisation."""

from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from nodeagent.engine.kernels.cpu.kernels import kernels_for
from nodeagent.engine.kernels.cuda.kernels import device_kernels


def add_and_norm(x: Tensor, added: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return `x` plus `added`, and that normalised."""
    own = device_kernels(x)
    if own is not None:
        return own.add_and_normalise(x, added, weight, epsilon)
    x = x + added
    return x, rms_norm(x, weight, epsilon)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalise rows of `x` by their root mean square, in fp32, and scale them by `weight`."""
    if weight.dim() != 1:
        # A weight for each head: the kernels know only one for all.
        return torch_rms_norm(x, x.shape[-1:], None, epsilon) * weight
    own = kernels_for(x)
    if own is not None:
        return own.normalise(x, weight, epsilon)
    return torch_rms_norm(x, weight.shape, weight, epsilon)
