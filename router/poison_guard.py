"""Keeps a poison request, one that makes engines fail, from being sent to one engine after another.

decide/admission/suspicion.py decides; this module applies that to the requests of the pipeline.
"""

import math
from collections.abc import Callable
from typing import Final

from isochrone.wire.errors import ApiError, ErrorCode
from isochrone.wire.peers.suspicions import EngineLoss
from router.decide.admission.suspicion import LOSSES_MAX, SuspectTable
from router.recording.metrics import Metrics
from router.request_context import (
    OUTCOME_COMPLETE,
    OUTCOME_REFUSED,
    ReplicaAttempt,
    RequestContext,
)
from router.sharing.suspicion_sharing import SharedSuspicions, SuspicionOutbox

SUSPENDED: Final = "suspended"


class PoisonGuard:
    """Marks suspect requests, and refuses those with which too many engines were lost."""

    def __init__(
        self, suspects: SuspectTable, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        """`clock` returns monotonic seconds."""
        self.outbox = SuspicionOutbox()
        self._suspects = suspects
        self._metrics = metrics
        self._clock = clock

    def check(self, context: RequestContext) -> None:
        """Mark a new request if it is a suspect. Raises ApiError if it is refused."""
        if self._suspects.has_suspects_of(context.request.tenant_id):
            self._identify(context)
            now_s = self._clock()
            context.is_suspect = self._suspects.is_suspect(context.fingerprint, now_s)
            self._refuse(context, now_s)

    def record_loss(self, context: RequestContext, attempt: ReplicaAttempt) -> None:
        """Count an engine that was lost with this request. Raises ApiError if no retry is left."""
        self._identify(context)
        context.is_suspect = True
        now_s, tenant_id = self._clock(), context.request.tenant_id
        replica_id = attempt.ranked.route.replica_id
        stream, relay = context.stream, context.stream.relay
        sent_token = lost_token = stream.generated.tokens
        if stream.has_begun and relay is not None:
            lost_token = relay.generated().tokens
        loss = EngineLoss(
            context.fingerprint,
            tenant_id,
            replica_id,
            attempt.sent_at_s,
            now_s,
            sent_token,
            lost_token,
        )
        self._suspects.record_loss(loss)
        self.outbox.add(SharedSuspicions(losses=(loss,)))
        self._refuse(context, now_s)

    def record_end(self, context: RequestContext) -> None:
        """Clear the request if an engine answered it."""
        is_answered = context.outcome is OUTCOME_COMPLETE or context.is_declined
        if is_answered and self._suspects.has_suspects_of(context.request.tenant_id):
            self._identify(context)
            if self._suspects.record_answer(context.fingerprint):
                self.outbox.add(SharedSuspicions(cleared=(context.fingerprint,)))

    def learn(self, shared: SharedSuspicions) -> None:
        """Count a loss that another router, or another process of this one, has seen."""
        self._metrics.suspicions_received.inc(len(shared.losses))
        for row in shared.losses:
            self._suspects.record_loss(row)
        for fingerprint in shared.cleared:
            self._suspects.record_answer(fingerprint)

    def _identify(self, context: RequestContext) -> None:
        if not context.fingerprint:
            request = context.request
            context.fingerprint = self._suspects.fingerprint(
                request.tenant_id, request.deployment_id, request.path, request.body
            )

    def _refuse(self, context: RequestContext, now_s: float) -> None:
        after_s = self._suspects.refused_for_s(context.fingerprint, now_s)
        if not after_s:
            return
        context.outcome = OUTCOME_REFUSED
        self._metrics.refusals.labels(SUSPENDED).inc()
        raise ApiError(
            ErrorCode.REQUEST_SUSPENDED,
            f"cannot serve this request for now: {LOSSES_MAX} engines failed while they processed"
            f" it, whether or not it was the cause; try again in {math.ceil(after_s)} s"
            " or change it",
            retry_after_s=after_s,
        )
