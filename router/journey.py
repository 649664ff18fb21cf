"""One request on its way: what was asked, what is known so far, and what it holds."""

from collections.abc import Set
from typing import Final

from isochrone.wire import headers
from isochrone.wire.ids import ReplicaId
from isochrone.wire.routes import Route
from isochrone.wire.usage import RequestOutcome
from router.asked import Asked
from router.dataplane.exchange import Exchange, Head
from router.dataplane.sse import DONE_FRAME, Frames, Said, usage_frame
from router.dataplane.usage import UsageCount
from router.decide.board import Ranked
from router.decide.prefixes import Sent
from router.decide.tokens_in_flight import Reservation
from router.waiting import Place

NOBODY: Final[Set[ReplicaId]] = frozenset()
NOTHING_SAID: Final = Said(0, "", True, None)
# Looked up once: a member of an enum is found by code of Python's.
FAILED: Final = RequestOutcome.FAILED
COMPLETE: Final = RequestOutcome.COMPLETE
REFUSED: Final = RequestOutcome.REFUSED
TURNED_AWAY_MAX: Final = 12

LIVES: Final = 8
"""How many replicas may die under one stream before its client is told."""


class Journey:
    """What is known of one request so far. The corridor fills it in, `Recorder` reads it."""

    outcome: RequestOutcome
    ranked: Ranked | None = None
    via: Ranked | None = None
    """Whom the attempt under way was sent to; a sibling may answer in its place."""
    sent: Sent | None = None
    turned_away = 0
    picked_at_s = 0.0
    first_token_at_s: float | None = None
    """When the client had its first token; the next three are of the last attempt that had one."""
    token_at_s = 0.0
    took_ms = 0.0
    said_before = 0
    found_no_replica = False
    is_declined = False
    """The replica would not have it, for what the client wrote: no fault of the replica's."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    frames: Frames | None = None
    said = NOTHING_SAID
    lives = LIVES
    reservation: Reservation | None = None
    exchange: Exchange | None = None
    place: Place | None = None

    def __init__(self, asked: Asked, prompt_tokens_estimate: int) -> None:
        self.outcome = FAILED
        self.asked = asked
        self.prompt_tokens_estimate = prompt_tokens_estimate
        self.body = asked.body
        self.failed: set[ReplicaId] = set()
        self.refused: set[ReplicaId] = set()
        self.unfit: set[ReplicaId] = set()

    @property
    def left_alone(self) -> Set[ReplicaId]:
        """Whom the next attempt leaves alone: mostly nobody."""
        if self.failed or self.refused or self.unfit:
            return self.failed | self.refused | self.unfit
        return NOBODY

    @property
    def route(self) -> Route | None:
        """The replica that answers, once there is one."""
        return self.ranked.route if self.ranked else None

    @property
    def tokens_ahead(self) -> tuple[int, int]:
        """The tokens (prompt, output) of the next attempt: what was said is prompt to it."""
        said = self.said.tokens
        asked = self.asked.output_tokens_max
        return self.prompt_tokens_estimate + said, asked - said if asked > said else 1

    def frames_anew(self) -> Frames | None:
        """Return what takes the next attempt's stream in: after what was said, where it was."""
        if self.said.tokens and self.frames is not None:
            self.frames.go_on()
        elif self.asked.is_stream:
            self.frames = Frames(wants_usage=self.asked.wants_usage)
        return self.frames

    def take_place(self, until_s: float) -> Place:
        """Return its place among those who wait for room, which it may have until then."""
        asked = self.asked
        tokens = self.prompt_tokens_estimate + asked.output_tokens_max
        place = self.place = Place(
            asked.deployment_id,
            asked.key.tenant_id,
            tokens,
            until_s,
            size_bytes=len(self.body),
            # Half an answer is out: whoever would not have waited for it waits for its rest.
            is_patient=not asked.reject_if_busy or self.said.tokens > 0,
        )
        return place

    def note(self, usage: UsageCount | None) -> None:
        """Take the engine's own count."""
        if usage is not None:
            self.prompt_tokens = usage.prompt_tokens
            self.cached_tokens = usage.cached_tokens
            self.output_tokens = usage.output_tokens

    def leave(self) -> None:
        """Give back what the attempt holds: its connection and its tokens in flight."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.leave()
        self.unbook()

    def unbook(self) -> None:
        """Give back the tokens in flight."""
        if self.reservation is not None:
            self.reservation.release()

    @property
    def used(self) -> tuple[int, int, int]:
        """(prompt, cached, output) tokens: the engine's word, else our count and estimate."""
        if self.first_token_at_s is None and self.prompt_tokens is None:
            return 0, 0, 0
        estimate = self.prompt_tokens_estimate
        prompt = estimate if self.prompt_tokens is None else self.prompt_tokens
        output = self.said.tokens if self.output_tokens is None else self.output_tokens
        return prompt, min(prompt, self.cached_tokens or 0), output

    @property
    def may_be_turned_away(self) -> bool:
        """Whether a node may still refuse it because more waits there than was thought."""
        return self.turned_away < TURNED_AWAY_MAX

    def is_exact(self, head: Head | None) -> bool:
        """Say whether the rest is, token for token, what the first replica would have said."""
        drawn = self.asked.drawn
        how = head.resumed if head else ""
        return drawn == headers.GREEDY or (drawn == headers.SEEDED and how == headers.SEEDED)

    def ask_for_rest(self) -> bool:
        """Ask for what follows on what was said, from now on; False where that cannot be asked."""
        resume, said = self.asked.resume, self.said
        if resume is None or not said.is_plain or self.lives <= 0:
            return False
        rest = resume(said.text, said.tokens)
        if rest is None:
            return False
        self.lives -= 1
        self.body = rest
        return True

    def end_of_stream(self, said: Said) -> bytes:
        """Write what a stream lacks whose replica died between its last token and its end."""
        if not self.asked.wants_usage or (self.frames and self.frames.usage):
            return DONE_FRAME
        count = UsageCount(self.prompt_tokens_estimate, said.tokens, 0)
        head = {"object": "chat.completion.chunk", "model": self.asked.deployment.name}
        return usage_frame(count, head) + DONE_FRAME
