// The kernels of cuda/exponent.cu, callable from Python; with -DPROGRAM a program for sanitizers, with buffers of exact sizes.
#include "cusim.h"

#include "../../cuda/exponent.cu"

#include <cstdio>
#include <cstdlib>

namespace {

unsigned grid_of(u64 numel) { return numel == 0 ? 1 : (unsigned)((numel + BLOCK * WARPS - 1) / (BLOCK * WARPS)); }

int say(const std::string &error) {
    if (!error.empty())
        fprintf(stderr, "cusim: %s\n", error.c_str());
    return error.empty() ? 0 : 1;
}

} // namespace

extern "C" int cusim_encode(const u16 *values, u64 numel, u8 *frame, int base, u64 table, u64 *state, unsigned resident,
                            int backwards) {
    const cusim::Launch launch = {grid_of(numel), THREADS, resident, backwards != 0};
    const int failed = say(cusim::launch(launch, [=] { zipccl_exponent_encode(values, numel, frame, base, table, state); }));
    return failed ? failed : say(cusim::launch({2, THREADS, 1, false}, [=] { zipccl_exponent_raw(values, numel, frame); }));
}

extern "C" int cusim_decode(const u8 *frame, u64 frame_nbytes, u16 *values, u64 numel, u32 *status, int backwards) {
    const cusim::Launch launch = {grid_of(numel), THREADS, 2, backwards != 0};
    return say(cusim::launch(launch, [=] { zipccl_exponent_decode(frame, frame_nbytes, values, numel, status); }));
}

// Mistakes that the simulator must report: 0 a barrier that half of the threads never reach, 1 lanes that meet at different
// collectives, 2 a wait for somebody who never comes.
extern "C" int cusim_mistake(int which) {
    static volatile u32 never = 0;
    return say(cusim::launch({1, 64, 1, false}, [=] {
        if (which == 0 && threadIdx.x < 32)
            __syncthreads();
        if (which == 1 && threadIdx.x % 2 == 0)
            __ballot_sync(ALL, 1);
        if (which == 1)
            __syncwarp();
        while (which == 2 && never == 0)
            __nanosleep(1);
    }));
}

#ifdef PROGRAM
// Reads cases from standard input, each: i32 base, u32 offset of the values from an aligned address, u64 table, u64 numel, u64
// bytes of the frame, values, frame. Encodes the values and compares; decodes the frame and compares; then decodes damaged frames.
template <class T> static T *exact(u64 n, u64 offset = 0) { return (T *)((char *)malloc(n * sizeof(T) + offset) + offset); }

static void expect(bool condition, const char *what, int number) {
    if (condition)
        return;
    fprintf(stderr, "case %d: %s\n", number, what);
    exit(1);
}

int main() {
    struct {
        int base;
        u32 offset;
        u64 table, numel, frame_nbytes;
    } head;
    int number = 0;
    u32 random = 1;
    for (; fread(&head, sizeof head, 1, stdin) == 1; number++) {
        const u64 room = HEADER_NBYTES + align(2 * head.numel), words = 1 + grid_of(head.numel);
        u16 *values = exact<u16>(head.numel, head.offset), *out = exact<u16>(head.numel, head.offset);
        u8 *wanted = exact<u8>(head.frame_nbytes), *frame = exact<u8>(room);
        u64 *state = (u64 *)calloc(words, 8);
        expect(fread(values, 2, head.numel, stdin) == head.numel, "cut off", number);
        expect(fread(wanted, 1, head.frame_nbytes, stdin) == head.frame_nbytes, "cut off", number);
        expect(cusim_encode(values, head.numel, frame, head.base, head.table, state, 2, 1) == 0, "encode", number);
        expect(memcmp(frame, wanted, head.frame_nbytes) == 0, "other bytes", number);
        u32 status = 0;
        expect(cusim_decode(wanted, head.frame_nbytes, out, head.numel, &status, 0) == 0, "decode", number);
        expect(status == 0 && memcmp(out, values, 2 * head.numel) == 0, "other values", number);
        // Nothing may be read or written outside, whatever stands in the header, in offsets and meta, or anywhere.
        for (const u64 end : {(u64)HEADER_NBYTES, min(head.frame_nbytes, (u64)512), head.frame_nbytes}) {
            random = random * 1664525 + 1013904223;
            const u64 at = (random >> 8) % end;
            const u8 before = wanted[at];
            wanted[at] = (u8)(random >> 3);
            expect(cusim_decode(wanted, head.frame_nbytes, out, head.numel, &status, 1) == 0, "decode of damage", number);
            wanted[at] = before;
        }
        const Layout layout = layout_of(head.numel);
        const u64 n_escapes = *(u64 *)(wanted + 40), static_end = HEADER_NBYTES + layout.static_nbytes;
        if (!(wanted[6] & FLAG_RAW) && n_escapes != 0) { // offsets point to escapes that the header does not admit
            u8 *cut = exact<u8>(static_end);
            memcpy(cut, wanted, static_end);
            memset(cut + 40, 0, 8);
            status = 0;
            expect(cusim_decode(cut, static_end, out, head.numel, &status, 1) == 0 && status != 0, "no escapes", number);
            free(cut);
        }
        free((char *)values - head.offset), free((char *)out - head.offset), free(wanted), free(frame), free(state);
    }
    printf("%d cases\n", number);
    return 0;
}
#endif
