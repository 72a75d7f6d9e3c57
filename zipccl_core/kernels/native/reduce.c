/* The sum of bfloat16 tensors in fp32, and its rounding. The loops are left to the compiler's vectoriser, once for each target.
 *
 * Additions and quotients are IEEE single precision, one operation each, so that the targets agree; where NaNs meet, the payload
 * of the sum is not specified, and rounding makes all NaNs the same. */
#include <string.h>

#include "block.h"
#include "exponent.h"
#include "target.h"
#include "threads.h"

SHARED float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

SHARED uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

SHARED uint16_t bf16_of_bits(uint32_t bits) {
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

SHARED void add(const uint16_t *restrict values, uint64_t n, float *restrict sum, int first) {
    if (first) {
        for (uint64_t i = 0; i < n; i++)
            sum[i] = float_of_bits((uint32_t)values[i] << 16);
    } else {
        for (uint64_t i = 0; i < n; i++)
            sum[i] += float_of_bits((uint32_t)values[i] << 16);
    }
}

SHARED void divide_round(const float *restrict sum, uint64_t n, float divisor, uint16_t *restrict out) {
    if (divisor == 1.0f) {
        for (uint64_t i = 0; i < n; i++)
            out[i] = bf16_of_bits(bits_of_float(sum[i]));
    } else {
        for (uint64_t i = 0; i < n; i++)
            out[i] = bf16_of_bits(bits_of_float(sum[i] / divisor));
    }
}

static void add_portable(const uint16_t *values, uint64_t n, float *sum, int first) { add(values, n, sum, first); }

static void divide_round_portable(const float *sum, uint64_t n, float divisor, uint16_t *out) {
    divide_round(sum, n, divisor, out);
}

#ifdef ZIPCCL_HAVE_AVX2
TARGET_AVX2 static void add_avx2(const uint16_t *values, uint64_t n, float *sum, int first) { add(values, n, sum, first); }

TARGET_AVX2 static void divide_round_avx2(const float *sum, uint64_t n, float divisor, uint16_t *out) {
    divide_round(sum, n, divisor, out);
}
#else
#define add_avx2 add_portable
#define divide_round_avx2 divide_round_portable
#endif

struct reduce_call {
    const uint16_t *values;
    float *sum;
    const float *summed;
    uint16_t *out;
    uint64_t n;
    float divisor;
    int first, avx2, n_parts;
};

static void add_part(void *context, int index) {
    const struct reduce_call *call = context;
    uint64_t begin = zipccl_part_begin(call->n, call->n_parts, index);
    uint64_t n = zipccl_part_begin(call->n, call->n_parts, index + 1) - begin;
    (call->avx2 ? add_avx2 : add_portable)(call->values + begin, n, call->sum + begin, call->first);
}

static void divide_round_part(void *context, int index) {
    const struct reduce_call *call = context;
    uint64_t begin = zipccl_part_begin(call->n, call->n_parts, index);
    uint64_t n = zipccl_part_begin(call->n, call->n_parts, index + 1) - begin;
    (call->avx2 ? divide_round_avx2 : divide_round_portable)(call->summed + begin, n, call->divisor, call->out + begin);
}

void zipccl_bf16_accumulate(const uint16_t *values, uint64_t n, float *sum, int first, int threads) {
    struct reduce_call call = {.values = values, .sum = sum, .n = n, .first = first};
    call.avx2 = zipccl_kernels_avx2();
    call.n_parts = zipccl_thread_count(threads, n);
    zipccl_parallel(add_part, &call, call.n_parts);
}

void zipccl_bf16_round(const float *sum, uint64_t n, float divisor, uint16_t *out, int threads) {
    struct reduce_call call = {.summed = sum, .out = out, .n = n, .divisor = divisor};
    call.avx2 = zipccl_kernels_avx2();
    call.n_parts = zipccl_thread_count(threads, n);
    zipccl_parallel(divide_round_part, &call, call.n_parts);
}
