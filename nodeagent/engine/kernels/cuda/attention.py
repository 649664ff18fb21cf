"""Attention by the Triton kernels, over pages in place."""

from torch import Tensor

from nodeagent.engine.kernels.attention_backend import (
    AttentionBackend,
    AttentionConfig,
    AttentionLayout,
    StepInputs,
)
from nodeagent.engine.kernels.cuda.batch_layout import PagedBatch, step_sizes, write_step
from nodeagent.engine.kernels.cuda.triton_kernels import TritonKernels
from nodeagent.engine.scheduler.forward_batch import ForwardBatch


class TritonAttention(AttentionBackend):
    """Pages in any KV format on a device for which Triton compiles."""

    captures_graphs = True

    def __init__(self, config: AttentionConfig, kernels: TritonKernels) -> None:
        super().__init__(config)
        self._kernels = kernels

    def prepare(self, batch: ForwardBatch) -> StepInputs:
        """Build the tensors of a step: one buffer on the host, one copy."""
        config = self.config
        sizes = step_sizes(batch, config.window_tokens)
        pinned = config.device.startswith("cuda")
        numbers = write_step(sizes, batch, config.window_tokens, pinned)
        on_device = numbers.to(config.device, non_blocking=True)
        return sizes.inputs(on_device, config.window_tokens)

    def attend(self, mixed: Tensor, heads: int, pages: Tensor, layout: AttentionLayout) -> Tensor:
        """Store the step's keys and values in `pages`, then attend: [rows, heads, head_dim]."""
        plan = layout.plan
        assert isinstance(plan, PagedBatch)
        self._kernels.store_kv(mixed, heads, layout.write_slots, pages)
        return self._kernels.attend(mixed, heads, pages, plan)
