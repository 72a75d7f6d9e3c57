/* The AVX2 target. Chunks of 32 values, always the four that share their plane words: the values 256*k + 32*g + 0..31 of
 * k = 0..3, whose codes are the bytes 16*g .. 16*g + 15 of each plane. */
#include "block.h"
#include "window.h"

#ifdef ZIPCCL_HAVE_AVX2
#include <immintrin.h>

enum { CHUNK = 32, LISTED_AT_ONCE = 4 };

TARGET_AVX2 static inline __m256i load(const void *at) { return _mm256_loadu_si256((const __m256i *)at); }
TARGET_AVX2 static inline void store(void *at, __m256i v) { _mm256_storeu_si256((__m256i *)at, v); }
TARGET_AVX2 static inline __m256i bytes_of(unsigned byte) { return _mm256_set1_epi8((char)byte); }

/* ---- choosing a window ---- */

/* 16 of 128 values: word 0 of each half of eight vectors, which are eight values each, in some order. */
TARGET_AVX2 static inline __m256i sample_128(const uint16_t *values) {
    __m256i pairs[4], fours[2];
    for (int i = 0; i < 4; i++)
        pairs[i] = _mm256_unpacklo_epi16(load(values + 32 * i), load(values + 32 * i + 16));
    for (int i = 0; i < 2; i++)
        fours[i] = _mm256_unpacklo_epi32(pairs[2 * i], pairs[2 * i + 1]);
    __m256i words = _mm256_unpacklo_epi64(fours[0], fours[1]);
    return _mm256_and_si256(_mm256_srli_epi16(words, 7), _mm256_set1_epi16(0xff));
}

TARGET_AVX2 static struct coding choose(const uint16_t *values) {
    uint8_t sample[SAMPLE_VALUES] __attribute__((aligned(32)));
    for (int i = 0; i < 4; i++) /* the order of a sample does not matter, so neither does packing by halves */
        store(sample + 32 * i, _mm256_packus_epi16(sample_128(values + 256 * i), sample_128(values + 256 * i + 128)));
    return choose_window(sample, SAMPLE_VALUES);
}

/* ---- escapes ---- */

/* Lists the bits of the planes that belong to escapes, in their order; returns how many. Words with more than four are rare, and
 * four writes without a branch cost less than a loop whose end cannot be predicted; what they write too much is overwritten or
 * stays behind the end, but within the 64 places of their own word. */
TARGET_AVX2 static inline unsigned list_escapes(const uint8_t *planes, uint16_t bits[BLOCK_VALUES]) {
    uint64_t words[PLANE_WORDS] __attribute__((aligned(32)));
    for (int i = 0; i < PLANE_NBYTES; i += 32) {
        const uint8_t *at = planes + i;
        __m256i any = _mm256_or_si256(_mm256_or_si256(load(at), load(at + PLANE_NBYTES)), load(at + 2 * PLANE_NBYTES));
        store(words + i / 8, _mm256_xor_si256(any, bytes_of(0xff)));
    }
    unsigned n = 0;
    for (unsigned word = 0; word < PLANE_WORDS; word++) {
        uint64_t escapes = words[word];
        unsigned count = (unsigned)_mm_popcnt_u64(escapes);
        uint16_t *next = bits + n;
        for (unsigned i = 0; i < LISTED_AT_ONCE; i++, escapes = _blsr_u64(escapes))
            next[i] = (uint16_t)(64 * word + (unsigned)_tzcnt_u64(escapes));
        for (unsigned i = LISTED_AT_ONCE; i < count; i++, escapes = _blsr_u64(escapes))
            next[i] = (uint16_t)(64 * word + (unsigned)_tzcnt_u64(escapes));
        n += count;
    }
    return n;
}

/* ---- encoding ---- */

struct code_vectors {
    __m256i base;
    __m256i table[7];
};

/* The codes of 32 exponents. `mode` is a constant where this is inlined. */
TARGET_AVX2 static inline __m256i codes_of(__m256i exponents, int mode, const struct code_vectors *vectors) {
    if (mode == MODE_TABLE) {
        __m256i codes = _mm256_setzero_si256();
        for (unsigned i = 0; i < 7; i++) {
            __m256i found = _mm256_cmpeq_epi8(exponents, vectors->table[i]);
            codes = _mm256_max_epu8(codes, _mm256_and_si256(found, bytes_of(FULL_CODE - i)));
        }
        return codes;
    }
    __m256i codes = _mm256_subs_epu8(bytes_of(FULL_CODE), _mm256_sub_epi8(exponents, vectors->base));
    if (mode == MODE_WINDOW_ZERO) { /* code 1 is not for the seventh exponent of the window but for exponent 0 */
        __m256i one = bytes_of(1), zero = _mm256_setzero_si256();
        codes = _mm256_andnot_si256(_mm256_cmpeq_epi8(codes, one), codes);
        codes = _mm256_or_si256(codes, _mm256_and_si256(_mm256_cmpeq_epi8(exponents, zero), one));
    }
    return codes;
}

/* Writes the sign-mantissa bytes, and into masks[j] the bits of plane j as 32 words of 32 bits, word 4*g + k for chunk (g, k). */
TARGET_AVX2 static inline void split(const uint16_t *values, int mode, const struct code_vectors *vectors, uint8_t *sign_mantissa,
                                     uint32_t masks[3][32]) {
    const __m256i low_bytes = _mm256_set1_epi16(0xff), sign = bytes_of(0x80), zero = _mm256_setzero_si256();
    for (unsigned g = 0; g < 8; g++) {
        for (unsigned k = 0; k < 4; k++) {
            unsigned at = 256 * k + CHUNK * g;
            /* The next block, whose sample is read first: worth 15 % where values come from memory. Behind the last block it
             * does nothing; a prefetch cannot fault. */
            _mm_prefetch((const char *)(values + at + BLOCK_VALUES), _MM_HINT_T0);
            __m256i a = load(values + at), b = load(values + at + 16);
            /* Packing leaves the eights of values in the order 0, 2, 1, 3. */
            __m256i low = _mm256_packus_epi16(_mm256_and_si256(a, low_bytes), _mm256_and_si256(b, low_bytes));
            __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
            __m256i both = _mm256_or_si256(_mm256_andnot_si256(sign, low), _mm256_and_si256(sign, high));
            store(sign_mantissa + at, _mm256_permute4x64_epi64(both, 0xd8));
            /* 2 * high + bit 7 of low, the latter as the comparison's -1 */
            __m256i exponents = _mm256_sub_epi8(_mm256_add_epi8(high, high), _mm256_cmpgt_epi8(zero, low));
            __m256i codes = codes_of(exponents, mode, vectors);
            masks[0][4 * g + k] = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(codes, 7));
            masks[1][4 * g + k] = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(codes, 6));
            masks[2][4 * g + k] = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(codes, 5));
        }
    }
}

/* The masks of one g are a matrix of four words k of four bytes; a plane has its bytes in columns. The columns of the second and
 * third eight are exchanged, because packing exchanged the eights. */
TARGET_AVX2 static inline void write_planes(uint32_t masks[3][32], uint8_t *planes) {
    const __m256i transpose =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15));
    for (int j = 0; j < 3; j++)
        for (int i = 0; i < PLANE_NBYTES; i += 32)
            store(planes + j * PLANE_NBYTES + i, _mm256_shuffle_epi8(load(masks[j] + i / 4), transpose));
}

TARGET_AVX2 static unsigned encode(const uint16_t *values, struct coding coding, uint8_t *block, uint8_t *escapes,
                                   uint64_t room) {
    uint32_t masks[3][32] __attribute__((aligned(32)));
    uint16_t bits[BLOCK_VALUES];
    struct code_vectors vectors = {.base = bytes_of(coding.base)};
    if (coding.mode == MODE_WINDOW) {
        split(values, MODE_WINDOW, &vectors, block, masks);
    } else if (coding.mode == MODE_WINDOW_ZERO) {
        split(values, MODE_WINDOW_ZERO, &vectors, block, masks);
    } else {
        for (int i = 0; i < 7; i++)
            vectors.table[i] = bytes_of(coding.table[i]);
        split(values, MODE_TABLE, &vectors, block, masks);
    }
    write_planes(masks, block + BLOCK_VALUES);
    unsigned n = list_escapes(block + BLOCK_VALUES, bits);
    if (n <= room)
        gather_escapes(values, bits, n, escapes);
    return n;
}

/* ---- decoding ---- */

/* In each byte 1 where the plane's bit for that value is set, else 0. `spread` copies each plane byte to the eight bytes of its
 * values: reading the columns of the transposed matrix costs nothing extra here. */
TARGET_AVX2 static inline __m256i plane_bits(__m256i plane, __m256i spread) {
    const __m256i one_bit_each = _mm256_set1_epi64x((long long)0x8040201008040201);
    return _mm256_min_epu8(_mm256_and_si256(_mm256_shuffle_epi8(plane, spread), one_bit_each), bytes_of(1));
}

TARGET_AVX2 static inline __m256i load_plane(const uint8_t *at) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)at));
}

/* Everything but the escapes. */
TARGET_AVX2 static inline void join(const uint8_t *block, struct coding coding, uint16_t *out) {
    uint8_t exponents[16] = {0}, high_of_code[16], low_of_code[16];
    exponents_of_codes(coding, exponents);
    for (int code = 0; code < 16; code++) { /* an exponent is the lower 7 bits of the high byte and bit 7 of the low one */
        high_of_code[code] = exponents[code] >> 1;
        low_of_code[code] = (uint8_t)(exponents[code] << 7);
    }
    const __m256i high_lut = load_plane(high_of_code), low_lut = load_plane(low_of_code), sign = bytes_of(0x80);
    /* The eights in the order 0, 2, 1, 3: unpacking them by halves brings them back to 0, 1, 2, 3. */
    const __m256i spread_0 = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 12, 12,
                                              12, 12, 12, 12, 12, 12);
    for (unsigned g = 0; g < 8; g++) {
        const uint8_t *planes = block + BLOCK_VALUES + 16 * g;
        __m256i plane0 = load_plane(planes), plane1 = load_plane(planes + PLANE_NBYTES);
        __m256i plane2 = load_plane(planes + 2 * PLANE_NBYTES);
        for (unsigned k = 0; k < 4; k++) {
            unsigned at = 256 * k + CHUNK * g;
            __m256i spread = _mm256_add_epi8(spread_0, bytes_of(k));
            __m256i bit2 = plane_bits(plane2, spread);
            __m256i upper = _mm256_add_epi8(_mm256_add_epi8(bit2, bit2), plane_bits(plane1, spread));
            __m256i codes = _mm256_add_epi8(_mm256_add_epi8(upper, upper), plane_bits(plane0, spread));
            __m256i both = _mm256_permute4x64_epi64(load(block + at), 0xd8);
            __m256i low = _mm256_or_si256(_mm256_andnot_si256(sign, both), _mm256_shuffle_epi8(low_lut, codes));
            __m256i high = _mm256_or_si256(_mm256_and_si256(sign, both), _mm256_shuffle_epi8(high_lut, codes));
            store(out + at, _mm256_unpacklo_epi8(low, high));
            store(out + at + 16, _mm256_unpackhi_epi8(low, high));
        }
    }
}

TARGET_AVX2 static int decode(const uint8_t *block, struct coding coding, const uint8_t *escapes, uint64_t n_escapes,
                              uint16_t *out) {
    uint16_t bits[BLOCK_VALUES];
    if (list_escapes(block + BLOCK_VALUES, bits) != n_escapes)
        return 0;
    join(block, coding, out);
    scatter_escapes(escapes, bits, (unsigned)n_escapes, out);
    return 1;
}

const struct block_kernels zipccl_block_avx2 = {"avx2", choose, encode, decode};
#endif
