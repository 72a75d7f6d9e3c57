/* CPU kernels of the codec `exponent` (bfloat16), section 3 of docs/wire-format.md, and of the fp32 reduction.
 *
 * Every buffer is the caller's; nothing is kept between calls. A call may start threads and temporarily allocate memory, and has
 * ended both when it returns, so a process may fork between calls. All functions are thread-safe, except that
 * zipccl_kernels_force is meant for tests and changes the target of later calls in the whole process.
 *
 * Results do not depend on `threads` or on the target. `threads` is an upper bound, from 1; fewer are used on little work.
 *
 * bfloat16 values are passed as their bits, aligned to 2 bytes; the two parts of a frame need no alignment. Buffers of one call
 * must not overlap. */
#ifndef ZIPCCL_EXPONENT_H
#define ZIPCCL_EXPONENT_H

#include <stdint.h>

#define ZIPCCL_MAX_NUMEL UINT64_C(0xffffffff)

/* What zipccl_exponent_decode can find wrong with a frame. */
enum zipccl_error {
    ZIPCCL_OK = 0,
    ZIPCCL_BAD_OFFSET,       /* the first offset is not 0, or an offset lies before its predecessor or behind n_escapes */
    ZIPCCL_BAD_MODE,         /* a reserved mode */
    ZIPCCL_BAD_BASE,         /* a base that the block's mode does not allow */
    ZIPCCL_BAD_ESCAPE_COUNT, /* the planes of a block hold more or fewer escapes than the offsets say */
    ZIPCCL_BAD_FILLER,       /* the last block is filled up with something else than sign-mantissa 0, code 7 */
    ZIPCCL_MISSING_TABLE,    /* a block of mode 2, and no table */
    ZIPCCL_N_ERRORS
};

/* The message for a code of zipccl_exponent_decode, for the user: static storage, never NULL. */
const char *zipccl_error_message(int code);

/* Encodes values[0..numel) into the two parts of a frame.
 *
 * numel             at most ZIPCCL_MAX_NUMEL
 * static_part       offsets | meta | blocks: static_nbytes bytes, all of which are written
 * dynamic           the escapes; zeros from their number on to the next multiple of 128. May be NULL where the capacity is 0
 * dynamic_capacity  bytes at `dynamic`, a multiple of 128
 * fixed_base        the base of every block (0..249, mode 0), or -1: base and mode are chosen block by block
 * table             NULL, or seven different exponents: every block has mode 2 and fixed_base is ignored
 *
 * Returns the number of escapes; or -1 where there are more than dynamic_capacity: the caller then writes a RAW frame, and what
 * stands in both parts is unspecified. Nothing is ever written outside the two parts. */
int64_t zipccl_exponent_encode(const uint16_t *values, uint64_t numel, uint8_t *static_part, uint8_t *dynamic,
                               uint64_t dynamic_capacity, int fixed_base, const uint8_t *table, int threads);

/* Decodes numel values into out[0..numel), and trusts nothing that came over the wire.
 *
 * static_part       static_nbytes readable bytes, as they follow from numel
 * dynamic           n_escapes readable bytes; may be NULL where n_escapes is 0
 * table             NULL, or the seven exponents of mode 2
 *
 * Returns ZIPCCL_OK or the enum zipccl_error of the first block that is not valid; what stands in `out` is then unspecified. */
int zipccl_exponent_decode(const uint8_t *static_part, const uint8_t *dynamic, uint64_t n_escapes, uint64_t numel,
                           const uint8_t *table, uint16_t *out, int threads);

/* sum[i] = float(values[i]) where `first` is not 0 (exact: -0 stays -0), else sum[i] += float(values[i]); i in 0..n-1. */
void zipccl_bf16_accumulate(const uint16_t *values, uint64_t n, float *sum, int first, int threads);

/* out[i] = bfloat16(sum[i] / divisor), rounded to the nearest, ties to even; every NaN becomes 0x7fc0. A divisor of 1 divides
 * nothing. The quotient is a float, so there are two roundings, as in torch's `(sum / divisor).to(torch.bfloat16)`. */
void zipccl_bf16_round(const float *sum, uint64_t n, float divisor, uint16_t *out, int threads);

/* The target in use: "avx2" or "portable". */
const char *zipccl_kernels_target(void);

/* Forces a target by name, or with "auto" goes back to the best one. Returns 0, or -1 where this machine lacks it. */
int zipccl_kernels_force(const char *name);

#endif
