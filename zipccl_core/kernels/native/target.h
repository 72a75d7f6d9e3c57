/* Which target serves this machine. */
#ifndef ZIPCCL_TARGET_H
#define ZIPCCL_TARGET_H

#include "block.h"

/* The kernels in use: the best that the machine has, or what zipccl_kernels_force has set. */
const struct block_kernels *zipccl_kernels(void);

/* Whether they may use AVX2. */
int zipccl_kernels_avx2(void);

#endif
