"""The tokens that a request used."""

from isochrone.native_class import mypyc_attr


@mypyc_attr(acyclic=True, free_list_len=1)
class UsageCount:
    """The tokens that a request used. `cached_tokens` are part of `prompt_tokens`."""

    __slots__ = ("cached_tokens", "output_tokens", "prompt_tokens")

    def __init__(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.cached_tokens = cached_tokens

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UsageCount):
            return NotImplemented
        return (
            self.prompt_tokens == other.prompt_tokens
            and self.output_tokens == other.output_tokens
            and self.cached_tokens == other.cached_tokens
        )

    def __repr__(self) -> str:
        tokens = f"{self.prompt_tokens}, {self.output_tokens}, {self.cached_tokens}"
        return f"UsageCount({tokens})"

    __hash__ = None  # type: ignore[assignment]
