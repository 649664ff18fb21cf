"""The paths of a node that engines answer, and how large their requests may be."""

from typing import Final

from nodeagent.drivers.driver import TOKENIZE_PATH

GENERATION_PATHS: Final = ("/v1/chat/completions", "/v1/completions")
INFERENCE_PATHS: Final = (
    *GENERATION_PATHS,
    "/v1/embeddings",
    "/v1/rerank",
    "/classify",
    TOKENIZE_PATH,
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/v1/images/generations",
)

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
AUDIO_PREFIX: Final = "/v1/audio/"
AUDIO_BYTES_MAX: Final = 64 * 1024 * 1024
"""The largest request of a path below AUDIO_PREFIX: a sound."""


def body_bytes_max(path: str) -> int:
    """Return how many bytes a request for `path` may have."""
    return AUDIO_BYTES_MAX if path.startswith(AUDIO_PREFIX) else BODY_BYTES_MAX
