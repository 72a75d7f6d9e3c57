/* The rule by which encoders choose base and mode of a block ("Choosing base and mode" in docs/wire-format.md).
 *
 * Plain loops over bytes: with the sample's size constant, compilers turn each into a few vector instructions of the target that
 * it is inlined into. */
#ifndef ZIPCCL_WINDOW_H
#define ZIPCCL_WINDOW_H

#include "block.h"

struct window {
    int base;
    unsigned covered; /* sampled exponents in it */
};

SHARED int clamp(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

SHARED unsigned largest(const uint8_t *sample, unsigned n) {
    uint8_t max = 0;
    for (unsigned i = 0; i < n; i++)
        max = sample[i] > max ? sample[i] : max;
    return max;
}

/* The sum of max(e, floor). 128 * 255 fits into 16 bits, and narrow lanes are fast lanes. */
SHARED unsigned sum_above(const uint8_t *sample, unsigned n, unsigned floor) {
    uint16_t sum = 0;
    for (unsigned i = 0; i < n; i++) {
        uint8_t exponent = sample[i] > (uint8_t)floor ? sample[i] : (uint8_t)floor;
        sum = (uint16_t)(sum + exponent);
    }
    return sum;
}

/* How many exponents e have base <= e < base + width. At most 128, so that a byte can count them. */
SHARED unsigned covered(const uint8_t *sample, unsigned n, unsigned base, unsigned width) {
    uint8_t count = 0;
    for (unsigned i = 0; i < n; i++)
        count = (uint8_t)(count + ((uint8_t)(sample[i] - (uint8_t)base) < (uint8_t)width));
    return count;
}

/* start(E) of the wire format, for n exponents with this sum. `>>` of a negative int rounds down with every compiler that knows
 * the attributes used here. */
SHARED int window_start(unsigned sum, unsigned n) { return ((int)(256 * sum / n) - 819) >> 8; }

/* The first of start, start - 1, start + 1, each clamped, that covers most. */
SHARED struct window best_window(const uint8_t *sample, unsigned n, int start, int low, int high, unsigned width) {
    static const int steps[3] = {0, -1, 1};
    struct window best = {0, 0};
    for (int i = 0; i < 3; i++) {
        int base = clamp(start + steps[i], low, high);
        unsigned count = covered(sample, n, (unsigned)base, width);
        if (i == 0 || count > best.covered)
            best = (struct window){base, count};
    }
    return best;
}

/* Steps 2 to 5, on a sample of n exponents, 0 < n <= 128. */
SHARED struct coding choose_window(const uint8_t *sample, unsigned n) {
    unsigned max = largest(sample, n);
    unsigned floor = max > 12 ? max - 12 : 0;
    unsigned sum = sum_above(sample, n, floor);
    struct window seven = best_window(sample, n, clamp(window_start(sum, n), 0, 248), 0, 248, 7);

    unsigned zeros = covered(sample, n, 0, 1);
    if (zeros > 0 && zeros < n) {
        /* Without its zeros the sample has the same maximum, hence the same floor, which each zero added once to the sum. */
        int start = window_start(sum - zeros * floor, n - zeros) + 1;
        struct window six = best_window(sample, n, start, 1, 250, 6);
        if (six.covered + zeros > seven.covered)
            return (struct coding){MODE_WINDOW_ZERO, (uint8_t)six.base, NULL};
    }
    return (struct coding){MODE_WINDOW, (uint8_t)seven.base, NULL};
}

#endif
