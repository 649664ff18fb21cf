"""A simulated replica with a role: prompts that another replica reads, and gaps between tokens.

A sequence whose KV arrives begins to decode at once if there is memory for it, without a step that
reads. The time between two tokens is that of the step that gives the second one.
"""

from collections import Counter, deque
from math import inf
from typing import Final

from nodeagent.decide.requests.prefill_leg import ExpectedDecoding, TransferRate
from ops.sim.replica import SimulatedReplica, StepEvents
from ops.sim.replica_job import ReplicaJob
from ops.sim.world import ReplicaSite

GAPS_PER_S: Final = 10_000
"""Gaps are counted in tenths of a millisecond."""


class TransferredKv:
    """A link that moves KV in one direction, one transfer after the other."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    def end_s(self, began_s: float, at_s: float, size_bytes: float, last_bytes: float) -> float:
        """Return when KV has arrived that was computed from `began_s` until `at_s`.

        Blocks are sent while later ones are computed; the `last_bytes` come at the end.
        """
        begins_s = max(began_s, self._free_at_s)
        end_s = max(begins_s + size_bytes / self.bytes_per_s, at_s + last_bytes / self.bytes_per_s)
        self._free_at_s = end_s
        return end_s


class RoleReplica(SimulatedReplica):
    """A replica whose prompts another one may read; `gaps` counts tokens by the time before them.

    It also has the figures that its node knows for prefill legs: how many sequences decode while a
    prompt is read, and how fast KV arrives.
    """

    def __init__(self, site: ReplicaSite, link_bytes_per_s: float) -> None:
        super().__init__(site)
        self.gaps: Counter[int] = Counter()
        self.expected_decoding = ExpectedDecoding()
        self.transfer_rate = TransferRate()
        self.sending = TransferredKv(link_bytes_per_s)
        self.receiving = TransferredKv(link_bytes_per_s)
        self.waits_for_kv = 0
        self._arrived: deque[ReplicaJob] = deque()

    @property
    def decoding(self) -> int:
        """Number of requests whose prompt does not queue here, as the node counts them."""
        return self.running - len(self.queue) - (self.reading is not None)

    def admit_elsewhere(self, job: ReplicaJob, now_s: float, queue_tokens_max: int = 0) -> bool:
        """Admit a request whose prompt another replica reads."""
        tokens = self.prefill_tokens + self.decode_tokens
        if queue_tokens_max and self.queued_tokens(now_s) > queue_tokens_max:
            return False
        if self.running and tokens + job.needed_tokens > self.site.profile.kv_tokens_max:
            return False
        self._advance(now_s)
        job.pending_prefill_tokens = 0
        self.running += 1
        self.waits_for_kv += 1
        self.prefill_tokens += job.request.prompt_tokens
        self.decode_tokens += job.needed_tokens - job.request.prompt_tokens
        self._decode_by_pop[job.pop] += job.needed_tokens - job.request.prompt_tokens
        self._record_load(now_s)
        return True

    def read_here(self, job: ReplicaJob, now_s: float) -> None:
        """Queue a prompt that no other replica reads after all."""
        self._advance(now_s)
        self.waits_for_kv -= 1
        job.pending_prefill_tokens = job.request.prompt_tokens
        self.pending_prefill_tokens += job.pending_prefill_tokens
        self._pending_by_pop[job.pop] += job.pending_prefill_tokens
        job.admitted_s = now_s
        self.queue.append(job)
        if self.reading is None:
            self._read_next()
        self._record_load(now_s)

    def receive_kv(self, job: ReplicaJob, cached_tokens: int) -> None:
        """Take a sequence whose KV has arrived; it begins at the next `settle`."""
        job.cached_tokens = cached_tokens
        self._arrived.append(job)

    def settle(self, now_s: float) -> StepEvents:
        """Let time pass until now, then begin the sequences whose KV has arrived."""
        events = super().settle(now_s)
        began = False
        while self._arrived and self._can_begin(self._arrived[0]):
            job = self._arrived.popleft()
            began = True
            self.waits_for_kv -= 1
            self.prefill_tokens -= job.request.prompt_tokens
            job.began_s = now_s
            grown_tokens = self._grown_tokens()
            self._memory.trim(grown_tokens)
            self._memory.hold(job.request, 0)
            self._memory.put(job.request, grown_tokens)
            self._begin_decoding(job)
            job.first_token_at_s = now_s + 1.0 / self._decode_speed()
            events.first_tokens.append(job)
        if began:
            self._record_load(now_s)
        return events

    def next_event_s(self) -> float:
        """Return the time of the next event if nothing arrives."""
        at_s = super().next_event_s()
        return self._now_s if at_s == inf and self._arrived else at_s

    def _can_begin(self, job: ReplicaJob) -> bool:
        if len(self._decoding) >= self.site.profile.sequences_max:
            return False
        return not self._decoding or self._memory.has_room(job.request, 0, self._grown_tokens())

    def decode_share_s(self) -> float:
        """Return by how much one more sequence lengthens the steps of all that decode here."""
        profile = self.site.profile
        each_s = profile.step_per_sequence_s
        if self._decoding and profile.step_per_context_token_s:
            each_s = self._decodes_s() / len(self._decoding)
        return each_s * (len(self._decoding) + self.waits_for_kv)

    def _advance(self, now_s: float) -> None:
        took_s = now_s - self._now_s
        if took_s > 0 and self._decoding:
            speed = self._decode_speed()
            self.gaps[round(GAPS_PER_S / speed)] += round(1000 * took_s * speed) * len(
                self._decoding
            )
        super()._advance(now_s)
