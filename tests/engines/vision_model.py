"""Writes a tiny model for text and images with random weights, in the layout that vLLM reads."""

import asyncio
from pathlib import Path
from typing import Final

from tests.engines.real_engines import MODEL, VLLM_COMMANDS

IMAGE_SIDE: Final = 56
"""Images are scaled to this side, and then have four tokens and their marks."""

WRITE: Final = """
import sys, torch, transformers
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
source, target, side = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = transformers.AutoTokenizer.from_pretrained(source)
images = Idefics3ImageProcessorPil(
    size={"longest_edge": side}, max_image_size={"longest_edge": side}, do_image_splitting=False
)
template = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "<|im_end|>\\n{% endfor %}<|im_start|>assistant\\n"
)
processor = transformers.Idefics3Processor(
    image_processor=images, tokenizer=tokenizer, image_seq_len=4, chat_template=template
)
small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = transformers.Idefics3Config(
    text_config={
        **small, "model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1,
        "vocab_size": len(tokenizer), "max_position_embeddings": 4096,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    },
    vision_config={**small, "num_attention_heads": 2, "image_size": side, "patch_size": 14},
    scale_factor=2,
    image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    pad_token_id=tokenizer.pad_token_id,
)
torch.manual_seed(0)
model = transformers.Idefics3ForConditionalGeneration(config)
model.to(torch.bfloat16).save_pretrained(target)
processor.save_pretrained(target)
"""


async def write_vision_model(folder: Path) -> Path:
    """Write the model to a folder that does not exist yet, and return it.

    Its tokenizer is that of the chat model. It is of a kind that vLLM reads without torchvision.
    """
    process = await asyncio.create_subprocess_exec(
        VLLM_COMMANDS / "python", "-c", WRITE, MODEL, folder, str(IMAGE_SIDE)
    )
    assert await process.wait() == 0
    return folder
