/* One block of the codec `exponent`: its layout, what both targets share, and the interface that a target offers.
 *
 * The names are those of docs/wire-format.md: a plane's byte 4*w + k, bit r belongs to the value 256*k + 8*w + r. */
#ifndef ZIPCCL_BLOCK_H
#define ZIPCCL_BLOCK_H

#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "zipccl: frames are little-endian, and so must the machine be that these kernels are built for"
#endif

enum {
    BLOCK_VALUES = 1024,
    PLANE_NBYTES = BLOCK_VALUES / 8,
    BLOCK_NBYTES = BLOCK_VALUES + 3 * PLANE_NBYTES,
    PLANE_WORDS = PLANE_NBYTES / 8, /* in words of 64 bits */
    SAMPLE_STRIDE = 8,
    SAMPLE_VALUES = BLOCK_VALUES / SAMPLE_STRIDE,
    FULL_CODE = 7, /* of the first exponent of a window or table, and of fillers */
};

enum { MODE_WINDOW = 0, MODE_WINDOW_ZERO = 1, MODE_TABLE = 2 };

/* How the exponents of one block become codes. */
struct coding {
    uint8_t mode;
    uint8_t base;
    const uint8_t *table; /* seven exponents in MODE_TABLE, else unused */
};

/* The kernels of one target. All work on a whole block; the caller fills up the last one. */
struct block_kernels {
    const char *name;
    /* Base and mode by the rule of the wire format. */
    struct coding (*choose)(const uint16_t *values);
    /* Writes `block` and returns the number of escapes. Writes those too where `room` bytes are enough, else none of them. */
    unsigned (*encode)(const uint16_t *values, struct coding coding, uint8_t *block, uint8_t *escapes, uint64_t room);
    /* Returns 0 and reads no escape where the planes do not hold exactly n_escapes of them, else writes `out` and returns 1. */
    int (*decode)(const uint8_t *block, struct coding coding, const uint8_t *escapes, uint64_t n_escapes, uint16_t *out);
};

extern const struct block_kernels zipccl_block_portable;
#if defined(__x86_64__)
#define ZIPCCL_HAVE_AVX2 1
/* For every function of that target: an attribute, and no compiler flag or pragma, so that portable code cannot get AVX2
 * instructions by accident. */
#define TARGET_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt")))
extern const struct block_kernels zipccl_block_avx2;
#endif

/* For functions that are shared by the targets: they take on the instruction set of the function that they are inlined into. */
#define SHARED static inline __attribute__((always_inline))

SHARED uint8_t exponent_of(uint16_t value) { return (uint8_t)(value >> 7); }

/* The exponent of code 7: with it, sign 0 and mantissa 0 a value is encoded as a filler. */
SHARED uint8_t first_exponent(struct coding coding) { return coding.mode == MODE_TABLE ? coding.table[0] : coding.base; }

/* exponents[c] of code c. Code 0 is an escape: its entry is only there to be overwritten. */
SHARED void exponents_of_codes(struct coding coding, uint8_t exponents[8]) {
    for (unsigned code = 0; code <= FULL_CODE; code++)
        exponents[code] = (uint8_t)(coding.base + FULL_CODE - code);
    if (coding.mode == MODE_WINDOW_ZERO)
        exponents[1] = 0;
    if (coding.mode == MODE_TABLE)
        for (unsigned code = 1; code <= FULL_CODE; code++)
            exponents[code] = coding.table[FULL_CODE - code];
    exponents[0] = 0;
}

/* The value that bit `bit` of a plane belongs to: from bits w w w w w k k r r r to k k w w w w w r r r. */
SHARED unsigned value_of_bit(unsigned bit) { return (bit >> 3 & 3) << 8 | bit >> 5 << 3 | (bit & 7); }

/* Escapes are few and stand anywhere. Listing their bits first, and moving bytes in a second loop, leaves one branch a block that
 * cannot be predicted instead of one for each word of a plane. */
SHARED void gather_escapes(const uint16_t *values, const uint16_t *bits, unsigned n, uint8_t *escapes) {
    for (unsigned i = 0; i < n; i++)
        escapes[i] = exponent_of(values[value_of_bit(bits[i])]);
}

SHARED void scatter_escapes(const uint8_t *escapes, const uint16_t *bits, unsigned n, uint16_t *out) {
    for (unsigned i = 0; i < n; i++) {
        uint16_t *value = &out[value_of_bit(bits[i])];
        *value = (uint16_t)((*value & 0x807f) | escapes[i] << 7);
    }
}

#endif
