/* Prints a checksum of what the kernels compute from fixed data, one line a case: the same lines on every machine and target.
 *
 *     checksum [TARGET] */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"
#include "exponent.h"

enum { NUMEL = 5000 };

static uint64_t fnv1a(const void *bytes, uint64_t n, uint64_t hash) {
    for (uint64_t i = 0; i < n; i++)
        hash = (hash ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

int main(int argc, char **argv) {
    static const uint8_t table[7] = {124, 123, 125, 0, 122, 126, 255};
    static uint16_t values[NUMEL], out[NUMEL];
    static float sum[NUMEL];
    static uint8_t static_part[256 + 1408 * (NUMEL / 1024 + 1)], dynamic[NUMEL / 128 * 128 + 128];
    if (argc > 1 && zipccl_kernels_force(argv[1]) != 0)
        return 2;
    for (int kind = 0; kind < DATA_KINDS; kind++) {
        fill(values, NUMEL, (enum data_kind)kind);
        for (int way = 0; way < 3; way++) {
            int64_t n = zipccl_exponent_encode(values, NUMEL, static_part, dynamic, sizeof dynamic, way == 1 ? 121 : -1,
                                               way == 2 ? table : NULL, 2);
            uint64_t hash = fnv1a(dynamic, n > 0 ? (uint64_t)n : 0, fnv1a(static_part, sizeof static_part, 1));
            int error = zipccl_exponent_decode(static_part, dynamic, (uint64_t)n, NUMEL, table, out, 2);
            if (error != ZIPCCL_OK || memcmp(values, out, sizeof out) != 0)
                return 1;
            printf("encode %d %d %" PRId64 " %016" PRIx64 "\n", kind, way, n, hash);
        }
        zipccl_bf16_accumulate(values, NUMEL, sum, kind == 0, 2);
        for (int divisor = 1; divisor <= 3; divisor++) {
            zipccl_bf16_round(sum, NUMEL, (float)divisor, out, 2);
            printf("round %d %d %016" PRIx64 "\n", kind, divisor, fnv1a(out, sizeof out, 1));
        }
    }
    return 0;
}
