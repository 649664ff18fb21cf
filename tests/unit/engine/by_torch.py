"""A reference for the Triton attention kernels: the same over pages, by torch alone."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nodeagent.engine.kernels.cuda.batch_layout import PagedBatch
from nodeagent.engine.kvcache.block_pool import BLOCK_TOKENS
from nodeagent.engine.kvcache.kv_format import KvFormat


class ByTorch:
    """Gathers the pages of each row, and attends row by row."""

    def __init__(self, kv_format: KvFormat | None = None) -> None:
        self._kv_format = kv_format or KvFormat(torch.float32)

    def store_kv(self, mixed: Tensor, heads: int, slots: Tensor, pages: Tensor) -> None:
        is_token = slots >= 0
        pages.view(-1, *pages.shape[2:])[slots[is_token]] = self._kv_format.encode(
            mixed[is_token, heads:]
        )

    def attend(self, mixed: Tensor, heads: int, pages: Tensor, batch: PagedBatch) -> Tensor:
        pages = self._kv_format.decode(pages, mixed.dtype)
        outputs = torch.zeros(mixed.shape[0], heads, mixed.shape[2])

        def attend_row(row: int, table: Tensor, first: int, end: int) -> None:
            slots = pages[table[: -(-end // BLOCK_TOKENS)]].flatten(0, 1)[first:end]
            keys, values = slots.transpose(0, 1).chunk(2)
            query = mixed[row, :heads].unsqueeze(1)
            output = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
            outputs[row] = output.squeeze(1)

        if batch.decodes is not None:
            for row, (first, end) in enumerate(batch.decodes.spans.tolist()):
                if end > first:
                    attend_row(row, batch.decodes.tables[row], first, end)
        if batch.chunks is not None:
            window = batch.chunks.window_tokens
            for number, (row, rows, start) in enumerate(batch.chunks.places.tolist()):
                for at in range(start, start + rows):
                    table = batch.chunks.tables[number]
                    attend_row(row + at - start, table, max(0, at + 1 - window), at + 1)
        return outputs
