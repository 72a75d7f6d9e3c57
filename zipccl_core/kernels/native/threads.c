#include "threads.h"

#include <pthread.h>

/* Starting a thread takes 20 to 70 us, in which one encodes or decodes half of this. Tests set it lower, to have threads at all. */
#ifndef ZIPCCL_VALUES_PER_THREAD
#define ZIPCCL_VALUES_PER_THREAD (512 * 1024)
#endif

int zipccl_thread_count(int threads, uint64_t n) {
    uint64_t worthwhile = n / ZIPCCL_VALUES_PER_THREAD;
    uint64_t count = threads < 1 ? 1 : threads < ZIPCCL_MAX_THREADS ? (uint64_t)threads : ZIPCCL_MAX_THREADS;
    if (count > worthwhile)
        count = worthwhile;
    return count < 1 ? 1 : (int)count;
}

uint64_t zipccl_part_begin(uint64_t n, int n_parts, int index) {
    /* n is below 2^33 here and index at most 64, so the product fits */
    return n * (uint64_t)index / (uint64_t)n_parts;
}

struct call {
    void (*task)(void *context, int index);
    void *context;
    int index;
    int started;
    pthread_t thread;
};

static void *run(void *argument) {
    struct call *call = argument;
    call->task(call->context, call->index);
    return NULL;
}

void zipccl_parallel(void (*task)(void *context, int index), void *context, int n) {
    struct call calls[ZIPCCL_MAX_THREADS];
    for (int i = 1; i < n; i++) {
        calls[i] = (struct call){.task = task, .context = context, .index = i};
        calls[i].started = pthread_create(&calls[i].thread, NULL, run, &calls[i]) == 0;
    }
    task(context, 0);
    for (int i = 1; i < n; i++) {
        if (calls[i].started)
            pthread_join(calls[i].thread, NULL);
        else
            task(context, i);
    }
}
