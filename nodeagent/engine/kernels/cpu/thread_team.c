/* Work shared out among threads: to OpenMP's for one call, or to a team for a whole step.
 *
 * A thread that waits for the next piece of a step is asleep sooner than the piece comes, and waking
 * it takes longer than the piece does. A team's threads therefore stay awake for a step, and whoever
 * is free takes the next portion: one that the system has put aside for another process holds up
 * nothing but the portion it had begun.
 */

#include "kernels.h"

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

#define PATIENCE 2048 /* looks for work before others may have the processor */

struct team {
    /* Which work it is, and in the lower half how many of its portions nobody has taken. */
    _Atomic uint64_t open;
    _Atomic int64_t done;
    _Atomic int over;
    /* The work itself: it changes only when all its portions are done. */
    work *work;
    const void *told;
    int64_t count, portions;
};

static __thread struct team *team_here;

static void rest(int64_t *looks) {
    _mm_pause();
    if (++*looks % PATIENCE == 0) sched_yield();
}

/* Do one portion, if there is one. */
static int take(struct team *team) {
    uint64_t open = atomic_load_explicit(&team->open, memory_order_acquire);
    uint32_t left = (uint32_t)open;
    if (left == 0) return 0;
    if (!atomic_compare_exchange_strong_explicit(&team->open, &open, open - 1, memory_order_acq_rel,
                                                 memory_order_acquire))
        return 1;
    int64_t portion = team->portions - left;
    team->work(team->told, team->count * portion / team->portions,
               team->count * (portion + 1) / team->portions);
    atomic_fetch_add_explicit(&team->done, 1, memory_order_release);
    return 1;
}

void share(work *work, const void *told, int64_t count, int64_t portions, int64_t threads) {
    struct team *team = team_here;
    if (portions > count) portions = count;
    if (portions < 2 || threads == 1) {
        work(told, 0, count);
    } else if (team == NULL) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (int64_t portion = 0; portion < portions; portion++)
            work(told, count * portion / portions, count * (portion + 1) / portions);
    } else {
        team->work = work;
        team->told = told;
        team->count = count;
        team->portions = portions;
        atomic_store_explicit(&team->done, 0, memory_order_relaxed);
        uint64_t number = (team->open >> 32) + 1;
        atomic_store_explicit(&team->open, number << 32 | (uint64_t)portions, memory_order_release);
        int64_t looks = 0;
        while (take(team)) continue;
        while (atomic_load_explicit(&team->done, memory_order_acquire) < portions) rest(&looks);
    }
}

/* Call `lead` with a team of so many threads, this one among them. */
void with_team(int64_t threads, void (*lead)(void *), void *told) {
    if (threads == 1) {
        lead(told);
        return;
    }
    struct team team = {.open = 0};
#pragma omp parallel num_threads(threads)
    if (omp_get_thread_num() == 0) {
        team_here = &team;
        lead(told);
        team_here = NULL;
        atomic_store_explicit(&team.over, 1, memory_order_release);
    } else {
        int64_t looks = 0;
        while (!atomic_load_explicit(&team.over, memory_order_acquire))
            if (!take(&team)) rest(&looks);
    }
}
