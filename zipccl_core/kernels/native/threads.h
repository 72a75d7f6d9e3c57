/* Threads that live for one call: a pool would not survive fork(). */
#ifndef ZIPCCL_THREADS_H
#define ZIPCCL_THREADS_H

#include <stdint.h>

enum { ZIPCCL_MAX_THREADS = 64 };

/* How many of `threads` to use on n values: few enough that each has more to do than starting it costs. */
int zipccl_thread_count(int threads, uint64_t n);

/* Where part `index` of `n_parts` of n items begins; part n_parts "begins" at n. */
uint64_t zipccl_part_begin(uint64_t n, int n_parts, int index);

/* Calls task(context, i) for i in 0..n-1 at the same time, task 0 on the calling thread, and returns when all have returned.
 * n is at most ZIPCCL_MAX_THREADS. Where a thread cannot be started, the calling thread does its work too. */
void zipccl_parallel(void (*task)(void *context, int index), void *context, int n);

#endif
