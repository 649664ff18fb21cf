/* For how long stream_pump.c lets tokens gather. Pure.
 *
 * Waking the thread costs about as much as relaying two tokens. While few tokens come, it wakes for
 * each. While many come, it sleeps until about TOKENS_PER_WAKE have come, so that a wake-up is a small
 * share of their cost; a token waits for at most `most_ns`.
 */
#include <stdint.h>

enum { TOKENS_PER_WAKE = 16, TOKENS_PER_PAUSE_MIN = 2 };
static const int64_t WINDOW_NS = 100000000; /* the rate of tokens is counted over this time */

struct gathering {
    int64_t most_ns;
    int64_t pause_ns; /* 0: wake for each token */
    int64_t window_began_ns, window_reads;
};

/* Sets the pause, after `reads` streams had tokens. */
static void count_reads(struct gathering *gathering, int64_t reads, int64_t now_ns) {
    int64_t elapsed_ns = now_ns - gathering->window_began_ns;
    gathering->window_reads += reads;
    if (elapsed_ns < WINDOW_NS) return;
    int64_t tokens = gathering->window_reads, most_ns = gathering->most_ns;
    /* The timer that ends a pause costs more than a token that wakes the thread: of fewer tokens in
     * the longest pause nothing is saved. */
    int is_gathering = tokens * most_ns >= TOKENS_PER_PAUSE_MIN * elapsed_ns;
    int64_t enough_ns = is_gathering ? TOKENS_PER_WAKE * elapsed_ns / tokens : 0;
    gathering->pause_ns = enough_ns < most_ns ? enough_ns : most_ns;
    gathering->window_began_ns = now_ns;
    gathering->window_reads = 0;
}
