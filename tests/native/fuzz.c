/* Round trips and damaged frames, in heap buffers of the exact size so that a sanitizer sees each byte too many.
 *
 *     fuzz ROUND_TRIPS DAMAGED SEED
 *
 * Built together with the kernels and -DZIPCCL_VALUES_PER_THREAD=1024, so that small tensors use threads. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"
#include "exponent.h"

#define REQUIRE(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "fuzz.c:%d: %s\n", __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

static const char *const targets[] = {"auto", "portable"};

static uint64_t align(uint64_t n) { return (n + 127) / 128 * 128; }

static uint64_t static_nbytes_of(uint64_t numel) {
    uint64_t n_blocks = (numel + 1023) / 1024;
    return align(4 * n_blocks) + align(2 * n_blocks) + 1408 * n_blocks;
}

static void *allocate(uint64_t n) {
    void *memory = malloc(n);
    REQUIRE(memory != NULL || n == 0);
    return memory;
}

static void *copy_of(const void *bytes, uint64_t n) {
    void *copy = allocate(n);
    if (n > 0)
        memcpy(copy, bytes, n);
    return copy;
}

struct frame {
    uint64_t numel, static_nbytes, capacity;
    int64_t n_escapes;
    uint8_t *static_part, *dynamic;
};

static void free_frame(struct frame *frame) {
    free(frame->static_part);
    free(frame->dynamic);
}

/* Memory begins as something else each time, so that frames are equal only where all of their bytes are written. */
static struct frame encode(const uint16_t *values, uint64_t numel, uint64_t capacity, int base, const uint8_t *table, int threads) {
    static uint8_t before = 0xa5;
    struct frame frame = {.numel = numel, .static_nbytes = static_nbytes_of(numel), .capacity = capacity};
    frame.static_part = allocate(frame.static_nbytes);
    frame.dynamic = allocate(capacity);
    if (frame.static_nbytes > 0)
        memset(frame.static_part, before++, frame.static_nbytes);
    frame.n_escapes =
        zipccl_exponent_encode(values, numel, frame.static_part, frame.dynamic, capacity, base, table, threads);
    return frame;
}

/* A table of seven different exponents, the first of them common in the data. */
static void choose_table(const uint16_t *values, uint64_t numel, uint8_t table[7]) {
    unsigned first = numel > 0 ? values[below((unsigned)numel)] >> 7 & 255 : below(256);
    for (unsigned i = 0; i < 7; i++)
        table[i] = (uint8_t)(first + 37 * i * (i % 2 ? 1 : 255));
}

static void decode_and_compare(const struct frame *frame, const uint16_t *values, const uint8_t *table, int threads) {
    uint8_t *dynamic = copy_of(frame->dynamic, (uint64_t)frame->n_escapes); /* without its padding */
    uint16_t *out = allocate(2 * frame->numel);
    int error = zipccl_exponent_decode(frame->static_part, dynamic, (uint64_t)frame->n_escapes, frame->numel, table, out, threads);
    REQUIRE(error == ZIPCCL_OK);
    REQUIRE(frame->numel == 0 || memcmp(out, values, 2 * frame->numel) == 0);
    free(out);
    free(dynamic);
}

static void round_trip(uint64_t numel, enum data_kind kind) {
    uint16_t *values = allocate(2 * numel);
    fill(values, numel, kind);
    uint8_t table_bytes[7];
    choose_table(values, numel, table_bytes);
    int mode = (int)below(4);
    const uint8_t *table = mode == 2 ? table_bytes : NULL;
    int base = mode == 3 ? (int)below(250) : -1;

    struct frame first = {0};
    for (int i = 0; i < 6; i++) {
        REQUIRE(zipccl_kernels_force(targets[i % 2]) == 0);
        int threads = 1 + i / 2;
        struct frame frame = encode(values, numel, align(numel), base, table, threads);
        REQUIRE(frame.n_escapes >= 0);
        for (uint64_t at = (uint64_t)frame.n_escapes; at < align((uint64_t)frame.n_escapes); at++)
            REQUIRE(frame.dynamic[at] == 0);
        decode_and_compare(&frame, values, table, threads);

        if (i == 0) {
            first = frame;
            continue;
        }
        REQUIRE(frame.n_escapes == first.n_escapes);
        REQUIRE(numel == 0 || memcmp(frame.static_part, first.static_part, frame.static_nbytes) == 0);
        REQUIRE(frame.n_escapes == 0 || memcmp(frame.dynamic, first.dynamic, (uint64_t)frame.n_escapes) == 0);
        free_frame(&frame);

        uint64_t capacity = 128 * below((unsigned)(align((uint64_t)first.n_escapes) / 128) + 1);
        struct frame tight = encode(values, numel, capacity, base, table, threads);
        REQUIRE(tight.n_escapes == (capacity >= (uint64_t)first.n_escapes ? first.n_escapes : -1));
        free_frame(&tight);
    }
    free_frame(&first);
    free(values);
}

static void flip_bit(uint8_t *bytes, uint64_t begin, uint64_t end) {
    if (begin < end)
        bytes[begin + next_random() % (end - begin)] ^= (uint8_t)(1 << below(8));
}

/* Changes a copy of a frame in one of many ways, and decodes it from buffers of the exact size. Returns the decoder's answer. */
static int decode_damaged(const struct frame *frame, const uint16_t *values) {
    uint8_t *static_part = copy_of(frame->static_part, frame->static_nbytes);
    uint64_t n_escapes = (uint64_t)frame->n_escapes;
    uint64_t n_blocks = (frame->numel + 1023) / 1024, meta = align(4 * n_blocks), blocks = meta + align(2 * n_blocks);
    uint8_t table_bytes[7];
    choose_table(values, frame->numel, table_bytes);
    const uint8_t *table = below(2) ? table_bytes : NULL;
    unsigned damage = below(7);
    switch (damage) {
    case 0: /* fewer escapes, or more */
        n_escapes = below(2) ? next_random() % (n_escapes + 1) : n_escapes + below(200);
        break;
    case 1:
        flip_bit(static_part, 0, 4 * n_blocks);
        break;
    case 2:
        flip_bit(static_part, meta, meta + 2 * n_blocks);
        break;
    case 3:
        for (unsigned i = 1 + below(3); i > 0; i--) {
            uint64_t planes = blocks + 1408 * below((unsigned)n_blocks) + 1024;
            flip_bit(static_part, planes, planes + 384);
        }
        break;
    case 4:
        for (unsigned i = 1 + below(8); i > 0; i--)
            flip_bit(static_part, 0, frame->static_nbytes);
        break;
    case 5:
        for (uint64_t i = 0; i < frame->static_nbytes; i++)
            static_part[i] = (uint8_t)next_random();
        break;
    default: /* bases and modes that are valid, offsets and planes that are not */
        for (uint64_t i = 0; i < frame->static_nbytes; i++)
            if (i < meta || i >= blocks)
                static_part[i] = (uint8_t)next_random();
    }
    uint8_t *dynamic = allocate(n_escapes);
    for (uint64_t i = 0; i < n_escapes; i++)
        dynamic[i] = i < (uint64_t)frame->n_escapes ? frame->dynamic[i] : 0;
    uint16_t *out = allocate(2 * frame->numel);

    int threads = 1 + (int)below(3), answers[2];
    for (int i = 0; i < 2; i++) {
        REQUIRE(zipccl_kernels_force(targets[i]) == 0);
        answers[i] = zipccl_exponent_decode(static_part, dynamic, n_escapes, frame->numel, table, out, threads);
    }
    REQUIRE(answers[0] == answers[1]);
    REQUIRE(answers[0] >= ZIPCCL_OK && answers[0] < ZIPCCL_N_ERRORS);
    if (damage == 0 && n_escapes != (uint64_t)frame->n_escapes)
        REQUIRE(answers[0] == ZIPCCL_BAD_OFFSET || answers[0] == ZIPCCL_BAD_ESCAPE_COUNT);
    free(out);
    free(dynamic);
    free(static_part);
    return answers[0];
}

static void damaged_frames(unsigned n) {
    unsigned seen[ZIPCCL_N_ERRORS] = {0};
    while (n > 0) {
        uint64_t numel = 1 + below(5000);
        uint16_t *values = allocate(2 * numel);
        fill(values, numel, (enum data_kind)below(DATA_KINDS));
        struct frame frame = encode(values, numel, align(numel), -1, NULL, 1);
        for (unsigned i = 0; i < 50 && n > 0; i++, n--)
            seen[decode_damaged(&frame, values)]++;
        free_frame(&frame);
        free(values);
    }
    for (int code = 0; code < ZIPCCL_N_ERRORS; code++) {
        printf("%8u %s\n", seen[code], zipccl_error_message(code));
        REQUIRE(seen[code] > 0);
    }
}

int main(int argc, char **argv) {
    REQUIRE(argc == 4);
    unsigned round_trips = (unsigned)atoi(argv[1]), damaged = (unsigned)atoi(argv[2]);
    generator += (uint64_t)atoi(argv[3]);
    for (uint64_t numel = 0; numel < 20; numel++)
        round_trip(numel, DATA_RANDOM);
    for (unsigned i = 0; i < round_trips; i++)
        round_trip(below(2) ? below(5001) : 1024 * below(5), (enum data_kind)(i % DATA_KINDS));
    round_trip(65536, DATA_ALL_PATTERNS);
    damaged_frames(damaged);
    return 0;
}
