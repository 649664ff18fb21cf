"""What the device's kernels for pages do, by torch alone: what they are held against."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nodeagent.engine.kernels.cuda.batch_layout import Paged
from nodeagent.engine.model.layers.kv_format import KvFormat
from nodeagent.engine.scheduler.sequence import BLOCK_TOKENS


class ByTorch:
    """Pages are gathered, row by row."""

    def __init__(self, form: KvFormat | None = None) -> None:
        self._form = form or KvFormat(torch.float32)

    def keep(self, mixed: Tensor, heads: int, slots: Tensor, pages: Tensor) -> None:
        real = slots >= 0
        pages.view(-1, *pages.shape[2:])[slots[real]] = self._form.kept(mixed[real, heads:])

    def attend(self, mixed: Tensor, heads: int, pages: Tensor, layout: Paged) -> Tensor:
        pages = self._form.wide(pages, mixed.dtype)
        answer = torch.zeros(mixed.shape[0], heads, mixed.shape[2])

        def put(row: int, table: Tensor, first: int, end: int) -> None:
            slots = pages[table[: -(-end // BLOCK_TOKENS)]].flatten(0, 1)[first:end]
            keys, values = slots.transpose(0, 1).chunk(2)
            query = mixed[row, :heads].unsqueeze(1)
            told = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
            answer[row] = told.squeeze(1)

        if layout.decodes is not None:
            for row, (first, end) in enumerate(layout.decodes.spans.tolist()):
                if end > first:
                    put(row, layout.decodes.tables[row], first, end)
        if layout.chunks is not None:
            window = layout.chunks.window_tokens
            for number, (row, rows, start) in enumerate(layout.chunks.places.tolist()):
                for at in range(start, start + rows):
                    table = layout.chunks.tables[number]
                    put(row + at - start, table, max(0, at + 1 - window), at + 1)
        return answer
