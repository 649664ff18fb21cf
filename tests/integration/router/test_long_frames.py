"""What a frame costs does not depend on how many pieces it comes in."""

import time

from router.dataplane.sse import FRAME_BYTES_MAX, StreamRelay, data_frame

FRAME = data_frame({"choices": [{"delta": {"content": "x" * (FRAME_BYTES_MAX - 4096)}}]})


def cpu_s(piece_bytes: int) -> float:
    relay = StreamRelay(wants_usage=False)
    pieces = [FRAME[start : start + piece_bytes] for start in range(0, len(FRAME), piece_bytes)]
    began_s = time.process_time()
    received = [relay.feed(piece) for piece in pieces]
    took_s = time.process_time() - began_s
    assert b"".join(received) == FRAME
    return took_s


def test_a_long_frame_in_small_pieces_costs_about_as_much_as_in_large_ones() -> None:
    """Searched from its start with each piece, it took 60 times as long: 9 s."""
    large_s = min(cpu_s(64 * 1024) for _ in range(3))
    assert cpu_s(1024) < 20 * max(large_s, 0.01)
