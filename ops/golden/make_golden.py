"""Generates the golden token ids of greedy decoding with transformers, which must be installed:

    python ops/golden/make_golden.py MODEL.gguf tests/integration/engine/golden_smollm2.json

transformers reads the GGUF file and its tokenizer with its own code, so the file also tests our
reader. Each case has the smallest margin between the two best logits: within the rounding error of
fp32 sums, another order of summation may choose another token.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import (  # type: ignore[import-not-found,unused-ignore]
    AutoModelForCausalLM,
    AutoTokenizer,
)

TOKENS = 64
PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three uses of copper.",
    "Translate to Spanish: good morning, my friend.",
    "What is 12 plus 30?",
    "Write a Python function that reverses a string.",
    "Who wrote the play Hamlet?",
    "Give me a recipe for pancakes.",
    "Summarise: water boils at 100 degrees Celsius at sea level and lower on mountains.",
    "Name a prime number larger than ten and say why it is prime.",
    "What do bees do in winter?",
    "Was bedeutet das Wort Gemütlichkeit?",
    "日本の首都はどこですか？",
    "Tell me a story about a lighthouse keeper 🗼.",
    "Compare cats and dogs in one paragraph.",
    "How do I boil an egg?",
    "What is a hash table?",
]
PLAIN = [
    "Once upon a time, in a village by the river, there lived",
    "The three laws of thermodynamics are",
]


def main() -> None:
    """Generate greedily for each prompt and write the token ids."""
    model_path, target = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(2)
    source = {"pretrained_model_name_or_path": str(model_path.parent), "gguf_file": model_path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in PROMPTS
    ]
    cases = []
    for text in [*chats, *PLAIN]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = model.generate(
            torch.tensor([ids]),
            max_new_tokens=TOKENS,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=2,
            pad_token_id=2,
            return_dict_in_generate=True,
            output_logits=True,
        )
        output = answer.sequences[0, len(ids) :].tolist()
        best = [logits[0].topk(2).values for logits in answer.logits]
        margin = min(float(pair[0] - pair[1]) for pair in best)
        cases.append({"text": text, "prompt_ids": ids, "output_ids": output, "margin_min": margin})
    target.write_text(json.dumps({"tokens": TOKENS, "cases": cases}, ensure_ascii=False, indent=1))


if __name__ == "__main__":
    main()
