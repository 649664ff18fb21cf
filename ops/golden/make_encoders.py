"""Generates golden vectors and scores of encoders with transformers, which must be installed:

    python -m ops.golden.make_encoders FOLDER_OF_ALL_MINILM_L6_V2 TARGET.json

The vectors are pooled here as the model card says: the mean over the tokens, normalised. The scores
are the logits of a small classifier with synthetic weights (`tiny.write_reranker`).
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers  # type: ignore[import-not-found,unused-ignore]
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from ops.golden import tiny

DIGITS = 7
TEXTS = [
    "How do I boil an egg?",
    "Put the egg in boiling water for eight minutes.",
    "Die Hauptstadt von Frankreich ist Paris 🗼",
    "日本の首都は東京です。",
    "x",
    "The lighthouse keeper climbed the stairs once more. " * 20,
]
LABELS = ["OK", "hate", "Self_Harm", "spam"]
QUERY = "how long does an egg boil"


def main() -> None:
    """Run both models over the texts and write their outputs."""
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    vectors, lengths = [], []
    for text in TEXTS:
        tokens = tokenizer(text, return_tensors="pt", padding=False, truncation=False)
        with torch.inference_mode():
            hidden = model(**tokens).last_hidden_state[0]
        vector = torch.nn.functional.normalize(hidden.mean(0), dim=-1)
        vectors.append([round(value, DIGITS) for value in vector.tolist()])
        lengths.append(hidden.shape[0])
    golden = {
        "transformers": transformers.__version__,
        "texts": TEXTS,
        "tokens": lengths,
        "vectors": vectors,
        "query": QUERY,
        "documents": TEXTS[:5],
        "logits": rerank(folder, tokenizer),
        "labels": LABELS,
        "classes": classify(folder, tokenizer),
    }
    target.write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")


def rerank(folder: Path, tokenizer: object) -> list[float]:
    """Return the small classifier's logit of each document."""
    with tempfile.TemporaryDirectory() as small:
        tiny.write_reranker(Path(small))
        shutil.copy(folder / "tokenizer.json", small)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            small, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(loading.values()), loading
    logits = []
    for text in TEXTS[:5]:
        tokens = tokenizer(QUERY, text, return_tensors="pt", padding=False, truncation=False)  # type: ignore[operator]
        with torch.inference_mode():
            logits.append(round(float(model(**tokens).logits[0, 0]), DIGITS))
    return logits


def classify(folder: Path, tokenizer: object) -> list[list[float]]:
    """Return the logits of each text by a drawn head on the encoder (`tiny.write_classifier`)."""
    with tempfile.TemporaryDirectory() as made:
        tiny.write_classifier(Path(made), folder, LABELS)
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            made, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(loading.values()), loading
    logits = []
    for text in TEXTS[:5]:
        tokens = tokenizer(text, return_tensors="pt", padding=False, truncation=False)  # type: ignore[operator]
        with torch.inference_mode():
            row = model(**tokens).logits[0].tolist()
        logits.append([round(value, DIGITS) for value in row])
    return logits


if __name__ == "__main__":
    main()
