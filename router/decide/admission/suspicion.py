"""Decides which requests to refuse for a while because engines failed while processing them.

Rule 1: only what the node blames on a request counts (nodeagent/decide/requests/blame.py).
Rule 2: after LOSSES_MAX engines the request is refused, although it may not be the cause.
Rule 3: any answer to the same request clears it.
Rule 4: a poison makes each engine fail at the same token. A request that generated more on its next
engine was not the cause of the first loss. This is accepted PASSES_MAX times only, because the
request may be the cause of the next loss.
Rule 5: a request is the same if tenant, deployment, path and body are; the table holds only a keyed
digest of them.
"""

from hashlib import blake2b
from math import inf
from typing import Final

from isochrone.wire.peers.suspicions import EngineLoss

LOSSES_MAX: Final = 2
"""Engines that one request may lose before it is refused."""

PROGRESS_TOKENS_MIN: Final = 4
"""The tokens that must come after the token at which an engine was lost. The last tokens before a
loss may not have left the engine, so that the same token seems to be a later one."""

PASSES_MAX: Final = 1
"""How often the losses of a request are forgotten for its progress. A request that makes engines
fail at a later token each time therefore costs LOSSES_MAX + PASSES_MAX engines."""

FINGERPRINTS_MAX: Final = 4096
"""Size of the table; the request that was suspected first is forgotten when it is full."""

FINGERPRINT_BYTES: Final = 16


class _Suspicion:
    """The record of one request: when each replica lost its engine, and how many did.

    `lost_token` is the latest token at which one was lost, of the losses that still count.
    """

    __slots__ = (
        "last_lost_at_s", "losses", "lost_at_s", "lost_token", "passes_left", "tenant_id",
    )  # fmt: skip

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self.losses = 0
        self.lost_token = 0
        self.passes_left = PASSES_MAX
        self.last_lost_at_s = 0.0
        self.lost_at_s: dict[str, float] = {}

    def is_past(self, loss: EngineLoss) -> bool:
        """Return whether a request came further than where the last engine was lost with it."""
        last_token = loss.sent_token or self.lost_token
        return self.losses > 0 and loss.lost_token >= last_token + PROGRESS_TOKENS_MIN


class SuspectTable:
    """The requests that are suspected of making engines fail."""

    def __init__(self, digest_key: bytes, refusal_s: float) -> None:
        """Refuse for `refusal_s` after the last loss. `digest_key` has at most 64 bytes."""
        self._digest_key = digest_key
        self._refusal_s = refusal_s
        self._suspicions: dict[bytes, _Suspicion] = {}
        self._per_tenant: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._suspicions)

    def has_suspects_of(self, tenant_id: str) -> bool:
        """Return whether any request of a tenant is suspected: only then is a digest needed."""
        return tenant_id in self._per_tenant

    def fingerprint(self, tenant_id: str, deployment_id: str, path: str, body: bytes) -> bytes:
        """Return the keyed digest that identifies a request."""
        digest = blake2b(key=self._digest_key, digest_size=FINGERPRINT_BYTES)
        for part in (tenant_id, deployment_id, path):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(4, "big") + encoded)
        digest.update(body)
        return digest.digest()

    def record_loss(self, loss: EngineLoss) -> None:
        """Count a lost engine.

        Equal requests that ran on it together count it once: all were sent before it was lost.
        """
        self._expire(loss.fingerprint, loss.lost_at_s)
        suspicion = self._suspicions.get(loss.fingerprint)
        if suspicion is None:
            suspicion = self._add(loss)
        if loss.sent_at_s <= suspicion.lost_at_s.get(loss.replica_id, -inf):
            return
        if suspicion.passes_left and suspicion.is_past(loss):
            suspicion.passes_left -= 1
            suspicion.losses = suspicion.lost_token = 0
        suspicion.losses += 1
        suspicion.lost_token = max(suspicion.lost_token, loss.lost_token)
        suspicion.last_lost_at_s = loss.lost_at_s
        suspicion.lost_at_s[loss.replica_id] = loss.lost_at_s

    def record_answer(self, fingerprint: bytes) -> bool:
        """Clear a request that an engine answered; return whether it was suspected."""
        suspicion = self._suspicions.pop(fingerprint, None)
        if suspicion is None:
            return False
        left = self._per_tenant[suspicion.tenant_id] - 1
        if left:
            self._per_tenant[suspicion.tenant_id] = left
        else:
            del self._per_tenant[suspicion.tenant_id]
        return True

    def is_suspect(self, fingerprint: bytes, now_s: float) -> bool:
        """Return whether an engine was lost with this request lately."""
        self._expire(fingerprint, now_s)
        return fingerprint in self._suspicions

    def refused_for_s(self, fingerprint: bytes, now_s: float) -> float:
        """Return for how long the request is refused from now on, 0 if it may be sent."""
        suspicion = self._suspicions.get(fingerprint)
        if suspicion is None or suspicion.losses < LOSSES_MAX:
            return 0.0
        return max(0.0, suspicion.last_lost_at_s + self._refusal_s - now_s)

    def _add(self, loss: EngineLoss) -> _Suspicion:
        while len(self._suspicions) >= FINGERPRINTS_MAX:
            self.record_answer(next(iter(self._suspicions)))
        suspicion = self._suspicions[loss.fingerprint] = _Suspicion(loss.tenant_id)
        self._per_tenant[loss.tenant_id] = self._per_tenant.get(loss.tenant_id, 0) + 1
        return suspicion

    def _expire(self, fingerprint: bytes, now_s: float) -> None:
        """Forget a request that has lost no engine for as long as it would be refused."""
        suspicion = self._suspicions.get(fingerprint)
        if suspicion is not None and now_s >= suspicion.last_lost_at_s + self._refusal_s:
            self.record_answer(fingerprint)
