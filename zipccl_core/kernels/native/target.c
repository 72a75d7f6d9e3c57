#include "target.h"

#include <stdatomic.h>
#include <string.h>

#include "exponent.h"

static _Atomic(const struct block_kernels *) forced; /* NULL: the best */

static const struct block_kernels *best(void) {
#ifdef ZIPCCL_HAVE_AVX2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
        __builtin_cpu_supports("popcnt"))
        return &zipccl_block_avx2;
#endif
    return &zipccl_block_portable;
}

const struct block_kernels *zipccl_kernels(void) {
    const struct block_kernels *kernels = atomic_load_explicit(&forced, memory_order_relaxed);
    return kernels != NULL ? kernels : best();
}

int zipccl_kernels_avx2(void) { return zipccl_kernels() != &zipccl_block_portable; }

const char *zipccl_kernels_target(void) { return zipccl_kernels()->name; }

int zipccl_kernels_force(const char *name) {
    const struct block_kernels *kernels = NULL;
    if (strcmp(name, "portable") == 0)
        kernels = &zipccl_block_portable;
    else if (strcmp(name, "auto") != 0 && strcmp(name, best()->name) != 0)
        return -1;
    atomic_store_explicit(&forced, kernels, memory_order_relaxed);
    return 0;
}
