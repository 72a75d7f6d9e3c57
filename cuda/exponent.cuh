// What the kernels of exponent.cu share: jobs, the frame, a lane's 32 values, the choice of a block's window.
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
#ifdef ZIPCCL_CP_ASYNC
static constexpr u32 BLOCKS_PER_WARP = 4;
#else
static constexpr u32 BLOCKS_PER_WARP = 1;
#endif
static constexpr u32 BLOCKS_PER_THREAD_BLOCK = WARPS * BLOCKS_PER_WARP;

// What a decoder can find wrong with a frame; or-ed into its status.
enum Fault : u32 {
    BAD_HEADER = 1,        // not the header of a bfloat16 frame of this codec and numel
    BAD_SIZE = 2,          // n_escapes is more than the frame can hold
    BAD_OFFSET = 4,        // the first offset is not 0, or an offset lies behind n_escapes
    BAD_MODE = 8,          // a reserved mode, or a table's without a table
    BAD_BASE = 16,         // a base that the block's mode does not allow
    BAD_ESCAPE_COUNT = 32, // the planes of a block hold more or fewer escapes than the offsets say
    BAD_FILLER = 64,       // the last block is filled up with something else than sign-mantissa 0, code 7
    OVERFLOW = 128,        // no fault of the header, but not all of the dynamic part is here yet: bring the rest, decode again
};

// The compiler does not see that a pointer which comes out of a Batch points to global memory.
template <class T> static __device__ __forceinline__ T *global(T *pointer) {
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}

// ---- single instructions where the compiler would take several; behind each #else, what it does ----

// Element `index` of an array in global memory.
template <class T> static __device__ __forceinline__ T *element(T *array, u32 index) {
#ifdef __CUDACC__
    void *result;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(result) : "r"(index), "r"((u32)sizeof(T)), "l"(array));
    return (T *)global(result);
#else
    return array + index;
#endif
}

// The bits of a where `mask` is set, else those of b; or their complement.
template <bool COMPLEMENT = false> static __device__ __forceinline__ u32 select_bits(u32 mask, u32 a, u32 b) {
#ifdef __CUDACC__
    u32 result;
    asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(mask), "r"(a), "r"(b), "n"(COMPLEMENT ? 0x35 : 0xca));
    return result;
#else
    const u32 result = (a & mask) | (b & ~mask);
    return COMPLEMENT ? ~result : result;
#endif
}

// The smaller of two numbers in each half of a word, both of them exponents of bfloat16 numbers without anything else.
static __device__ __forceinline__ u32 min_exponents(u32 a, u32 b) {
#ifdef __CUDACC__
    u32 result;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));  // as numbers they have the same order
    return result;
#else
    return __vminu2(a, b);
#endif
}

// Bit 3 * number + offset, if there is one.
static __device__ __forceinline__ u32 bit_3_times(u32 number, int offset) {
#ifdef __CUDACC__
    u32 result;
    asm("{ .reg .u32 at; mad.lo.u32 at, %1, 3, %2; shl.b32 %0, 1, at; }" : "=r"(result) : "r"(number), "r"(offset));
    return result;
#else
    const u32 at = 3 * number + (u32)offset;
    return at < 32 ? 1u << at : 0;
#endif
}

// The sum of four bytes, each times the signed byte of `weights` in its place.
static __device__ __forceinline__ int weighted_bytes(u32 bytes, u32 weights) {
#ifdef __CUDACC__
    int result;
    asm("dp4a.u32.s32 %0, %1, %2, 0;" : "=r"(result) : "r"(bytes), "r"(weights));
    return result;
#else
    int sum = 0;
    for (u32 i = 0; i < 4; i++)
        sum += (int)(bytes >> 8 * i & 0xff) * (signed char)(weights >> 8 * i);
    return sum;
#endif
}

// The sum of the values of this lane and those below it. By a warp, of which the first LANES count.
template <u32 LANES = 32> static __device__ __forceinline__ u32 inclusive_sum(u32 value, u32 lane) {
#pragma unroll
    for (u32 step = 1; step < LANES; step *= 2) {
#ifdef __CUDACC__
        // The instruction also says whether there is a lane so far below.
        asm volatile("{ .reg .u32 below; .reg .pred there; shfl.sync.up.b32 below|there, %0, %1, 0, 0xffffffff;"
                     " @there add.u32 %0, %0, below; }"
                     : "+r"(value)
                     : "r"(step));
#else
        const u32 below = __shfl_up_sync(ALL, value, step);
        if (lane >= step)
            value += below;
#endif
    }
    return value;
}

// ---- jobs ----

static constexpr u32 MAX_JOBS = 64;

// One tensor and its frame.
struct alignas(8) Job {
    u16 *values;       // aligned to 2 bytes (16 is fast). Encode reads them, decode writes them
    u8 *frame;         // header and static part, aligned to 8 (16 is fast)
    u8 *dynamic;       // dynamic part, likewise: behind the static part or elsewhere
    u64 numel;         // below 2^32
    u64 dynamic_room;  // decoders: bytes that may be read at `dynamic`
    u32 first;         // the thread block of the launch that is the job's first
    u32 reserved;
};
static_assert(sizeof(Job) == 48, "as the host packs it");

// Jobs of one launch, passed by value. Each has max(1, ceil(numel / (BLOCK * BLOCKS_PER_THREAD_BLOCK))) thread blocks, one job's
// behind the other's.
struct Batch {
    Job jobs[MAX_JOBS];
    u32 n_jobs;
    u32 reserved;
};
static_assert(sizeof(Batch) == 48 * MAX_JOBS + 8, "as the host packs it");

// Which job this thread block works for.
static __device__ __forceinline__ u32 job_of_thread_block(const Batch &batch) {
    u32 low = 0, high = batch.n_jobs;
    while (high - low > 1) {
        const u32 middle = (low + high) / 2;
        if (batch.jobs[middle].first <= blockIdx.x)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// ---- the frame ----

static constexpr u32 LINE = 128;  // bytes; all sections begin with one

// Where the sections are, in lines from the start of the frame. In lines all numbers have 32 bits.
struct Layout {
    u32 n_blocks;
    u32 meta;
    u32 blocks;
    u32 dynamic;
    u32 end;  // of the room that there is
    bool always_raw;
};

static __device__ __forceinline__ Layout layout_of(u32 numel) {
    Layout layout;
    layout.n_blocks = numel / BLOCK + (numel % BLOCK != 0 ? 1 : 0);
    layout.meta = HEADER_NBYTES / LINE + (4 * layout.n_blocks + LINE - 1) / LINE;
    layout.blocks = layout.meta + (2 * layout.n_blocks + LINE - 1) / LINE;
    layout.dynamic = layout.blocks + BLOCK_NBYTES / LINE * layout.n_blocks;
    layout.end = HEADER_NBYTES / LINE + numel / (LINE / 2) + (numel % (LINE / 2) != 0 ? 1 : 0);
    layout.always_raw = layout.dynamic >= layout.end;
    if (layout.always_raw)
        layout.dynamic = layout.end;
    return layout;
}

static __device__ __forceinline__ u64 align(u64 nbytes) { return (nbytes + LINE - 1) / LINE * LINE; }

static __device__ __forceinline__ u64 static_nbytes(const Layout &layout, u32 numel) {
    return layout.always_raw ? 2 * (u64)numel : (u64)LINE * layout.dynamic - HEADER_NBYTES;
}

// Bytes that there are for escapes.
static __device__ __forceinline__ u64 capacity(const Layout &layout) { return (u64)LINE * (layout.end - layout.dynamic); }

static __device__ __forceinline__ u64 raw_dynamic_nbytes(const Layout &layout, u32 numel) {
    return layout.always_raw ? 0 : 2 * (u64)numel - static_nbytes(layout, numel);
}

struct alignas(8) Line {
    u8 bytes[LINE];
};

static __device__ __forceinline__ u8 *line_at(u8 *frame, u32 line) { return element((Line *)frame, line)->bytes; }

static __device__ __forceinline__ const u8 *line_at(const u8 *frame, u32 line) {
    return element((const Line *)frame, line)->bytes;
}

// The line where a block begins.
static __device__ __forceinline__ u32 line_of(const Layout &layout, u32 block) {
    return layout.blocks + BLOCK_NBYTES / LINE * block;
}

// Where byte `at` of a RAW frame's body is. From a multiple of 128 on, 128 bytes stand together.
template <class Byte>
static __device__ __forceinline__ Byte *raw_body(Byte *frame, Byte *dynamic, const Layout &layout, u64 at) {
    const u64 in_static = (u64)LINE * layout.dynamic - HEADER_NBYTES;
    return at < in_static ? frame + HEADER_NBYTES + at : dynamic + (at - in_static);
}

// Word i (0..31) of the header.
static __device__ u32 header_word(u32 i, const Layout &layout, u32 numel, u32 flags, u64 dynamic_nbytes, u64 table) {
    switch (i) {
    case 0: return 0x4c43435a;               // "ZCCL"
    case 1: return 1 | 1 << 8 | flags << 16; // version, dtype bfloat16, flags, no checksum
    case 3: return BLOCK;
    case 4: return 0x6f707865;               // "expo"
    case 5: return 0x746e656e;               // "nent"
    case 8: return numel;
    case 10: return (u32)dynamic_nbytes;
    case 11: return (u32)(dynamic_nbytes >> 32);
    case 12: return (u32)static_nbytes(layout, numel);
    case 13: return (u32)(static_nbytes(layout, numel) >> 32);
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

// Reads the first n of a block's values, `whole` where these are all; the others are 0.
static __device__ __forceinline__ void load(const u16 *block, u32 n, bool whole, u32 lane, u32 (&words)[4][4]) {
    if (whole && aligned(block, 16)) {
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

// The same from a RAW frame.
static __device__ __forceinline__ void load_raw(const u8 *frame, const u8 *dynamic, const Layout &layout, u32 block, u32 n,
                                                u32 lane, u32 (&words)[4][4]) {
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        const u32 i = 256 * k + 8 * lane;
        const u16 *from = (const u16 *)raw_body(frame, dynamic, layout, 2 * ((u64)block * BLOCK + i));
        if (n == BLOCK && aligned(from, 16)) {
            const uint4 quad = __ldcs((const uint4 *)from);
            words[k][0] = quad.x, words[k][1] = quad.y, words[k][2] = quad.z, words[k][3] = quad.w;
            continue;
        }
#pragma unroll
        for (u32 p = 0; p < 4; p++)
            words[k][p] = (i + 2 * p < n ? from[2 * p] : 0u) | (i + 2 * p + 1 < n ? from[2 * p + 1] : 0u) << 16;
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

// Where `mask` is set in b: exchanges those bits with the bits of a that are `shift` higher. Then, if asked, complements all.
template <bool COMPLEMENT = false>
static __device__ __forceinline__ void exchange_bits(u32 &a, u32 &b, u32 shift, u32 mask) {
    const u32 upper = select_bits<COMPLEMENT>(mask << shift, b << shift, a);
    b = select_bits<COMPLEMENT>(mask, a >> shift, b);
    a = upper;
}

// In each of the eight nibbles: bit j of row i changes places with bit i of row j. Twice is nothing.
template <bool COMPLEMENT = false> static __device__ __forceinline__ void transpose(u32 (&rows)[4]) {
    exchange_bits(rows[0], rows[1], 1, 0x55555555);
    exchange_bits(rows[2], rows[3], 1, 0x55555555);
    exchange_bits<COMPLEMENT>(rows[0], rows[2], 2, 0x33333333);
    exchange_bits<COMPLEMENT>(rows[1], rows[3], 2, 0x33333333);
}

// planes[j] (j in 0..2) gets the complement of bit j of all 32 numbers 0..7 that `number` returns for pairs of values, in bits 7 to
// 9 and 23 to 25 of a word that otherwise is 0: where a pair has the lowest bits of its exponents.
template <class Number>
static __device__ __forceinline__ void slice(const u32 (&words)[4][4], Number number, u32 (&planes)[4]) {
#pragma unroll
    for (u32 p = 0; p < 2; p++) {
        u32 bytes[4];  // of k, for planes[2 * p] and planes[2 * p + 1], 7 bits too high: r = 2*p and 2*p + 1, and 4 more each
#pragma unroll
        for (u32 k = 0; k < 4; k++)
            bytes[k] = number(words[k][p]) + 16 * number(words[k][p + 2]);
        const u32 lower = (bytes[0] >> 7) + 2 * bytes[1], upper = (bytes[2] >> 7) + 2 * bytes[3];
        planes[2 * p] = __byte_perm(lower, upper, 0x5410);
        planes[2 * p + 1] = __byte_perm(lower, upper, 0x7632);
    }
    transpose<true>(planes);
}

#ifdef ZIPCCL_BALLOT
static constexpr u32 STAGED_STRIDE = 264;  // 256 values and room that keeps the lanes' reads in different banks

struct alignas(16) Staged {
    u16 values[4][STAGED_STRIDE];
};
static __device__ __forceinline__ Staged &staged_values() {
    __shared__ Staged staged[WARPS];
    return staged[threadIdx.x / 32];
}

// The same planes by ballots, for `number` of one exponent: all 32 numbers of word w are one lane's, so values are handed round.
template <class Number>
static __device__ __forceinline__ void slice_by_ballot(const u32 (&words)[4][4], Number number, u32 lane, u32 (&planes)[4]) {
    Staged &staged = staged_values();
#pragma unroll
    for (u32 k = 0; k < 4; k++)
        *(uint4 *)&staged.values[k][8 * lane] = make_uint4(words[k][0], words[k][1], words[k][2], words[k][3]);
    __syncwarp();
#pragma unroll
    for (u32 w = 0; w < 32; w++) {
        const u32 here = number(staged.values[lane / 8][8 * w + lane % 8] >> 7 & 0xff);
#pragma unroll
        for (u32 j = 0; j < 3; j++) {
            const u32 plane = __ballot_sync(ALL, here >> j & 1);
            planes[j] = lane == w ? ~plane : planes[j];
        }
    }
}
#endif

static constexpr u32 EXPONENTS = 0x7f807f80;  // of a pair of values

// For a pair of values: how far the exponent is above base, 7 where that is more or it is below; in bits 7 to 9 and 23 to 25.
// `minus_base` is minus_exponent(base).
static __device__ __forceinline__ u32 distances_from(u32 pair, u32 minus_base) {
#if __CUDA_ARCH__ >= 900
    return __viaddmin_u16x2(pair & EXPONENTS, minus_base, 0x03800380);
#else
    return min_exponents((pair & EXPONENTS) + minus_base & EXPONENTS, 0x03800380);
#endif
}

static __device__ __forceinline__ u32 minus_exponent(u32 base) {
#if __CUDA_ARCH__ >= 900
    return __byte_perm(0 - (base << 7), 0, 0x1010);
#else
    return __byte_perm(0 - (base << 7) & EXPONENTS, 0, 0x1010);  // modulo 256
#endif
}

// For a pair of values: whether the exponent is not 0.
static __device__ __forceinline__ u32 is_not_zero(u32 pair) { return min_exponents(pair & EXPONENTS, 0x00800080); }

// Sign-mantissa bytes of r = 0..3 (a, b = words[k][0], words[k][1]) or of r = 4..7.
static __device__ __forceinline__ u32 sign_mantissa(u32 a, u32 b) {
    return select_bits(0x7f7f7f7f, __byte_perm(a, b, 0x6420), __byte_perm(a, b, 0x7531));
}

// ---- choosing base and mode ----

// What a block's meta holds.
struct Coding {
    u32 bits;

    __device__ __forceinline__ u32 base() const { return bits & 0xff; }
    __device__ __forceinline__ u32 mode() const { return bits >> 8; }
};

static __device__ __forceinline__ Coding coding_of(u32 base, Mode mode) { return {base | mode << 8}; }

static __device__ __forceinline__ int clamp(int value, int low, int high) { return min(max(value, low), high); }

// Where the window begins for n exponents with this sum.
static __device__ __forceinline__ int window_start(u32 sum, u32 n) { return ((int)(256 * sum / n) - 819) >> 8; }

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
static __device__ __forceinline__ Coding choose_any_coding(const u32 (&words)[4][4], u32 n, u32 lane) {
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
            return coding_of(six.x, SIX_AND_ZERO);
    }
    return coding_of(seven.x, SEVEN);
}

// The same rule, in fewer instructions for a block without a zero in its sample. Its 128 members then exist, as values that do not
// are read as 0.
static __device__ __forceinline__ Coding choose_coding(const u32 (&words)[4][4], u32 n, u32 lane) {
    u32 sample[4];
#pragma unroll
    for (u32 k = 0; k < 4; k++)
        sample[k] = words[k][0] >> 7 & 0xff;
    const bool zero = min(min(sample[0], sample[1]), min(sample[2], sample[3])) == 0;
    if (__any_sync(ALL, zero))
        return choose_any_coding(words, n, lane);

    const u32 highest = __reduce_max_sync(ALL, max(max(sample[0], sample[1]), max(sample[2], sample[3])));
    const u32 floor = max(highest, 12u) - 12;
    u32 sum = 0;
#pragma unroll
    for (u32 k = 0; k < 4; k++)
        sum += max(sample[k], floor);
    sum = __reduce_add_sync(ALL, sum);
    static_assert(256 / (BLOCK / SAMPLE_STRIDE) == 2, "no division");
    const int start = clamp(((int)(2 * sum) - 819) >> 8, 0, 248);

    // The window one below covers exponent start - 1 and not start + 6, the one above start + 7 and not start. How often there are
    // these four is all that is asked. A lane first counts in 3 bits each how many are start - 1, start, ..., start + 8.
    u32 counts = 0;
#pragma unroll
    for (u32 k = 0; k < 4; k++)
        counts += bit_3_times(sample[k], 3 - 3 * start);
    counts = (counts & 0x07000007) | (counts << 5 & 0x0700) | (counts >> 5 & 0x070000);  // and now in 8 bits
    counts = __reduce_add_sync(ALL, counts);
    const int below = weighted_bytes(counts, 0x00ff0001);  // of start - 1, less those of start + 6
    const int above = weighted_bytes(counts, start < 248 ? 0x0100ff00 : 0);
    int base = start;
    if (below > 0)
        base = start - 1;
    if (above > max(below, 0))
        base = start + 1;
    return coding_of((u32)base, SEVEN);
}
