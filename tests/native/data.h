/* Test data that is the same on every machine: integers only, a fixed generator. */
#include <stdint.h>

enum data_kind { DATA_RANDOM, DATA_BELL, DATA_ZEROS, DATA_SPARSE, DATA_ALL_PATTERNS, DATA_TINY, DATA_MIXED, DATA_KINDS };

static uint64_t generator = 88172645463325252u;

static uint64_t next_random(void) {
    generator ^= generator << 13;
    generator ^= generator >> 7;
    generator ^= generator << 17;
    return generator >> 11;
}

static unsigned below(unsigned n) { return (unsigned)(next_random() % n); }

/* Exponents as those of normally distributed values: fewer by half with each step down, none much above the top. */
static uint16_t bell_value(unsigned top) {
    unsigned down = 0;
    for (uint64_t bits = next_random(); (bits & 1) != 0 && down < 40; bits >>= 1)
        down++;
    unsigned exponent = top > down ? top - down : 0;
    return (uint16_t)(below(2) << 15 | exponent << 7 | below(128));
}

static void fill(uint16_t *values, uint64_t n, enum data_kind kind) {
    unsigned top = 1 + below(255);
    for (uint64_t i = 0; i < n; i++) {
        switch (kind) {
        case DATA_RANDOM:
            values[i] = (uint16_t)next_random();
            break;
        case DATA_BELL:
            values[i] = bell_value(top);
            break;
        case DATA_ZEROS:
            values[i] = 0;
            break;
        case DATA_SPARSE:
            values[i] = below(3) != 0 ? 0 : bell_value(top);
            break;
        case DATA_ALL_PATTERNS:
            values[i] = (uint16_t)i;
            break;
        case DATA_TINY: /* around exponent 0, where bases are clamped */
            values[i] = bell_value(below(9));
            break;
        default:
            values[i] = below(20) != 0 ? bell_value(top) : (uint16_t)next_random();
        }
    }
}
