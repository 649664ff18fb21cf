/* The threads of the kernels, of which no new one gets a processor until the test gives it one. */

#include <pthread.h>
#include <semaphore.h>

static sem_t processors;
static void *(*begin)(void *);

__attribute__((constructor)) static void make_processors(void) { sem_init(&processors, 0, 0); }

static void *run_late(void *argument) {
    sem_wait(&processors);
    return begin(argument);
}

static int create_late(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                       void *argument) {
    begin = run;
    return pthread_create(thread, attributes, run_late, argument);
}

#define pthread_create create_late
#include "thread_team.c"

static void count(const void *counters, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) (*(int64_t *const *)counters)[i]++;
}

/* Add one to each counter, on `threads`. */
void count_on(int64_t threads, int64_t *counters, int64_t size) {
    parallel_for(count, &counters, size, 8, threads);
}

struct lead {
    int64_t *counters, size;
};

static void lead(void *argument) {
    struct lead *lead = argument;
    for (int i = 0; i < 3; i++) count_on(2, lead->counters, lead->size);
}

/* Add three to each counter, in three parts of one step. */
void count_in_step(int64_t threads, int64_t *counters, int64_t size) {
    struct lead arguments = {counters, size};
    with_team(threads, lead, &arguments);
}

void give_processor(void) { sem_post(&processors); }
