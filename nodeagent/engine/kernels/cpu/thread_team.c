/* Runs work on threads: on those of a pool for one call, or on a team that stays awake for a step.
 *
 * Each thread that computes has a pool of its own, made when it first needs one. OpenMP is not
 * used, so that the library needs only libc, is built by any C compiler and runs on any
 * distribution.
 *
 * A thread that waits for the next part of a step would fall asleep before the part comes, and
 * waking it takes longer than the part itself. The threads of a team therefore spin during a step.
 * Each free thread takes the next portion, so that a thread that the system has suspended delays
 * only the portion it had started. For the same reason a call waits for no thread of a pool that
 * has not begun: on a machine with other work, waking it may take as long as a hundred such calls.
 */

#include "kernels.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define SPINS_BEFORE_YIELD 2048
#define SPINS_BEFORE_SLEEP 20000 /* of a thread of a pool: about half a millisecond */

#define CLOSED (INT64_MIN / 2)

/* Run by a pool: its caller calls it with index 0, each thread that is awake in time with its own.
 * A thread may call it again: it must find no work then. */
typedef void job(void *argument, int64_t index);

struct pool {
    pid_t process; /* threads do not survive a fork: a child makes a pool of its own */
    int64_t size;  /* threads besides the caller */
    pthread_t *threads;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    _Atomic uint64_t number; /* of the job; it changes under the lock */
    /* How many threads run the job; CLOSED is added once no other may begin. The job changes only
     * while this is CLOSED. */
    _Atomic int64_t running;
    job *job;
    void *argument;
    int64_t wanted; /* threads that run this job, the caller among them */
    int stopping;
};

struct member {
    struct pool *pool;
    int64_t index;
    uint64_t seen;
};

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

static __thread struct pool *pool_here;
static pthread_key_t pool_key;
static pthread_once_t pool_key_once = PTHREAD_ONCE_INIT;

/* Wait for a job after number `seen`; return its number. */
static uint64_t await_job(struct pool *pool, uint64_t seen) {
    uint64_t number;
    for (int64_t spins = 0; spins < SPINS_BEFORE_SLEEP; spins++) {
        number = atomic_load_explicit(&pool->number, memory_order_acquire);
        if (number != seen) return number;
        _mm_pause();
    }
    pthread_mutex_lock(&pool->lock);
    while ((number = atomic_load_explicit(&pool->number, memory_order_acquire)) == seen)
        pthread_cond_wait(&pool->wake, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    return number;
}

/* Begin to run the job, whichever it is now; return 0 if it is closed. */
static int begin_job(struct pool *pool) {
    int64_t running = atomic_load_explicit(&pool->running, memory_order_relaxed);
    while (running >= 0)
        if (atomic_compare_exchange_weak_explicit(&pool->running, &running, running + 1,
                                                  memory_order_acquire, memory_order_relaxed))
            return 1;
    return 0;
}

static void *pool_thread(void *argument) {
    struct member member = *(struct member *)argument;
    struct pool *pool = member.pool;
    free(argument);
    for (uint64_t seen = member.seen;;) {
        seen = await_job(pool, seen);
        if (pool->stopping) return NULL;
        if (!begin_job(pool)) continue;
        if (member.index < pool->wanted) pool->job(pool->argument, member.index);
        atomic_fetch_sub_explicit(&pool->running, 1, memory_order_release);
    }
}

static void publish_job(struct pool *pool) {
    pthread_mutex_lock(&pool->lock);
    atomic_fetch_add_explicit(&pool->number, 1, memory_order_release);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
}

/* Called when the thread that owns the pool ends. */
static void end_pool(void *argument) {
    struct pool *pool = argument;
    if (pool->process != getpid()) return;
    pool->stopping = 1;
    publish_job(pool);
    for (int64_t i = 0; i < pool->size; i++) pthread_join(pool->threads[i], NULL);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->wake);
    free(pool->threads);
    free(pool);
}

static void make_key(void) { pthread_key_create(&pool_key, end_pool); }

/* Start threads until the pool has `size`; it stays smaller if the system allows no more. */
static void grow(struct pool *pool, int64_t size) {
    pthread_t *threads = realloc(pool->threads, size * sizeof *threads);
    if (threads == NULL) return;
    pool->threads = threads;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* Python's threads handle signals */
    while (pool->size < size) {
        struct member *member = malloc(sizeof *member);
        if (member == NULL) break;
        *member = (struct member){pool, pool->size + 1, atomic_load(&pool->number)};
        if (pthread_create(&pool->threads[pool->size], NULL, pool_thread, member) != 0) {
            free(member);
            break;
        }
        pool->size++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static struct pool *pool_of(int64_t threads) {
    struct pool *pool = pool_here;
    if (pool == NULL || pool->process != getpid()) {
        pthread_once(&pool_key_once, make_key);
        pool = calloc(1, sizeof *pool);
        if (pool == NULL) return NULL;
        pool->process = getpid();
        atomic_store(&pool->running, CLOSED);
        pthread_mutex_init(&pool->lock, NULL);
        pthread_cond_init(&pool->wake, NULL);
        pthread_setspecific(pool_key, pool);
        pool_here = pool;
    }
    if (pool->size < threads - 1) grow(pool, threads - 1);
    return pool;
}

/* Call `run` on `threads` threads at once, this one with index 0; return when all that have begun
 * have returned. There may be fewer, so a job must not rely on their number. */
static void on_threads(int64_t threads, job *run, void *argument) {
    struct pool *pool = pool_of(threads);
    if (pool == NULL || pool->size == 0) {
        run(argument, 0);
        return;
    }
    pool->job = run;
    pool->argument = argument;
    pool->wanted = threads;
    /* Before its number is there: a thread that finds the job closed waits for the next one. */
    atomic_store_explicit(&pool->running, 0, memory_order_release);
    publish_job(pool);
    run(argument, 0);
    atomic_fetch_add_explicit(&pool->running, CLOSED, memory_order_acq_rel);
    int64_t spins = 0;
    while (atomic_load_explicit(&pool->running, memory_order_acquire) != CLOSED) spin(&spins);
}

struct loop {
    work *work;
    const void *arguments;
    int64_t count, portions;
    _Atomic int64_t next;
};

static void run_loop(void *argument, int64_t index) {
    struct loop *loop = argument;
    (void)index;
    for (int64_t portion; (portion = atomic_fetch_add_explicit(
                               &loop->next, 1, memory_order_relaxed)) < loop->portions;)
        loop->work(loop->arguments, loop->count * portion / loop->portions,
                   loop->count * (portion + 1) / loop->portions);
}

void parallel_for(work *work, const void *arguments, int64_t count, int64_t portions,
                  int64_t threads) {
    struct team *team = team_here;
    if (portions > count) portions = count;
    if (portions < 2 || threads == 1) {
        work(arguments, 0, count);
    } else if (team == NULL) {
        struct loop loop = {work, arguments, count, portions, 0};
        on_threads(threads, run_loop, &loop);
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

struct step {
    struct team team;
    void (*lead)(void *);
    void *arguments;
};

static void run_step(void *argument, int64_t index) {
    struct step *step = argument;
    if (index == 0) {
        team_here = &step->team;
        step->lead(step->arguments);
        team_here = NULL;
        atomic_store_explicit(&step->team.over, 1, memory_order_release);
    } else {
        int64_t spins = 0;
        while (!atomic_load_explicit(&step->team.over, memory_order_acquire))
            if (!take_portion(&step->team)) spin(&spins);
    }
}

void with_team(int64_t threads, void (*lead)(void *), void *arguments) {
    if (threads == 1) {
        lead(arguments);
        return;
    }
    struct step step = {.lead = lead, .arguments = arguments};
    on_threads(threads, run_step, &step);
}
