/* Frames of the codec `exponent`: the sections of the static part, the last block, threads, and what a decoder checks. */
#include "exponent.h"

#include <stdlib.h>
#include <string.h>

#include "block.h"
#include "target.h"
#include "threads.h"
#include "window.h"

/* ---- the static part ---- */

struct layout {
    uint64_t n_blocks, meta, blocks; /* the latter two: where the sections begin */
};

static uint64_t align(uint64_t n) { return (n + 127) & ~UINT64_C(127); }

static struct layout layout_of(uint64_t numel) {
    uint64_t n_blocks = (numel + BLOCK_VALUES - 1) / BLOCK_VALUES;
    uint64_t meta = align(4 * n_blocks);
    return (struct layout){n_blocks, meta, meta + align(2 * n_blocks)};
}

static uint32_t load_u32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static void store_u32(uint8_t *at, uint32_t value) { memcpy(at, &value, sizeof value); }

static uint64_t values_in_block(uint64_t numel, uint64_t block) {
    uint64_t left = numel - block * BLOCK_VALUES;
    return left < BLOCK_VALUES ? left : BLOCK_VALUES;
}

/* ---- encoding ---- */

struct encode_part { /* what one thread encodes: blocks begin..end-1 */
    uint64_t begin, end;
    uint8_t *escapes;
    uint64_t room, n_escapes;
    int overflow;
};

struct encode_call {
    const struct block_kernels *kernels;
    const uint16_t *values;
    uint64_t numel;
    uint8_t *static_part;
    struct layout layout;
    int fixed_base;
    const uint8_t *table;
    struct encode_part parts[ZIPCCL_MAX_THREADS];
};

/* Base and mode for the n values of a block. */
static struct coding choose_coding(const struct encode_call *call, const uint16_t *values, uint64_t n) {
    if (call->table != NULL)
        return (struct coding){MODE_TABLE, 0, call->table};
    if (call->fixed_base >= 0)
        return (struct coding){MODE_WINDOW, (uint8_t)call->fixed_base, NULL};
    if (n == BLOCK_VALUES)
        return call->kernels->choose(values);
    uint8_t sample[SAMPLE_VALUES];
    unsigned sampled = 0;
    for (uint64_t i = 0; i < n; i += SAMPLE_STRIDE)
        sample[sampled++] = exponent_of(values[i]);
    return choose_window(sample, sampled);
}

/* Encodes the blocks of a part. Offsets count from the part's first escape. */
static void encode_blocks(void *context, int index) {
    struct encode_call *call = context;
    struct encode_part *part = &call->parts[index];
    uint16_t filled[BLOCK_VALUES];
    for (uint64_t block = part->begin; block < part->end; block++) {
        const uint16_t *values = call->values + block * BLOCK_VALUES;
        uint64_t n = values_in_block(call->numel, block);
        struct coding coding = choose_coding(call, values, n);
        if (n < BLOCK_VALUES) {
            memcpy(filled, values, n * sizeof *values);
            for (uint64_t i = n; i < BLOCK_VALUES; i++)
                filled[i] = (uint16_t)(first_exponent(coding) << 7);
            values = filled;
        }
        uint8_t *meta = call->static_part + call->layout.meta + 2 * block;
        meta[0] = coding.base;
        meta[1] = coding.mode;
        store_u32(call->static_part + 4 * block, (uint32_t)part->n_escapes);
        uint8_t *at = call->static_part + call->layout.blocks + block * BLOCK_NBYTES;
        uint64_t room = part->room - part->n_escapes;
        unsigned n_escapes = call->kernels->encode(values, coding, at, part->escapes + part->n_escapes, room);
        if (n_escapes > room) {
            part->overflow = 1;
            return;
        }
        part->n_escapes += n_escapes;
    }
}

/* Splits the blocks between n threads. The first writes its escapes where they belong; the others, which cannot know where that
 * is, into memory of their own: as much as they might need, of which they touch what they use. Returns how many threads there is
 * memory for: n or 1. */
static int plan_parts(struct encode_call *call, uint8_t *dynamic, uint64_t capacity, int n) {
    for (int i = 0; i < n; i++) {
        uint64_t begin = zipccl_part_begin(call->layout.n_blocks, n, i);
        uint64_t end = zipccl_part_begin(call->layout.n_blocks, n, i + 1);
        struct encode_part *part = &call->parts[i];
        *part = (struct encode_part){.begin = begin, .end = end, .escapes = dynamic, .room = capacity};
        if (i == 0)
            continue;
        uint64_t most = (end - begin) * BLOCK_VALUES;
        part->room = most < capacity ? most : capacity;
        part->escapes = malloc(part->room > 0 ? part->room : 1);
        if (part->escapes == NULL) {
            while (--i > 0)
                free(call->parts[i].escapes);
            return plan_parts(call, dynamic, capacity, 1);
        }
    }
    return n;
}

/* Moves the escapes of part 1.. behind those of part 0 and makes all offsets count from there. Returns the number of escapes, or
 * -1 where they do not fit. Frees the parts' memory. */
static int64_t join_parts(struct encode_call *call, uint8_t *dynamic, uint64_t capacity, int n) {
    uint64_t total = call->parts[0].n_escapes;
    int overflow = call->parts[0].overflow;
    for (int i = 1; i < n; i++) {
        struct encode_part *part = &call->parts[i];
        overflow = overflow || part->overflow || part->n_escapes > capacity - total;
        if (!overflow) {
            if (part->n_escapes > 0)
                memcpy(dynamic + total, part->escapes, part->n_escapes);
            for (uint64_t block = part->begin; block < part->end; block++) {
                uint8_t *offset = call->static_part + 4 * block;
                store_u32(offset, load_u32(offset) + (uint32_t)total);
            }
            total += part->n_escapes;
        }
        free(part->escapes);
    }
    return overflow ? -1 : (int64_t)total;
}

int64_t zipccl_exponent_encode(const uint16_t *values, uint64_t numel, uint8_t *static_part, uint8_t *dynamic,
                               uint64_t dynamic_capacity, int fixed_base, const uint8_t *table, int threads) {
    struct encode_call call = {.kernels = zipccl_kernels(),
                               .values = values,
                               .numel = numel,
                               .static_part = static_part,
                               .layout = layout_of(numel),
                               .fixed_base = fixed_base,
                               .table = table};
    if (numel == 0)
        return 0;
    const struct layout *layout = &call.layout;
    memset(static_part + 4 * layout->n_blocks, 0, layout->meta - 4 * layout->n_blocks);
    memset(static_part + layout->meta + 2 * layout->n_blocks, 0, layout->blocks - layout->meta - 2 * layout->n_blocks);

    int n = plan_parts(&call, dynamic, dynamic_capacity, zipccl_thread_count(threads, numel));
    zipccl_parallel(encode_blocks, &call, n);
    int64_t n_escapes = join_parts(&call, dynamic, dynamic_capacity, n);
    if (n_escapes > 0)
        memset(dynamic + n_escapes, 0, align((uint64_t)n_escapes) - (uint64_t)n_escapes);
    return n_escapes;
}

/* ---- decoding ---- */

struct decode_call {
    const struct block_kernels *kernels;
    const uint8_t *static_part;
    const uint8_t *dynamic;
    uint64_t n_escapes;
    uint64_t numel;
    struct layout layout;
    const uint8_t *table;
    uint16_t *out;
    int n_parts;
    int errors[ZIPCCL_MAX_THREADS];
};

static int check_coding(struct coding coding) {
    switch (coding.mode) {
    case MODE_WINDOW:
        return coding.base <= 249 ? ZIPCCL_OK : ZIPCCL_BAD_BASE;
    case MODE_WINDOW_ZERO:
        return coding.base >= 1 && coding.base <= 250 ? ZIPCCL_OK : ZIPCCL_BAD_BASE;
    case MODE_TABLE:
        return coding.base != 0 ? ZIPCCL_BAD_BASE : coding.table == NULL ? ZIPCCL_MISSING_TABLE : ZIPCCL_OK;
    default:
        return ZIPCCL_BAD_MODE;
    }
}

/* Whether the values n.. of the last block have sign-mantissa byte 0 and code 7. */
static int is_filled(const uint8_t *block, uint64_t n) {
    for (uint64_t i = n; i < BLOCK_VALUES; i++) {
        const uint8_t *planes = block + BLOCK_VALUES + 4 * (i / 8 % 32) + i / 256;
        int code_bits = planes[0] & planes[PLANE_NBYTES] & planes[2 * PLANE_NBYTES];
        if (block[i] != 0 || (code_bits >> i % 8 & 1) == 0)
            return 0;
    }
    return 1;
}

static int decode_block(const struct decode_call *call, uint64_t block) {
    const uint8_t *offsets = call->static_part + 4 * block;
    uint64_t begin = load_u32(offsets);
    uint64_t end = block + 1 < call->layout.n_blocks ? load_u32(offsets + 4) : call->n_escapes;
    if (begin > end || end > call->n_escapes || (block == 0 && begin != 0))
        return ZIPCCL_BAD_OFFSET;

    const uint8_t *meta = call->static_part + call->layout.meta + 2 * block;
    struct coding coding = {.base = meta[0], .mode = meta[1], .table = call->table};
    int error = check_coding(coding);
    if (error != ZIPCCL_OK)
        return error;

    const uint8_t *at = call->static_part + call->layout.blocks + block * BLOCK_NBYTES;
    const uint8_t *escapes = begin < end ? call->dynamic + begin : NULL;
    uint16_t *out = call->out + block * BLOCK_VALUES;
    uint64_t n = values_in_block(call->numel, block);
    if (n == BLOCK_VALUES)
        return call->kernels->decode(at, coding, escapes, end - begin, out) ? ZIPCCL_OK : ZIPCCL_BAD_ESCAPE_COUNT;
    uint16_t filled[BLOCK_VALUES];
    if (!is_filled(at, n))
        return ZIPCCL_BAD_FILLER;
    if (!call->kernels->decode(at, coding, escapes, end - begin, filled))
        return ZIPCCL_BAD_ESCAPE_COUNT;
    memcpy(out, filled, n * sizeof *out);
    return ZIPCCL_OK;
}

static void decode_blocks(void *context, int index) {
    struct decode_call *call = context;
    uint64_t begin = zipccl_part_begin(call->layout.n_blocks, call->n_parts, index);
    uint64_t end = zipccl_part_begin(call->layout.n_blocks, call->n_parts, index + 1);
    int error = ZIPCCL_OK;
    for (uint64_t block = begin; block < end && error == ZIPCCL_OK; block++)
        error = decode_block(call, block);
    call->errors[index] = error;
}

int zipccl_exponent_decode(const uint8_t *static_part, const uint8_t *dynamic, uint64_t n_escapes, uint64_t numel,
                           const uint8_t *table, uint16_t *out, int threads) {
    struct decode_call call = {.kernels = zipccl_kernels(),
                               .static_part = static_part,
                               .dynamic = dynamic,
                               .n_escapes = n_escapes,
                               .numel = numel,
                               .layout = layout_of(numel),
                               .table = table,
                               .out = out,
                               .n_parts = zipccl_thread_count(threads, numel)};
    if (numel == 0)
        return n_escapes == 0 ? ZIPCCL_OK : ZIPCCL_BAD_ESCAPE_COUNT;
    zipccl_parallel(decode_blocks, &call, call.n_parts);
    for (int i = 0; i < call.n_parts; i++)
        if (call.errors[i] != ZIPCCL_OK)
            return call.errors[i];
    return ZIPCCL_OK;
}

const char *zipccl_error_message(int code) {
    static const char *const messages[ZIPCCL_N_ERRORS] = {
        [ZIPCCL_OK] = "no error",
        [ZIPCCL_BAD_OFFSET] = "offset of a block is out of order or beyond the escapes",
        [ZIPCCL_BAD_MODE] = "mode of a block is reserved",
        [ZIPCCL_BAD_BASE] = "base of a block is not allowed in its mode",
        [ZIPCCL_BAD_ESCAPE_COUNT] = "escape count of a block does not match its planes",
        [ZIPCCL_BAD_FILLER] = "last block is not filled up with sign-mantissa byte 0 and code 7",
        [ZIPCCL_MISSING_TABLE] = "mode of a block needs a table, and the frame has none",
    };
    return code >= 0 && code < ZIPCCL_N_ERRORS ? messages[code] : "unknown error";
}
