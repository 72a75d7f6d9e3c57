// CUDA kernels of the codec `exponent` (bfloat16): whole frames of wire format version 1, section 3 of docs/wire-format.md.
//
// A warp works on a block of 1024 values. Lane w holds the values 256*k + 8*w + r (k in 0..3, r in 0..7): four loads of 16 bytes,
// and exactly the 32 bits of word w of each plane, so codes are packed inside a thread. Bit 8*k + r of a lane's word belongs to
// (k, r), in planes and in masks alike.
//
// Instead of codes the encoder computes distances, 7 - code: 0 is the first exponent of a window or table, 7 is an escape. They are
// the smaller of (exponent - base) mod 256 and 7, and the planes of the codes are the complements of theirs.
//
// One encoding is two launches on one stream, zipccl_exponent_encode and zipccl_exponent_raw; a decoding is one. No launch waits
// for the host, allocates, or needs memory to be cleared in between, so all of them can be captured in a graph and replayed.
//
// Pointers: values are aligned to 2 bytes (16 is fast), frames to 8. A frame has room for 128 + align(2 * numel) bytes, numel is
// below 2^32. Needs compute capability 8.0 and CUDA 12.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

static constexpr u32 HEADER_NBYTES = 128;
static constexpr u32 BLOCK = 1024;
static constexpr u32 PLANE_NBYTES = BLOCK / 8;
static constexpr u32 BLOCK_NBYTES = BLOCK + 3 * PLANE_NBYTES;
static constexpr u32 SAMPLE_STRIDE = 8;  // a lane's sampled values are those with r = 0
static constexpr u32 FLAG_RAW = 1;
enum Mode : u32 { SEVEN, SIX_AND_ZERO, TABLE };

static constexpr u32 THREADS = 256;  // of every launch
static constexpr u32 WARPS = THREADS / 32;
static constexpr u32 ALL = 0xffffffffu;

// What zipccl_exponent_decode can find wrong with a frame; or-ed into its status.
enum Fault : u32 {
    BAD_HEADER = 1,        // not the header of a bfloat16 frame of this codec and numel
    BAD_SIZE = 2,          // n_escapes is more than the frame can hold, or the frame is longer than its buffer
    BAD_OFFSET = 4,        // the first offset is not 0, or an offset lies behind n_escapes
    BAD_MODE = 8,          // a reserved mode, or a table's without a table
    BAD_BASE = 16,         // a base that the block's mode does not allow
    BAD_ESCAPE_COUNT = 32, // the planes of a block hold more or fewer escapes than the offsets say
    BAD_FILLER = 64,       // the last block is filled up with something else than sign-mantissa 0, code 7
};

// ---- the frame ----

static __device__ __forceinline__ u64 align(u64 nbytes) { return (nbytes + 127) / 128 * 128; }

// Where the sections are, counted from the start of the frame.
struct Layout {
    u32 n_blocks;
    u32 meta;
    u32 blocks;
    bool always_raw;
    u64 static_nbytes;
    u64 capacity;  // bytes there are for escapes
};

static __device__ __forceinline__ Layout layout_of(u64 numel) {
    Layout layout;
    layout.n_blocks = (u32)((numel + BLOCK - 1) / BLOCK);
    layout.meta = HEADER_NBYTES + (u32)align(4 * layout.n_blocks);
    layout.blocks = layout.meta + (u32)align(2 * layout.n_blocks);
    const u64 escapes = layout.blocks + (u64)BLOCK_NBYTES * layout.n_blocks;
    const u64 end = HEADER_NBYTES + align(2 * numel);
    layout.always_raw = escapes >= end;
    layout.static_nbytes = layout.always_raw ? 2 * numel : escapes - HEADER_NBYTES;
    layout.capacity = layout.always_raw ? 0 : end - escapes;
    return layout;
}

static __device__ __forceinline__ u64 raw_dynamic_nbytes(const Layout &layout, u64 numel) {
    return layout.always_raw ? 0 : 2 * numel - layout.static_nbytes;
}

// Word i (0..31) of the header.
static __device__ u32 header_word(u32 i, const Layout &layout, u64 numel, u32 flags, u64 dynamic_nbytes, u64 table) {
    switch (i) {
    case 0: return 0x4c43435a;               // "ZCCL"
    case 1: return 1 | 1 << 8 | flags << 16; // version, dtype bfloat16, flags, no checksum
    case 3: return BLOCK;
    case 4: return 0x6f707865;               // "expo"
    case 5: return 0x746e656e;               // "nent"
    case 8: return (u32)numel;
    case 9: return (u32)(numel >> 32);
    case 10: return (u32)dynamic_nbytes;
    case 11: return (u32)(dynamic_nbytes >> 32);
    case 12: return (u32)layout.static_nbytes;
    case 13: return (u32)(layout.static_nbytes >> 32);
    case 16: return (u32)table;
    case 17: return (u32)(table >> 32);
    default: return 0;
    }
}

// ---- a lane's 32 values: words[k][p] has r = 2*p in its lower half and r = 2*p + 1 in its upper ----

static __device__ __forceinline__ bool aligned(const void *pointer, u32 nbytes) { return ((u64)pointer & (nbytes - 1)) == 0; }

// The bits of a lane's values among the first n of a block.
static __device__ __forceinline__ u32 first_bits(u32 n, u32 lane) {
    u32 bits = 0;
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        const int here = (int)n - (int)(256 * k + 8 * lane);
        bits |= (here >= 8 ? 0xffu : here <= 0 ? 0u : (1u << here) - 1) << 8 * k;
    }
    return bits;
}

// Reads the first n of a block's values; the others are 0.
static __device__ __forceinline__ void load(const u16 *block, u32 n, u32 lane, u32 (&words)[4][4]) {
    if (n == BLOCK && aligned(block, 16)) {
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            const uint4 quad = __ldcs((const uint4 *)(block + 256 * k + 8 * lane));
            words[k][0] = quad.x, words[k][1] = quad.y, words[k][2] = quad.z, words[k][3] = quad.w;
        }
        return;
    }
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
#pragma unroll
        for (u32 p = 0; p < 4; p++) {
            const u32 i = 256 * k + 8 * lane + 2 * p;
            words[k][p] = (i < n ? block[i] : 0u) | (i + 1 < n ? block[i + 1] : 0u) << 16;
        }
    }
}

// Writes the first n of a block's values.
static __device__ __forceinline__ void store(u16 *block, u32 n, u32 lane, const u32 (&words)[4][4]) {
    if (n == BLOCK && aligned(block, 16)) {
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            __stcs((uint4 *)(block + 256 * k + 8 * lane), make_uint4(words[k][0], words[k][1], words[k][2], words[k][3]));
        return;
    }
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
#pragma unroll
        for (u32 p = 0; p < 4; p++) {
            const u32 i = 256 * k + 8 * lane + 2 * p;
            if (i < n)
                block[i] = (u16)words[k][p];
            if (i + 1 < n)
                block[i + 1] = (u16)(words[k][p] >> 16);
        }
    }
}

// Where `mask` is set in b: exchanges those bits with the bits of a that are `shift` higher.
static __device__ __forceinline__ void exchange_bits(u32 &a, u32 &b, u32 shift, u32 mask) {
    const u32 upper = (a & ~(mask << shift)) | (b & mask) << shift;
    b = (b & ~mask) | (a >> shift & mask);
    a = upper;
}

// In each of the eight nibbles: bit j of row i changes places with bit i of row j. Twice is nothing.
static __device__ __forceinline__ void transpose(u32 (&rows)[4]) {
    exchange_bits(rows[0], rows[1], 1, 0x55555555);
    exchange_bits(rows[2], rows[3], 1, 0x55555555);
    exchange_bits(rows[0], rows[2], 2, 0x33333333);
    exchange_bits(rows[1], rows[3], 2, 0x33333333);
}

// planes[j] (j in 0..2) gets bit j of all 32 numbers 0..7 that `number` returns for pairs of values, in bytes 1 and 3.
template <class Number>
static __device__ __forceinline__ void slice(const u32 (&words)[4][4], Number number, u32 (&planes)[4]) {
    u32 rows[8];  // of r; byte k
#pragma unroll
    for (u32 p = 0; p < 4; p++) {
        const u32 lower = __byte_perm(number(words[0][p]), number(words[1][p]), 0x7351);
        const u32 upper = __byte_perm(number(words[2][p]), number(words[3][p]), 0x7351);
        rows[2 * p] = __byte_perm(lower, upper, 0x5410);
        rows[2 * p + 1] = __byte_perm(lower, upper, 0x7632);
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        planes[i] = rows[i] | rows[i + 4] << 4;
    transpose(planes);
}

// For a pair of values: min((exponent + addend) mod 256, 7) in bytes 1 and 3, and anything in bytes 0 and 2. The addend stands in
// bytes 1 and 3. Doubling a pair moves its exponents there.
static __device__ __forceinline__ u32 add_and_limit(u32 pair, u32 addend) {
#if __CUDA_ARCH__ >= 900
    return __viaddmin_u16x2(2 * pair, addend, 0x07ff07ff);
#else
    const u32 sum = (2 * pair & 0xff00ff00) + addend;  // a carry out of byte 1 ends in byte 2
    const u32 above = (((sum & 0x78007800) + 0x78007800) | sum) >> 15 & 0x00010001;
    return (sum & 0x07000700) | above * 0x0700;
#endif
}

// For a pair of values: whether the exponent is not 0, in bit 0 of bytes 1 and 3.
static __device__ __forceinline__ u32 is_not_zero(u32 pair) {
    return (((pair & 0x3f803f80) + 0x3f803f80) | pair) >> 14 << 8 & 0x01000100;
}

// Sign-mantissa bytes of r = 0..3 (a, b = words[k][0], words[k][1]) or of r = 4..7.
static __device__ __forceinline__ u32 sign_mantissa(u32 a, u32 b) {
    return (__byte_perm(a, b, 0x6420) & 0x7f7f7f7f) | (__byte_perm(a, b, 0x7531) & 0x80808080);
}

// ---- choosing base and mode ----

struct Coding {
    u32 base;
    u32 mode;
};

static __device__ __forceinline__ int clamp(int value, int low, int high) { return min(max(value, low), high); }

// Where the window begins for n exponents with this sum.
static __device__ __forceinline__ int window_start(u32 sum, u32 n) {
    return ((int)(n == BLOCK / SAMPLE_STRIDE ? 2 * sum : 256 * sum / n) - 819) >> 8;
}

// The first of `start`, `start - 1` and `start + 1` that covers the most sampled exponents, and how many that are.
static __device__ __forceinline__ uint2 best_window(const u32 (&sample)[4], int start, u32 width, int low, int high) {
    const u32 bases[3] = {(u32)clamp(start, low, high), (u32)clamp(start - 1, low, high), (u32)clamp(start + 1, low, high)};
    u32 counts = 0;  // three numbers up to 128 in one word: one reduction
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
#pragma unroll
        for (u32 i = 0; i < 3; i++)
            counts += (sample[k] - bases[i] < width ? 1u : 0u) << 10 * i;
    }
    counts = __reduce_add_sync(ALL, counts);
    uint2 best = make_uint2(bases[0], counts & 1023);
#pragma unroll
    for (u32 i = 1; i < 3; i++) {
        const u32 covered = counts >> 10 * i & 1023;
        if (covered > best.y)
            best = make_uint2(bases[i], covered);
    }
    return best;
}

// The integer rule of the wire format, for a block with n values. Sums and counts are the warp's, and the same in all lanes.
static __device__ __forceinline__ Coding choose_coding(const u32 (&words)[4][4], u32 n, u32 lane) {
    constexpr u32 MISSING = 0x10000;  // in no window
    u32 sample[4], highest = 0;
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        sample[k] = 256 * k + 8 * lane < n ? words[k][0] >> 7 & 0xff : MISSING;
        highest = max(highest, sample[k] & 0xff);
    }
    highest = __reduce_max_sync(ALL, highest);
    const u32 floor = highest > 12 ? highest - 12 : 0;

    u32 sums = 0;  // of exponents in the lower half, at most 128 * 255; of zeros in the upper
#pragma unroll
    for (u32 k = 0; k < 4; k++)
        sums += sample[k] == MISSING ? 0 : max(sample[k], floor) + (sample[k] == 0 ? 0x10000u : 0u);
    sums = __reduce_add_sync(ALL, sums);
    const u32 sum = sums & 0xffff, zeros = sums >> 16, n_sampled = (n + SAMPLE_STRIDE - 1) / SAMPLE_STRIDE;

    const uint2 seven = best_window(sample, clamp(window_start(sum, n_sampled), 0, 248), 7, 0, 248);
    if (0 < zeros && zeros < n_sampled) {
        // Without its zeros a sample has the same largest member, hence the same floor, which each zero has added to the sum.
        const int start = window_start(sum - zeros * floor, n_sampled - zeros) + 1;
        const uint2 six = best_window(sample, start, 6, 1, 250);
        if (six.y + zeros > seven.y)
            return {six.x, SIX_AND_ZERO};
    }
    return {seven.x, SEVEN};
}

// ---- encode ----

static __device__ __forceinline__ u32 inclusive_sum(u32 value, u32 lane) {
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 below = __shfl_up_sync(ALL, value, step);
        value += lane >= step ? below : 0;
    }
    return value;
}

// The state: word 0 has the epoch in its lower half and the number of thread blocks that have finished in its upper; word 1 + i is
// what thread block i has published, valid while its epoch is the current one. So a state is cleared once, when it is allocated
// (to zero), and each launch ends the validity of its words by advancing the epoch (modulo 2^30).
enum Published : u32 { NOTHING, OWN_SUM, PREFIX };

static __device__ __forceinline__ u64 published(u32 epoch, Published what, u32 value) {
    return (u64)(epoch << 2 | what) << 32 | value;
}

// Decoupled look-back by one warp: publishes the number of escapes in this thread block, and returns that of all before it, adding
// up what those have published, 32 at a time, until one knows its prefix. It waits for thread blocks before this one only, and
// relies, as single-pass scans do, on thread blocks being started in the order of their indices.
static __device__ __forceinline__ u32 look_back(u64 *state, u32 own, u32 lane) {
    volatile u64 *words = state + 1;
    const u32 epoch = *(volatile u32 *)state;
    const u32 me = blockIdx.x;
    if (lane == 0)
        words[me] = published(epoch, me == 0 ? PREFIX : OWN_SUM, own);
    if (me == 0)
        return 0;
    u32 before = 0;
    for (u32 end = me;; end -= 32) {  // lane 0 looks at thread block end - 1, lane 1 at end - 2, ...
        u64 word = published(epoch, PREFIX, 0);
        if (lane < end) {
            while (word = words[end - 1 - lane], (u32)(word >> 34) != epoch || (word >> 32 & 3) == NOTHING)
                __nanosleep(20);
        }
        const u32 prefixes = __ballot_sync(ALL, (word >> 32 & 3) == PREFIX);
        const bool counts = prefixes == 0 || lane <= (u32)__ffs(prefixes) - 1;
        before += __reduce_add_sync(ALL, counts ? (u32)word : 0u);
        if (prefixes != 0)
            break;
    }
    if (lane == 0)
        words[me] = published(epoch, PREFIX, before + own);
    return before;
}

// The last thread block to finish leaves the state as the next launch needs it.
static __device__ __forceinline__ void finish(u64 *state) {
    __threadfence();
    u32 *epoch = (u32 *)state, *finished = epoch + 1;
    if (atomicAdd(finished, 1u) == gridDim.x - 1) {
        *finished = 0;
        *epoch = (*epoch + 1) & 0x3fffffff;
    }
}

// What the frame has once: header, and zeros behind offsets, meta and escapes. By one warp.
static __device__ void write_rest(u8 *frame, const Layout &layout, u64 numel, u64 n_escapes, u64 table, u32 lane) {
    const bool raw = layout.always_raw || n_escapes > layout.capacity;
    const u64 dynamic_nbytes = raw ? raw_dynamic_nbytes(layout, numel) : n_escapes;
    ((u32 *)frame)[lane] = header_word(lane, layout, numel, raw ? FLAG_RAW : 0, dynamic_nbytes, raw ? 0 : table);
    if (raw)
        return;
    for (u32 at = HEADER_NBYTES + 4 * (layout.n_blocks + lane); at < layout.meta; at += 4 * 32)
        *(u32 *)(frame + at) = 0;
    for (u32 at = layout.meta + 2 * (layout.n_blocks + lane); at < layout.blocks; at += 2 * 32)
        *(u16 *)(frame + at) = 0;
    for (u64 at = n_escapes + lane; at < align(n_escapes); at += 32)
        frame[HEADER_NBYTES + layout.static_nbytes + at] = 0;
}

// Encodes values[0..numel) into a frame: everything, header included, but the body of a RAW frame, which zipccl_exponent_raw
// writes.
//
// Grid: max(1, ceil(numel / 8192)) thread blocks of THREADS.
// base   of every block (0..249, mode 0), or negative: base and mode are chosen block by block
// table  0, or seven different exponents, the first in the lowest byte: every block has mode 2 and base is ignored
// state  one word and one more for each thread block, zero when it is first used; not for launches that may run at the same time
extern "C" __global__ void __launch_bounds__(THREADS, 4)
zipccl_exponent_encode(const u16 *__restrict__ values, u64 numel, u8 *__restrict__ frame, int base, u64 table, u64 *state) {
    __shared__ u8 distances[256];  // of exponents from the table
    __shared__ u32 sums[WARPS];
    __shared__ u32 escapes_before;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Layout layout = layout_of(numel);
    if (layout.always_raw) {
        if (blockIdx.x == 0 && warp == 0)
            write_rest(frame, layout, numel, 0, 0, lane);
        return;
    }
    if (table != 0) {
        static_assert(THREADS == 256, "a thread for each exponent");
        distances[threadIdx.x] = 7;
        __syncthreads();
        if (threadIdx.x < 7)
            distances[table >> 8 * threadIdx.x & 0xff] = (u8)threadIdx.x;
        __syncthreads();
    }

    const u32 block = blockIdx.x * WARPS + warp;
    const bool exists = block < layout.n_blocks;
    const u16 *from = values + (u64)block * BLOCK;
    u32 escaped = 0;
    if (exists) {
        const u32 n = (u32)min((u64)BLOCK, numel - (u64)block * BLOCK);
        u32 words[4][4];
        load(from, n, lane, words);

        u8 *to = frame + layout.blocks + (u64)block * BLOCK_NBYTES;
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            *(uint2 *)(to + 256 * k + 8 * lane) =
                make_uint2(sign_mantissa(words[k][0], words[k][1]), sign_mantissa(words[k][2], words[k][3]));

        Coding coding = {base < 0 ? 0u : (u32)base, SEVEN};
        u32 planes[4];
        if (table != 0) {
            coding = {0, TABLE};
            const auto distance = [](u32 exponent) { return (u32)distances[exponent & 0xff]; };
            slice(words, [=](u32 pair) { return distance(pair >> 7) << 8 | distance(pair >> 23) << 24; }, planes);
        } else {
            if (base < 0)
                coding = choose_coding(words, n, lane);
            const u32 minus_base = (0x100 - coding.base & 0xff) * 0x01000100;
            slice(words, [=](u32 pair) { return add_and_limit(pair, minus_base); }, planes);
            if (coding.mode == SIX_AND_ZERO) {  // what is outside of six, 6 or 7 so far, becomes 6 where it is 0, else 7
                const u32 outside = planes[1] & planes[2];
                u32 not_zero[4];
                slice(words, is_not_zero, not_zero);
                planes[0] = (planes[0] & ~outside) | (not_zero[0] & outside);
            }
        }
        if (n < BLOCK) {
            const u32 real = first_bits(n, lane);
#pragma unroll
            for (u32 j = 0; j < 3; j++)
                planes[j] &= real;
        }
        escaped = planes[0] & planes[1] & planes[2];
#pragma unroll
        for (u32 j = 0; j < 3; j++)
            *(u32 *)(to + BLOCK + PLANE_NBYTES * j + 4 * lane) = ~planes[j];
        if (lane == 0)
            *(u16 *)(frame + layout.meta + 2 * block) = (u16)(coding.base | coding.mode << 8);
    }

    const u32 own = __popc(escaped);
    const u32 up_to_here = inclusive_sum(own, lane);
    if (lane == 31)
        sums[warp] = up_to_here;
    __syncthreads();
    if (warp == 0) {
        const u32 sum = lane < WARPS ? sums[lane] : 0;
        const u32 up_to_warp = inclusive_sum(sum, lane);
        if (lane < WARPS)
            sums[lane] = up_to_warp - sum;
        const u32 before = look_back(state, __shfl_sync(ALL, up_to_warp, 31), lane);
        if (lane == 0)
            escapes_before = before;
    }
    __syncthreads();

    if (exists) {
        const u32 offset = escapes_before + sums[warp];
        if (lane == 0)
            *(u32 *)(frame + HEADER_NBYTES + 4 * block) = offset;
        u8 *escapes = frame + HEADER_NBYTES + layout.static_nbytes;
        for (u32 at = offset + up_to_here - own; escaped != 0; at++, escaped &= escaped - 1) {
            const u32 bit = __ffs(escaped) - 1;
            if (at < layout.capacity)
                escapes[at] = (u8)(from[256 * (bit / 8) + 8 * lane + bit % 8] >> 7);
        }
        if (block == layout.n_blocks - 1)
            write_rest(frame, layout, numel, offset + __shfl_sync(ALL, up_to_here, 31), table, lane);
    }
    if (threadIdx.x == 0)
        finish(state);
}

// Writes the body of a frame whose header says that it is RAW, and else does nothing. Launched behind every
// zipccl_exponent_encode, with any grid of THREADS.
extern "C" __global__ void __launch_bounds__(THREADS)
zipccl_exponent_raw(const u16 *__restrict__ values, u64 numel, u8 *__restrict__ frame) {
    if (!(frame[6] & FLAG_RAW))
        return;
    const bool fast = aligned(values, 8);
    for (u64 i = 4 * ((u64)blockIdx.x * THREADS + threadIdx.x); i < align(2 * numel) / 2; i += 4ull * THREADS * gridDim.x) {
        uint2 quad;
        if (fast && i + 4 <= numel) {
            quad = *(const uint2 *)(values + i);
        } else {
            quad.x = (i < numel ? values[i] : 0u) | (i + 1 < numel ? values[i + 1] : 0u) << 16;
            quad.y = (i + 2 < numel ? values[i + 2] : 0u) | (i + 3 < numel ? values[i + 3] : 0u) << 16;
        }
        *(uint2 *)(frame + HEADER_NBYTES + 2 * i) = quad;
    }
}

// ---- decode ----

// exponents[code], one a byte; that of code 0, an escape, is only there to be overwritten.
static __device__ __forceinline__ uint2 exponents_of_codes(Coding coding, uint2 table) {
    if (coding.mode == TABLE)  // in reverse
        return make_uint2(__byte_perm(table.y, 0, 0x0124), __byte_perm(table.x, 0, 0x0123));
    const u32 all = coding.base * 0x01010101;
    const u32 lower = coding.mode == SEVEN ? (all & 0xffffff00) + 0x04050600 : (all & 0xffff0000) + 0x04050000;
    return make_uint2(lower, all + 0x00010203);
}

// What is wrong with a header, as far as a device can tell: the checksum is the host's to check. By one warp.
static __device__ __forceinline__ u32 header_faults(const u32 *header, const Layout &layout, u64 numel, u64 frame_nbytes,
                                                    u32 lane) {
    if (frame_nbytes < HEADER_NBYTES)
        return BAD_SIZE;
    const u32 word = __ldg(header + lane), flags_word = __ldg(header + 1);
    const u64 dynamic_nbytes = __ldg(header + 10) | (u64)__ldg(header + 11) << 32;
    bool good = word == header_word(lane, layout, numel, 0, 0, 0);
    if (lane == 1)
        good = (word & 0xfefeffff) == header_word(1, layout, numel, 0, 0, 0);  // RAW or not, with a checksum or without
    if (lane == 2)
        good = word == 0 || flags_word >> 24 != 0;
    if (lane == 10 || lane == 11 || (16 <= lane && lane < 24))  // dynamic_nbytes; params and measurements
        good = true;
    if (!__all_sync(ALL, good))
        return BAD_HEADER;
    const bool raw = flags_word >> 16 & FLAG_RAW;
    if (layout.always_raw && !raw)
        return BAD_HEADER;
    if (raw ? dynamic_nbytes != raw_dynamic_nbytes(layout, numel) : dynamic_nbytes > layout.capacity)
        return BAD_SIZE;
    if (HEADER_NBYTES + align(layout.static_nbytes) + align(dynamic_nbytes) > frame_nbytes)
        return BAD_SIZE;
    return 0;
}

// Whether this lane's values behind the first n of a block have sign-mantissa byte 0 and code 7.
static __device__ bool fillers_are_good(const u8 *block, const u32 (&planes)[4], u32 n, u32 lane) {
    const u32 fillers = ~first_bits(n, lane);
    u32 bad = ~(planes[0] & planes[1] & planes[2]) & fillers;
#pragma unroll 1
    for (u32 bits = fillers; bits != 0; bits &= bits - 1) {
        const u32 bit = __ffs(bits) - 1;
        bad |= __ldg(block + 256 * (bit / 8) + 8 * lane + bit % 8);
    }
    return bad == 0;
}

// Decodes a frame, RAW or not, into values[0..numel). It trusts no byte of it: nothing is read outside of the frame or written
// outside of the output, whatever it holds, and what is wrong is or-ed into *status (enum Fault), which the caller clears. Values
// are then unspecified.
//
// Grid: max(1, ceil(numel / 8192)) thread blocks of THREADS.
// frame_nbytes  bytes that may be read at `frame`
extern "C" __global__ void __launch_bounds__(THREADS, 4)
zipccl_exponent_decode(const u8 *__restrict__ frame, u64 frame_nbytes, u16 *__restrict__ values, u64 numel, u32 *status) {
    __shared__ u32 staged[WARPS][8][32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 block = blockIdx.x * WARPS + warp;
    const Layout layout = layout_of(numel);
    const u32 *header = (const u32 *)frame;
    u32 faults = header_faults(header, layout, numel, frame_nbytes, lane);
    if (faults != 0) {
        if (lane == 0 && block == 0)
            atomicOr(status, faults);
        return;
    }
    if (block >= layout.n_blocks)
        return;
    const u32 n = (u32)min((u64)BLOCK, numel - (u64)block * BLOCK);
    u16 *to = values + (u64)block * BLOCK;
    u32 words[4][4];
    if (__ldg(header + 1) >> 16 & FLAG_RAW) {
        const u16 *raw = (const u16 *)(frame + HEADER_NBYTES) + (u64)block * BLOCK;
        load(raw, n, lane, words);
        store(to, n, lane, words);
        return;
    }

    const u8 *from = frame + layout.blocks + (u64)block * BLOCK_NBYTES;
    uint2 sign_mantissas[4];
#pragma unroll
    for (u32 k = 0; k < 4; k++)
        sign_mantissas[k] = __ldcs((const uint2 *)(from + 256 * k + 8 * lane));
    u32 planes[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 j = 0; j < 3; j++)
        planes[j] = __ldcs((const u32 *)(from + BLOCK + PLANE_NBYTES * j + 4 * lane));

    const u32 n_escapes = __ldg(header + 10);
    const u32 *offsets = (const u32 *)(frame + HEADER_NBYTES);
    const u32 begin = __ldg(offsets + block), end = block + 1 < layout.n_blocks ? __ldg(offsets + block + 1) : n_escapes;
    const u32 meta = __ldg((const u16 *)(frame + layout.meta) + block);
    const Coding coding = {meta & 0xff, meta >> 8};
    const uint2 table = make_uint2(__ldg(header + 16), __ldg(header + 17) & 0xffffff);

    u32 escaped = ~(planes[0] | planes[1] | planes[2]);
    const u32 own = __popc(escaped);
    const u32 up_to_here = inclusive_sum(own, lane);
    const u32 total = __shfl_sync(ALL, up_to_here, 31);
    if (begin > end || end > n_escapes || (block == 0 && begin != 0))
        faults |= BAD_OFFSET;
    else if (end - begin != total)
        faults |= BAD_ESCAPE_COUNT;
    if (coding.mode > TABLE || (coding.mode == TABLE && (table.x | table.y) == 0))
        faults |= BAD_MODE;
    else if (coding.base < (coding.mode == SIX_AND_ZERO ? 1 : 0) ||
             coding.base > (coding.mode == SEVEN ? 249 : coding.mode == SIX_AND_ZERO ? 250 : 0))
        faults |= BAD_BASE;
    if (n < BLOCK && !__all_sync(ALL, fillers_are_good(from, planes, n, lane)))
        faults |= BAD_FILLER;
    if (faults != 0) {  // the same in all lanes
        if (lane == 0)
            atomicOr(status, faults);
        return;
    }

    // Nibble 2*k + h of row q is the code of r = q + 4*h, and four nibbles select four exponents at once.
    transpose(planes);
    const uint2 exponents = exponents_of_codes(coding, table);
    u32 quads[8];  // [4 * (k / 2) + q], byte 2 * (k % 2) + h
#pragma unroll
    for (u32 q = 0; q < 4; q++) {
        quads[q] = __byte_perm(exponents.x, exponents.y, planes[q] & 0xffff);
        quads[4 + q] = __byte_perm(exponents.x, exponents.y, planes[q] >> 16);
    }
    if (total != 0) {  // put escapes into their places; registers cannot be indexed, this lane's column of shared memory can
#pragma unroll
        for (u32 i = 0; i < 8; i++)
            staged[warp][i][lane] = quads[i];
        const u8 *escapes = frame + HEADER_NBYTES + layout.static_nbytes;
        for (u32 at = begin + up_to_here - own; escaped != 0; at++, escaped &= escaped - 1) {
            const u32 bit = __ffs(escaped) - 1, k = bit / 8, q = bit % 4, h = bit / 4 % 2;
            ((u8 *)&staged[warp][4 * (k / 2) + q][lane])[2 * (k % 2) + h] = __ldg(escapes + at);
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++)
            quads[i] = staged[warp][i][lane];
    }
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
#pragma unroll
        for (u32 p = 0; p < 4; p++) {
            const u32 h = p / 2, q = 2 * (p % 2), byte = 2 * (k % 2) + h;
            const u32 pair = __byte_perm(quads[4 * (k / 2) + q], quads[4 * (k / 2) + q + 1], (4 + byte) << 12 | byte << 4);
            const u32 twice = __byte_perm(h ? sign_mantissas[k].y : sign_mantissas[k].x, 0, q * 0x1111 + 0x1100);
            words[k][p] = (pair >> 1 & 0x7f807f80) | (twice & 0x807f807f);
        }
    }
    store(to, n, lane, words);
}
