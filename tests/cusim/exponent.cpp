// The kernels of cuda/exponent.cu (or of the file that KERNELS names) as functions of a library.
#include "cusim.h"

#ifndef KERNELS
#define KERNELS "../../cuda/exponent.cu"
#endif
#include KERNELS

CUSIM_EXPORT(zipccl_exponent_encode)
CUSIM_EXPORT(zipccl_exponent_raw)
CUSIM_EXPORT(zipccl_exponent_decode)
CUSIM_EXPORT(zipccl_exponent_decode_reduce)

extern "C" const unsigned cusim_values_per_thread_block = BLOCK * BLOCKS_PER_THREAD_BLOCK;

// Mistakes that the simulator must report: 0 a barrier that half of the threads never reach, 1 lanes that meet at different
// collectives, 2 a wait for somebody who never comes, 3 an asynchronous copy that is misaligned; and only with CUSIM_RACE: 4
// threads of two warps without a barrier, 5 lanes of a warp without __syncwarp, 6 a read and then a write, 7 two thread blocks, 8
// an access that is misaligned. 9 and 10 are no mistakes: what 4 and 5 lack is there.
extern "C" int cusim_mistake(int which, char *error, unsigned error_nbytes) {
    static volatile u32 never = 0;
    static u64 shared_by_blocks[2];
    const auto kernel = [=] {
        __shared__ u32 words[64];
        const u32 thread = threadIdx.x, other = which == 5 || which == 10 ? thread ^ 1 : thread ^ 32;
        if (which == 0 && thread < 32)
            __syncthreads();
        if (which == 1 && thread % 2 == 0)
            __ballot_sync(ALL, 1);
        if (which == 1)
            __syncwarp();
        while (which == 2 && never == 0)
            __nanosleep(1);
        if (which == 3)
            __pipeline_memcpy_async((char *)words + 2, shared_by_blocks, 4);
        if (which == 4 || which == 5 || which == 9 || which == 10) {
            words[thread] = thread;
            if (which == 5)
                __ballot_sync(ALL, 1); // no memory barrier
            if (which == 9)
                __syncthreads();
            if (which == 10)
                __syncwarp();
            ((volatile u64 *)shared_by_blocks)[0] = words[other];
        }
        if (which == 6) {
            ((volatile u64 *)shared_by_blocks)[0] = words[0];
            if (thread == 33)
                words[0] = 1;
        }
        if (which == 7 && thread == 0)
            shared_by_blocks[0] = blockIdx.x;
        if (which == 8 && thread == 0)
            *(u32 *)((char *)shared_by_blocks + 2 + never) = 1; // so that the compiler does not see it
    };
    return cusim::report(cusim::launch({2, 64, 2, false}, kernel), error, error_nbytes);
}
