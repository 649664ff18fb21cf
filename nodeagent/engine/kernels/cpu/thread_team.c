/* Work shared out among threads: to a pool's for one call, or to a team for a whole step.
 *
 * Each thread that computes has a pool of its own, made when it first needs one. The pool is ours
 * and not OpenMP's, so that the library needs nothing but libc: it is then built by any C compiler
 * and runs on any distribution.
 *
 * A thread that waits for the next piece of a step is asleep sooner than the piece comes, and waking
 * it takes longer than the piece does. A team's threads therefore stay awake for a step, and whoever
 * is free takes the next portion: one that the system has put aside for another process holds up
 * nothing but the portion it had begun.
 */

#include "kernels.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#define PATIENCE 2048 /* looks for work before others may have the processor */
#define AWAKE 20000   /* looks for work before a pool's thread sleeps: about half a millisecond */

/* What a pool runs: each of its threads calls it once, with its own index. */
typedef void job(void *argument, int64_t index);

struct pool {
    pid_t process; /* threads do not survive a fork: a child makes its own */
    int64_t size;  /* threads besides the caller */
    pthread_t *threads;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* Which job it is. It changes under the lock, when every thread has finished the one before. */
    _Atomic uint64_t number;
    _Atomic int64_t unfinished;
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

static __thread struct pool *pool_here;
static pthread_key_t pool_key;
static pthread_once_t pool_key_once = PTHREAD_ONCE_INIT;

/* Wait until there is a job after `seen`; return its number. */
static uint64_t await_job(struct pool *pool, uint64_t seen) {
    uint64_t number;
    for (int64_t looks = 0; looks < AWAKE; looks++) {
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

static void *serve(void *argument) {
    struct member member = *(struct member *)argument;
    struct pool *pool = member.pool;
    free(argument);
    for (uint64_t seen = member.seen;;) {
        seen = await_job(pool, seen);
        if (pool->stopping) return NULL;
        if (member.index < pool->wanted) pool->job(pool->argument, member.index);
        atomic_fetch_sub_explicit(&pool->unfinished, 1, memory_order_release);
    }
}

static void announce(struct pool *pool) {
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
    announce(pool);
    for (int64_t i = 0; i < pool->size; i++) pthread_join(pool->threads[i], NULL);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->wake);
    free(pool->threads);
    free(pool);
}

static void make_key(void) { pthread_key_create(&pool_key, end_pool); }

/* Start threads until the pool has `size`. It stays smaller where the system allows no more. */
static void grow(struct pool *pool, int64_t size) {
    pthread_t *threads = realloc(pool->threads, size * sizeof *threads);
    if (threads == NULL) return;
    pool->threads = threads;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of Python */
    while (pool->size < size) {
        struct member *member = malloc(sizeof *member);
        if (member == NULL) break;
        *member = (struct member){pool, pool->size + 1, atomic_load(&pool->number)};
        if (pthread_create(&pool->threads[pool->size], NULL, serve, member) != 0) {
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
        pthread_mutex_init(&pool->lock, NULL);
        pthread_cond_init(&pool->wake, NULL);
        pthread_setspecific(pool_key, pool);
        pool_here = pool;
    }
    if (pool->size < threads - 1) grow(pool, threads - 1);
    return pool;
}

/* Call `run` on so many threads at once, this one with index 0; return when all have returned.
 * Fewer take part where the system has no more threads: a job may not rely on their number. */
static void on_threads(int64_t threads, job *run, void *argument) {
    struct pool *pool = pool_of(threads);
    if (pool == NULL || pool->size == 0) {
        run(argument, 0);
        return;
    }
    pool->job = run;
    pool->argument = argument;
    pool->wanted = threads;
    atomic_store_explicit(&pool->unfinished, pool->size, memory_order_relaxed);
    announce(pool);
    run(argument, 0);
    int64_t looks = 0;
    while (atomic_load_explicit(&pool->unfinished, memory_order_acquire) > 0) rest(&looks);
}

struct loop {
    work *work;
    const void *told;
    int64_t count, portions;
    _Atomic int64_t next;
};

static void run_loop(void *argument, int64_t index) {
    struct loop *loop = argument;
    (void)index;
    for (int64_t portion; (portion = atomic_fetch_add_explicit(&loop->next, 1, memory_order_relaxed)) < loop->portions;)
        loop->work(loop->told, loop->count * portion / loop->portions,
                   loop->count * (portion + 1) / loop->portions);
}

void share(work *work, const void *told, int64_t count, int64_t portions, int64_t threads) {
    struct team *team = team_here;
    if (portions > count) portions = count;
    if (portions < 2 || threads == 1) {
        work(told, 0, count);
    } else if (team == NULL) {
        struct loop loop = {work, told, count, portions, 0};
        on_threads(threads, run_loop, &loop);
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

struct step {
    struct team team;
    void (*lead)(void *);
    void *told;
};

static void run_step(void *argument, int64_t index) {
    struct step *step = argument;
    if (index == 0) {
        team_here = &step->team;
        step->lead(step->told);
        team_here = NULL;
        atomic_store_explicit(&step->team.over, 1, memory_order_release);
    } else {
        int64_t looks = 0;
        while (!atomic_load_explicit(&step->team.over, memory_order_acquire))
            if (!take(&step->team)) rest(&looks);
    }
}

/* Call `lead` with a team of so many threads, this one among them. */
void with_team(int64_t threads, void (*lead)(void *), void *told) {
    if (threads == 1) {
        lead(told);
        return;
    }
    struct step step = {.lead = lead, .told = told};
    on_threads(threads, run_step, &step);
}
