"""The state of one request in the pipeline: its attempts, its stream, its times and its usage."""

from collections.abc import Set
from typing import Any, Final

from isochrone.native_class import mypyc_attr
from isochrone.wire.http import headers
from isochrone.wire.ids import ReplicaId
from isochrone.wire.peers.assignment import PeerSource
from isochrone.wire.peers.routes import Route
from isochrone.wire.peers.usage import RequestOutcome
from router.admission_queue import QueueEntry
from router.dataplane.exchange import NodeExchange, ResponseHead
from router.dataplane.media_relay import MediaRelay
from router.dataplane.sse import (
    DONE_FRAME,
    GeneratedOutput,
    StreamRelay,
    data_frame,
    usage_frame,
)
from router.dataplane.usage import UsageCount
from router.decide.attempt import FAULTY, TRANSITIONS, AttemptEvent, AttemptState, after
from router.decide.caches.prefix_index import SentPrompt
from router.decide.choice.prefill_replicas import PrefillReading
from router.decide.choice.ranking import QUEUE_REFUSALS_MAX
from router.decide.choice.shared_kv import NO_SHARED_KV_PEERS
from router.decide.replicas.full_replicas import RequestGroup
from router.decide.replicas.ranked_route import RankedRoute
from router.decide.replicas.tokens_in_flight import Reservation
from router.inference_request import NOTHING_LEFT, InferenceRequest
from router.recording.request_trace import RequestTrace

COMPLETIONS_PATH: Final = "/v1/completions"
NO_REPLICAS: Final[Set[ReplicaId]] = frozenset()
EMBEDDED_ENGINE: Final = "embedded"
"""The driver of the engine that continues an answer after its reasoning."""

NOTHING_GENERATED: Final = GeneratedOutput(0, "", True, None)
NO_USAGE: Final = UsageCount(0, 0, 0)
PROMPT_TOKENS: Final = headers.PROMPT_TOKENS.encode()
# Looked up once, because access to an enum member runs interpreted code.
OUTCOME_FAILED: Final = RequestOutcome.FAILED
OUTCOME_COMPLETE: Final = RequestOutcome.COMPLETE
OUTCOME_REFUSED: Final = RequestOutcome.REFUSED
OUTCOME_CANCELLED: Final = RequestOutcome.CANCELLED
RANKED: Final = AttemptState.RANKED

FAILOVERS_MAX: Final = 8
"""How many replicas may fail during one stream before the client gets an error."""


@mypyc_attr(acyclic=True, free_list_len=1)
class ExpectedTokens:
    """The tokens that an attempt is expected to read and to generate."""

    __slots__ = ("output", "prompt")

    def __init__(self, prompt: int, output: int) -> None:
        self.prompt = prompt
        self.output = output


@mypyc_attr(free_list_len=1)
class ReplicaAttempt:
    """One attempt: its state, where it was sent, and what it holds.

    `target` is the replica that it was sent to. `ranked` is the one that answers: the target, or
    the peer replica that the target handed the request to. `sent_prompt` is what the prefix index
    expects that replica to have cached. `prefill_id` is the replica that reads the prompt for it,
    if another one does, and `prefill` what is counted there. `kv_peers` are the replicas that may
    have its prefix, and `handoff_ids` those to which the target may hand the request off.
    """

    __slots__ = (
        "exchange", "handoff_ids", "kv_peers", "prefill", "prefill_id", "ranked", "reservation",
        "sent_at_s", "sent_prompt", "state", "target",
    )  # fmt: skip

    def __init__(self, target: RankedRoute) -> None:
        self.state = RANKED
        self.target = target
        self.ranked = target
        self.handoff_ids: Set[ReplicaId] = NO_REPLICAS
        self.sent_prompt: SentPrompt | None = None
        self.kv_peers = NO_SHARED_KV_PEERS
        self.reservation: Reservation | None = None
        self.prefill_id: ReplicaId | None = None
        self.prefill: PrefillReading | None = None
        self.exchange: NodeExchange | None = None
        self.sent_at_s = 0.0

    @property
    def is_handed_off(self) -> bool:
        """Whether a peer replica has the request, as the target's node says."""
        return self.ranked is not self.target

    def take(self, event: AttemptEvent) -> None:
        """Move to the state after `event`."""
        # `after` is called only for the error: this runs several times for each request.
        following = TRANSITIONS.get((self.state, event))
        self.state = after(self.state, event) if following is None else following

    def release(self) -> None:
        """Release the resources of the attempt: its connection and its tokens in flight."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.abandon()
        self.release_tokens()

    def release_tokens(self) -> None:
        """Give back the tokens in flight. A second call has no effect."""
        if self.reservation is not None:
            self.reservation.release()
        self.end_prefill()

    def end_prefill(self) -> None:
        """Give back the tokens at the replica that reads the prompt, which is read or given up."""
        if self.prefill is not None:
            self.prefill.reservation.release()


@mypyc_attr(acyclic=True, free_list_len=1)
class ExcludedReplicas:
    """The replicas that the next attempt must not use, and why.

    `handed_off` are peer replicas to which a request was handed off that failed then, and `full`
    those that had no capacity for it, or to whose nodes this router had no connection, when it last
    ranked.
    """

    __slots__ = (
        "cannot_resume", "failed", "full", "handed_off", "queue_refusals", "refused",
    )  # fmt: skip

    def __init__(self) -> None:
        # Replaced, never changed: most requests exclude nothing.
        self.failed = self.handed_off = self.refused = self.cannot_resume = NO_REPLICAS
        self.full = NO_REPLICAS
        self.queue_refusals = 0

    def all(self) -> Set[ReplicaId]:
        """Return all excluded replicas but the `full` ones, which differ from moment to moment."""
        if self.failed or self.refused or self.cannot_resume:
            return self.failed | self.handed_off | self.refused | self.cannot_resume
        return NO_REPLICAS

    def forget_failures(self) -> None:
        """Let the next attempts use the replicas again that have failed."""
        self.failed = self.handed_off = NO_REPLICAS

    @property
    def may_refuse_for_queue(self) -> bool:
        """Whether nodes may still refuse the request because of the length of their queue."""
        return self.queue_refusals < QUEUE_REFUSALS_MAX


@mypyc_attr(free_list_len=1)
class ResumableStream:
    """The output of a request so far, and the means to continue it on another replica.

    `body` is the body of the next attempt, which is a resumption if there are `generated` tokens.
    `has_begun` means that the client has got the beginning of the stream, with or without tokens.
    `ending` are its last bytes, once they are known.
    """

    __slots__ = ("body", "ending", "failovers_left", "generated", "has_begun", "relay")

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.relay: StreamRelay | None = None
        self.generated = NOTHING_GENERATED
        self.has_begun = False
        self.ending = b""
        self.failovers_left = FAILOVERS_MAX

    def open_relay(self, request: InferenceRequest) -> StreamRelay | None:
        """Return the relay for the next attempt's stream; None if a stream is not wanted.

        A stream that has begun keeps its relay. Any other relay took frames that no client got.
        """
        if self.has_begun and self.relay is not None:
            self.relay.resume()
        elif request.is_stream and request.is_media:
            self.relay = MediaRelay()
        elif request.is_stream:
            joins_reasoning = request.deployment.engine == EMBEDDED_ENGINE
            self.relay = StreamRelay(
                wants_usage=request.wants_usage, joins_reasoning=joins_reasoning
            )
        return self.relay

    def prepare_resumption(self, request: InferenceRequest) -> bool:
        """Make `body` ask for the rest of the answer; return False if that is not possible."""
        build, generated = request.build_resume_body, self.generated
        if build is None or not generated.is_plain or self.failovers_left <= 0:
            return False
        body = build(request.body, generated.text, generated.tokens)
        if not body:
            return False
        self.failovers_left -= 1
        self.body = body
        return True


@mypyc_attr(acyclic=True, free_list_len=1)
class TokenTimes:
    """The arrival times of tokens, in monotonic seconds.

    `first_token_at_s` is the client's first token. The others describe the last attempt that
    streamed a token: when its first token came, its time to first token, and how many tokens
    earlier attempts had generated.
    """

    __slots__ = ("attempt_token_at_s", "attempt_ttft_ms", "first_token_at_s", "tokens_before")

    def __init__(self) -> None:
        self.first_token_at_s: float | None = None
        self.attempt_token_at_s = 0.0
        self.attempt_ttft_ms = 0.0
        self.tokens_before = 0


@mypyc_attr(free_list_len=1)
class RequestContext:
    """The state of one request. The pipeline fills it in, `Recorder` reads it.

    `attempt` is the current attempt; after a refusal or failure it is the last one that answered,
    if any. `is_declined` means that the replica rejected the client's input (a 4xx), which is no
    fault of the replica. `engine_usage` is the engine's own count. `expected` are the tokens of the
    next attempt. `fingerprint` identifies equal requests; it is empty unless some request of the
    tenant is a suspect. `is_suspect` means that an engine failed while it processed this one.
    """

    __slots__ = (
        "adapter_holders", "attempt", "engine_usage", "excluded", "expected", "fingerprint",
        "found_no_replica", "held_bytes", "is_declined", "is_recorded", "is_suspect", "outcome",
        "prompt_tokens_estimate", "queue_entry", "request", "stream", "times", "trace",
    )  # fmt: skip

    def __init__(self, request: InferenceRequest, prompt_tokens_estimate: int) -> None:
        self.adapter_holders: tuple[PeerSource, ...] = ()
        """Nodes that may have the request's adapter, for the next attempt."""
        self.request = request
        self.prompt_tokens_estimate = prompt_tokens_estimate
        self.expected = ExpectedTokens(prompt_tokens_estimate, request.output_tokens_max)
        self.outcome = OUTCOME_FAILED
        self.is_declined = self.is_recorded = False
        self.found_no_replica = False
        self.held_bytes = 0
        """The bytes of its body that count against its tenant's share."""
        self.fingerprint = b""
        self.is_suspect = False
        self.queue_entry: QueueEntry | None = None
        self.attempt: ReplicaAttempt | None = None
        self.excluded = ExcludedReplicas()
        self.stream = ResumableStream(request.body)
        self.times = TokenTimes()
        self.engine_usage: UsageCount | None = None
        self.trace: RequestTrace | None = None
        """Notes for its spans, if it is traced."""

    def take_prompt_tokens(self, head: ResponseHead) -> None:
        """Take the engine's count of the prompt's tokens in place of the estimate.

        That of a resumption has what was generated, too, and several prompts are counted apart.
        """
        count = head.fields.get(PROMPT_TOKENS, b"")
        is_whole = self.request.answer_count == 1 and not self.stream.generated.tokens
        if is_whole and count.isdigit() and len(count) < 10:
            self.prompt_tokens_estimate = min(int(count), self.request.usage_tokens_max())
            if self.request.on_prompt_tokens is not None:
                self.request.on_prompt_tokens(self.prompt_tokens_estimate)

    @property
    def route(self) -> Route | None:
        """The replica that answers, or is expected to."""
        return self.attempt.ranked.route if self.attempt is not None else None

    @property
    def has_uncounted_attempt(self) -> bool:
        """Whether the last attempt is still to be counted; failures are counted as they happen."""
        return self.attempt is not None and self.attempt.state not in FAULTY

    @property
    def is_cancelled_at_replica(self) -> bool:
        """Whether the client left while a replica had the request, and may have read its prompt.

        The client got nothing, so no usage is recorded. The prompt counts against the key's limits:
        otherwise a key could have any number of prompts read.
        """
        return self.outcome is OUTCOME_CANCELLED and self.attempt is not None

    @property
    def is_refused_if_busy(self) -> bool:
        """Whether its client does not want it to wait, not even in an engine's queue.

        The items of batches may: their number there is limited.
        """
        request = self.request
        is_begun = self.stream.generated.tokens > 0
        return request.reject_if_busy and request.preemptions < 0 and not is_begun

    @property
    def request_group(self) -> RequestGroup:
        """The requests that a full node treats like this one."""
        return (self.request.key.tenant_id, self.request.preemptions >= 0)

    def prepare_resumption(self) -> bool:
        """Make the next attempt ask for the rest of the answer; return False if it cannot."""
        if not self.stream.prepare_resumption(self.request):
            return False
        # The generated tokens are part of the next attempt's prompt.
        generated = self.stream.generated.tokens
        output = max(1, self.request.output_tokens_max - generated)
        self.expected = ExpectedTokens(self.prompt_tokens_estimate + generated, output)
        return True

    def new_queue_entry(self, until_s: float) -> QueueEntry:
        """Return a new entry for the admission queue, which waits at most until `until_s`."""
        request = self.request
        entry = self.queue_entry = QueueEntry(
            request.deployment_id,
            request.tenant_id,
            self.prompt_tokens_estimate + request.output_tokens_max,
            until_s,
            size_bytes=len(self.stream.body),
            regions=request.regions,
            # Once a part of the answer is out, waiting for the rest is better than an error.
            can_wait=not request.reject_if_busy or self.stream.generated.tokens > 0,
        )
        return entry

    def release(self) -> None:
        """Release the resources of the current attempt."""
        if self.attempt is not None:
            self.attempt.release()

    def usage(self) -> UsageCount:
        """Return the tokens used: the engine's count, or our own count and estimate."""
        counted = self.engine_usage
        if counted is None:
            if self.times.first_token_at_s is None:
                return NO_USAGE
            return UsageCount(self.prompt_tokens_estimate, self.stream.generated.tokens, 0)
        most = self.request.usage_tokens_max()
        prompt, output = min(most, counted.prompt_tokens), min(most, counted.output_tokens)
        return UsageCount(prompt, output, min(prompt, counted.cached_tokens))

    def is_exact_resumption(self, head: ResponseHead | None) -> bool:
        """Return whether the rest of the answer is, token for token, what the first replica
        would have generated.
        """
        determinism = self.request.determinism
        resumed = head.resumed if head else ""
        if self.stream.generated.has_reasoning and determinism != headers.GREEDY:
            # The tokens of its marks are not counted, and a seeded draw depends on the count.
            return False
        if determinism == headers.GREEDY:
            return resumed != headers.INEXACT
        return determinism == headers.SEEDED and resumed == headers.SEEDED

    def lacks_only_end(self) -> bool:
        """Return whether the stream has the whole answer, and no replica need continue it."""
        request, generated = self.request, self.stream.generated
        if request.answer_count != 1 or generated.finish_reason is not None:
            return request.answer_count == 1
        build = request.build_resume_body if generated.is_plain else None
        if build is None:
            return False
        return build(request.body, generated.text, generated.tokens) == NOTHING_LEFT

    def missing_end(self) -> bytes:
        """Return the end of a stream whose replica failed after its last token."""
        relay, generated = self.stream.relay, self.stream.generated
        head = relay.head.fields() if relay else {}
        is_chat = self.request.path != COMPLETIONS_PATH
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        head |= {"object": kind, "model": self.request.deployment.name}
        end = b""
        if generated.finish_reason is None:
            output: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
            choice = {"index": 0, **output, "finish_reason": "length"}
            end = data_frame({**head, "choices": [choice]})
        if self.request.wants_usage and not (relay and relay.usage):
            usage = UsageCount(self.prompt_tokens_estimate, generated.tokens, 0)
            end += usage_frame(usage, head)
        return end + DONE_FRAME
