/* The portable target: plain C11. Loops over values are left to the compiler's vectoriser; bits and bytes are exchanged eight at a
 * time in 64-bit words. */
#include "block.h"
#include "window.h"

#define EACH_BYTE UINT64_C(0x0101010101010101)

static uint64_t load_u64(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

static struct coding choose(const uint16_t *values) {
    uint8_t sample[SAMPLE_VALUES];
    for (unsigned i = 0; i < SAMPLE_VALUES; i++)
        sample[i] = exponent_of(values[SAMPLE_STRIDE * i]);
    return choose_window(sample, SAMPLE_VALUES);
}

static void split(const uint16_t *restrict values, uint8_t *restrict sign_mantissa, uint8_t *restrict exponents) {
    for (unsigned i = 0; i < BLOCK_VALUES; i++) {
        sign_mantissa[i] = (uint8_t)((values[i] & 0x7f) | (values[i] >> 8 & 0x80));
        exponents[i] = exponent_of(values[i]);
    }
}

/* Replaces the exponents by their codes. */
static void code_exponents(uint8_t *bytes, struct coding coding) {
    const uint8_t base = coding.base;
    if (coding.mode == MODE_WINDOW) {
        for (unsigned i = 0; i < BLOCK_VALUES; i++) {
            uint8_t t = (uint8_t)(bytes[i] - base);
            bytes[i] = (uint8_t)(FULL_CODE - (t < 7 ? t : 7));
        }
    } else if (coding.mode == MODE_WINDOW_ZERO) {
        for (unsigned i = 0; i < BLOCK_VALUES; i++) {
            uint8_t t = (uint8_t)(bytes[i] - base);
            uint8_t code = (uint8_t)(t < 6 ? FULL_CODE - t : 0);
            bytes[i] = bytes[i] == 0 ? 1 : code; /* exponent 0 is in no window of this mode */
        }
    } else {
        uint8_t codes[256] = {0};
        for (int i = 6; i >= 0; i--)
            codes[coding.table[i]] = (uint8_t)(FULL_CODE - i);
        for (unsigned i = 0; i < BLOCK_VALUES; i++)
            bytes[i] = codes[bytes[i]];
    }
}

/* Bit 0 of each byte of `bytes`, the first byte's lowest: the product moves bit 8*r to bit 56 + r, with nothing else above 55. */
static uint8_t collect_bits(uint64_t bytes) {
    return (uint8_t)((bytes & EACH_BYTE) * UINT64_C(0x0102040810204080) >> 56);
}

static void write_planes(const uint8_t *restrict codes, uint8_t *restrict planes) {
    for (unsigned w = 0; w < 32; w++) {
        for (unsigned k = 0; k < 4; k++) {
            uint64_t eight = load_u64(codes + 256 * k + 8 * w);
            for (unsigned j = 0; j < 3; j++)
                planes[j * PLANE_NBYTES + 4 * w + k] = collect_bits(eight >> j);
        }
    }
}

/* Lists the bits of the planes that belong to escapes, in their order; returns how many. */
static unsigned list_escapes(const uint8_t *planes, uint16_t bits[BLOCK_VALUES]) {
    unsigned n = 0;
    for (unsigned word = 0; word < PLANE_WORDS; word++) {
        const uint8_t *at = planes + 8 * word;
        uint64_t escapes = ~(load_u64(at) | load_u64(at + PLANE_NBYTES) | load_u64(at + 2 * PLANE_NBYTES));
        for (; escapes != 0; escapes &= escapes - 1)
            bits[n++] = (uint16_t)(64 * word + (unsigned)__builtin_ctzll(escapes));
    }
    return n;
}

static unsigned encode(const uint16_t *values, struct coding coding, uint8_t *block, uint8_t *escapes, uint64_t room) {
    uint8_t codes[BLOCK_VALUES];
    uint16_t bits[BLOCK_VALUES];
    split(values, block, codes);
    code_exponents(codes, coding);
    write_planes(codes, block + BLOCK_VALUES);
    unsigned n = list_escapes(block + BLOCK_VALUES, bits);
    if (n <= room)
        gather_escapes(values, bits, n, escapes);
    return n;
}

/* A byte of 0 or 1 for each bit of `byte`, the lowest bit's first: copies of the byte, one bit of each copy kept, and that bit
 * brought to bit 7 by an addition that carries into no other byte. */
static uint64_t spread_bits(uint8_t byte) {
    uint64_t kept = byte * EACH_BYTE & UINT64_C(0x8040201008040201);
    return (kept + 0x7f * EACH_BYTE) >> 7 & EACH_BYTE;
}

static void read_planes(const uint8_t *restrict planes, uint8_t *restrict codes) {
    for (unsigned w = 0; w < 32; w++) {
        for (unsigned k = 0; k < 4; k++) {
            const uint8_t *at = planes + 4 * w + k;
            uint64_t eight =
                spread_bits(at[0]) | spread_bits(at[PLANE_NBYTES]) << 1 | spread_bits(at[2 * PLANE_NBYTES]) << 2;
            memcpy(codes + 256 * k + 8 * w, &eight, sizeof eight);
        }
    }
}

/* Replaces the codes by their exponents. */
static void decode_exponents(uint8_t *bytes, struct coding coding) {
    if (coding.mode == MODE_TABLE) {
        uint8_t exponents[8];
        exponents_of_codes(coding, exponents);
        for (unsigned i = 0; i < BLOCK_VALUES; i++)
            bytes[i] = exponents[bytes[i]];
    } else {
        const uint8_t first = (uint8_t)(coding.base + FULL_CODE);
        const uint8_t zero_code = coding.mode; /* 1 in mode 1; in mode 0 it is 0, an escape, whose exponent is still to come */
        for (unsigned i = 0; i < BLOCK_VALUES; i++)
            bytes[i] = bytes[i] == zero_code ? 0 : (uint8_t)(first - bytes[i]);
    }
}

static void join(const uint8_t *restrict sign_mantissa, const uint8_t *restrict exponents, uint16_t *restrict out) {
    for (unsigned i = 0; i < BLOCK_VALUES; i++) {
        unsigned both = sign_mantissa[i];
        out[i] = (uint16_t)((both & 0x80) << 8 | (unsigned)exponents[i] << 7 | (both & 0x7f));
    }
}

static int decode(const uint8_t *block, struct coding coding, const uint8_t *escapes, uint64_t n_escapes, uint16_t *out) {
    uint8_t bytes[BLOCK_VALUES];
    uint16_t bits[BLOCK_VALUES];
    if (list_escapes(block + BLOCK_VALUES, bits) != n_escapes)
        return 0;
    read_planes(block + BLOCK_VALUES, bytes);
    decode_exponents(bytes, coding);
    join(block, bytes, out);
    scatter_escapes(escapes, bits, (unsigned)n_escapes, out);
    return 1;
}

const struct block_kernels zipccl_block_portable = {"portable", choose, encode, decode};
