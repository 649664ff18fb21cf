/* Runs work on threads: on OpenMP's for one call, or on a team that stays awake for a whole
 * step.
 *
 * A thread that waits for the next part of a step would fall asleep before the part comes, and
 * waking it takes longer than the part itself. The threads of a team therefore spin during a
 * step. Each free thread takes the next portion, so that a thread that the system has suspended
 * delays only the portion it had started.
 */

#include "kernels.h"

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

#define SPINS_BEFORE_YIELD 2048

struct team {
    /* Upper half: the number of the current work. Lower half: its portions that are not taken. */
    _Atomic uint64_t open;
    _Atomic int64_t done;
    _Atomic int over;
    /* The current work. It changes only when all its portions are done. */
    work *work;
    const void *arguments;
    int64_t count, portions;
};

static __thread struct team *team_here;

static void spin(int64_t *spins) {
    _mm_pause();
    if (++*spins % SPINS_BEFORE_YIELD == 0) sched_yield();
}

/* Process one portion; return 0 if none is left. */
static int take_portion(struct team *team) {
    uint64_t open = atomic_load_explicit(&team->open, memory_order_acquire);
    uint32_t left = (uint32_t)open;
    if (left == 0) return 0;
    if (!atomic_compare_exchange_strong_explicit(&team->open, &open, open - 1, memory_order_acq_rel,
                                                 memory_order_acquire))
        return 1;
    int64_t portion = team->portions - left;
    team->work(team->arguments, team->count * portion / team->portions,
               team->count * (portion + 1) / team->portions);
    atomic_fetch_add_explicit(&team->done, 1, memory_order_release);
    return 1;
}

void share(work *work, const void *arguments, int64_t count, int64_t portions, int64_t threads) {
    struct team *team = team_here;
    if (portions > count) portions = count;
    if (portions < 2 || threads == 1) {
        work(arguments, 0, count);
    } else if (team == NULL) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (int64_t portion = 0; portion < portions; portion++)
            work(arguments, count * portion / portions, count * (portion + 1) / portions);
    } else {
        team->work = work;
        team->arguments = arguments;
        team->count = count;
        team->portions = portions;
        atomic_store_explicit(&team->done, 0, memory_order_relaxed);
        uint64_t number = (team->open >> 32) + 1;
        atomic_store_explicit(&team->open, number << 32 | (uint64_t)portions, memory_order_release);
        int64_t spins = 0;
        while (take_portion(team)) continue;
        while (atomic_load_explicit(&team->done, memory_order_acquire) < portions) spin(&spins);
    }
}

void with_team(int64_t threads, void (*lead)(void *), void *arguments) {
    if (threads == 1) {
        lead(arguments);
        return;
    }
    struct team team = {.open = 0};
#pragma omp parallel num_threads(threads)
    if (omp_get_thread_num() == 0) {
        team_here = &team;
        lead(arguments);
        team_here = NULL;
        atomic_store_explicit(&team.over, 1, memory_order_release);
    } else {
        int64_t spins = 0;
        while (!atomic_load_explicit(&team.over, memory_order_acquire))
            if (!take_portion(&team)) spin(&spins);
    }
}
