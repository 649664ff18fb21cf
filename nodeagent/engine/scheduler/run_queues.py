"""The waiting queue and the running set, and how sequences move between them.

Queue and set are sorted by `queue_order`. A preempted sequence returns its blocks and goes back to
its old position in the waiting queue.
"""

from bisect import insort
from collections import Counter

from nodeagent.engine.scheduler.fair_queue import VirtualClock
from nodeagent.engine.scheduler.sequence import Sequence, queue_order, sequence_count
from nodeagent.engine.scheduler.sequence_blocks import SequenceBlocks


class RunQueues:
    """The sequences of the engine: waiting or running."""

    def __init__(
        self, blocks: SequenceBlocks, sequences_max: int, virtual_clock: VirtualClock
    ) -> None:
        self.blocks = blocks
        self.virtual_clock = virtual_clock
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._sequences_max = sequences_max

    @property
    def free_sequence_slots(self) -> int:
        """How many more sequences may run."""
        return self._sequences_max - sequence_count(self.running)

    @property
    def decoding_count(self) -> int:
        """How many sequences decode, those in a batch in flight included."""
        return sum(s.is_decoding or not s.pending_tokens for s in self.running)

    @property
    def pending_prompt_tokens(self) -> int:
        """How many prompt tokens of the running sequences are not computed yet."""
        return sum(s.pending_tokens for s in self.running if not s.is_decoding)

    def running_by_tenant(self) -> Counter[bytes]:
        """Return how many sequences run, by tenant."""
        return Counter(sequence.scheduling.tenant for sequence in self.running)

    def enqueue(self, sequence: Sequence) -> None:
        """Add `sequence` to the waiting queue."""
        insort(self.waiting, sequence, key=queue_order)

    def exchange_by_due(self, now_s: float) -> None:
        """Let waiting sequences exchange positions, so that the one due first is served first.

        Only those of one tenant and priority do, and none that was preempted after its first token.
        """
        if not any(s.scheduling.objective.due_s is not None for s in self.waiting):
            return
        groups: dict[tuple[bytes, int], list[Sequence]] = {}
        for sequence in self.waiting:
            if not sequence.output_tokens:
                params = sequence.scheduling
                groups.setdefault((params.tenant, params.priority), []).append(sequence)
        for group in groups.values():
            positions = [queue_order(sequence) for sequence in group]
            group.sort(key=lambda s: (s.scheduling.objective.counts_due_s(now_s), s.number))
            for sequence, (virtual_start, queue_number) in zip(group, positions, strict=True):
                sequence.virtual_start, sequence.queue_number = virtual_start, queue_number
        self.waiting.sort(key=queue_order)

    def start(self, sequence: Sequence) -> None:
        """Move a waiting `sequence`, which has its blocks, to the running set."""
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=queue_order)
        self.virtual_clock.record_admitted(sequence.scheduling, sequence.virtual_start)

    def start_fork(self, sequence: Sequence) -> None:
        """Add a fork, which was never in the waiting queue, to the running set."""
        insort(self.running, sequence, key=queue_order)

    def preempt(self, sequence: Sequence) -> None:
        """Move a running `sequence` back to the waiting queue, without its blocks."""
        self.running.remove(sequence)
        self.blocks.release(sequence)
        self.preemptions += 1
        self.enqueue(sequence)

    def preempt_last(self) -> Sequence:
        """Preempt and return the running sequence that is last in the fair queue."""
        last = self.running[-1]
        self.preempt(last)
        return last

    def remove(self, sequence: Sequence) -> None:
        """Remove a finished or cancelled `sequence` and release its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self.blocks.release(sequence)

    def remove_late(self, now_s: float) -> tuple[Sequence, ...]:
        """Remove and return the sequences without output whose deadlines have passed."""
        late = tuple(
            sequence
            for sequence in (*self.waiting, *self.running)
            if sequence.scheduling.deadline_s is not None
            and sequence.scheduling.deadline_s <= now_s
            and not sequence.output_tokens
        )
        for sequence in late:
            self.remove(sequence)
        return late
