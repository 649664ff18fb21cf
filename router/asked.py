"""What is asked for and who asks: what the corridor is given of one request."""

from collections.abc import Callable

from isochrone.wire.errors import ApiError
from isochrone.wire.ids import RequestId
from isochrone.wire.routes import DeploymentEntry, KeyEntry
from router.decide.prefix_index import PrefixKeys


class Asked:
    """One request as the corridor takes it, whichever public surface it came by.

    `request_id` is its alone; its client knows it by `known_as`, which another may have too.
    `answers` is how many there are to be, side by side; `output_tokens_max` is of all together.
    `body` is what goes to the node. `text_bytes` is the prompt's size, `arrived_s` monotonic,
    `started_at` Unix time. `error_event` writes an error into a stream. `resume` gives the body
    that asks for the rest after (text, tokens) were said, None where that cannot be asked for;
    `drawn` how its tokens are, where every replica would draw the same.
    """

    __slots__ = (
        "answers", "arrived_s", "body", "deployment", "deployment_id", "drawn", "error_event",
        "is_stream", "key", "known_as", "output_tokens_max", "path", "prefix_keys",
        "reject_if_busy", "request_id", "resume", "session", "started_at", "text_bytes",
        "wants_usage",
    )  # fmt: skip

    def __init__(
        self,
        *,
        request_id: RequestId,
        known_as: str,
        key: KeyEntry,
        deployment: DeploymentEntry,
        path: str,
        body: bytes,
        text_bytes: int,
        answers: int,
        output_tokens_max: int,
        is_stream: bool,
        wants_usage: bool,
        session: str,
        reject_if_busy: bool,
        arrived_s: float,
        started_at: float,
        error_event: Callable[[ApiError], bytes],
        resume: Callable[[str, int], bytes | None] | None,
        drawn: str,
        prefix_keys: PrefixKeys,
    ) -> None:
        self.request_id = request_id
        self.known_as = known_as
        self.key = key
        self.deployment = deployment
        self.deployment_id = deployment.deployment_id
        self.path = path
        self.body = body
        self.text_bytes = text_bytes
        self.answers = answers
        self.output_tokens_max = output_tokens_max
        self.is_stream = is_stream
        self.wants_usage = wants_usage
        self.session = session
        self.reject_if_busy = reject_if_busy
        self.arrived_s = arrived_s
        self.started_at = started_at
        self.error_event = error_event
        self.resume = resume
        self.drawn = drawn
        self.prefix_keys = prefix_keys

    def spend(self, tokens: tuple[int, int, int]) -> float:
        """Return what (prompt, cached, output) tokens cost."""
        price = self.deployment.price
        return price.spend(*tokens) if price is not None else 0.0
