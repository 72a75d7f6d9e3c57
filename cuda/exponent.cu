// CUDA kernels of the codec `exponent` (bfloat16): frames of wire format version 1, section 3 of docs/wire-format.md.
//
// A warp works on a block of 1024 values. Lane w holds the values 256*k + 8*w + r (k in 0..3, r in 0..7): four loads of 16 bytes,
// and exactly the 32 bits of word w of each plane, so codes are packed inside a thread. Bit 8*k + r of a lane's word belongs to
// (k, r), in planes and in masks alike.
//
// Instead of codes the encoder computes distances, 7 - code: 0 is the first exponent of a window or table, 7 is an escape. They are
// the smaller of (exponent - base) mod 256 and 7, and the planes of the codes are the complements of theirs.
//
// A launch works on up to MAX_JOBS tensors, each with a frame of its own. One encoding is two launches on one stream,
// zipccl_exponent_encode and zipccl_exponent_raw; a decoding is one, of zipccl_exponent_decode or, where the frames of several
// ranks become one sum, of zipccl_exponent_decode_reduce. No launch waits for the host or allocates, and encoding needs no memory
// to be cleared in between, so all of them can be captured in a graph and replayed. All have THREADS threads and no dynamic shared
// memory.
//
// A frame lies in two pieces, which may be neighbours: header and static part, whose sizes follow from numel, and the dynamic part.
// Pointers: values are aligned to 2 bytes (16 is fast), both pieces to 8 (16 is fast). An encoder's frame has room for
// 128 + align(2 * numel) bytes in all, numel is below 2^32. Needs compute capability 8.0 and CUDA 12.
//
// Variants, with the same entry points and the same bytes, for measurements to compare:
//   ZIPCCL_CP_ASYNC  a warp works on four blocks in turn (zipccl_exponent_decode_reduce: on those of the ranks), and while it works
//                    on one, the next one's bytes are on their way to shared memory. Each lane copies what it will read itself.
//   ZIPCCL_BALLOT    the encoder's planes come from ballots of the warp
#if defined(ZIPCCL_CP_ASYNC) && defined(ZIPCCL_BALLOT)
#error "one variant at a time"
#endif
#if defined(ZIPCCL_CP_ASYNC) && defined(__CUDACC__)
#include <cuda_pipeline.h>
#endif
#include "exponent.cuh"

// ---- encode ----

// The state: word 0 has the epoch in its lower half and the number of thread blocks that have finished in its upper; word 1 + i is
// what thread block i has published, valid while its epoch is the current one. So a state is cleared once, when it is allocated
// (to zero), and each launch ends the validity of its words by advancing the epoch (modulo 2^30).
enum Published : u32 { NOTHING, OWN_SUM, PREFIX };

static __device__ __forceinline__ u64 published(u32 epoch, Published what, u32 value) {
    return (u64)(epoch << 2 | what) << 32 | value;
}

// Decoupled look-back by one warp: publishes the number of escapes in this thread block, and returns that of all before it in its
// job, whose first thread block is `first`: it adds up what those have published, 32 at a time, until one knows its prefix. It
// waits for thread blocks before this one only, and relies, as single-pass scans do, on thread blocks being started in the order of
// their indices.
static __device__ __forceinline__ u32 look_back(u64 *state, u32 first, u32 own, u32 lane) {
    volatile u64 *words = state + 1;
    const u32 epoch = *(volatile u32 *)state;
    const u32 me = blockIdx.x;
    if (lane == 0)
        words[me] = published(epoch, me == first ? PREFIX : OWN_SUM, own);
    if (me == first)
        return 0;
    u32 before = 0;
    for (u32 end = me;; end -= 32) {  // lane 0 looks at thread block end - 1, lane 1 at end - 2, ...
        u64 word = published(epoch, PREFIX, 0);
        if (lane < end - first) {
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
    volatile u32 *epoch = (volatile u32 *)state, *finished = epoch + 1;
    if (atomicAdd((u32 *)state + 1, 1u) == gridDim.x - 1) {
        *finished = 0;
        *epoch = (*epoch + 1) & 0x3fffffff;
    }
}

// What the frame has once: header, and zeros behind offsets, meta and escapes. By one warp.
static __device__ void write_rest(u8 *frame, u8 *dynamic, const Layout &layout, u32 numel, u64 n_escapes, u64 table, u64 *size,
                                  u32 lane) {
    const bool raw = layout.always_raw || n_escapes > capacity(layout);
    const u64 dynamic_nbytes = raw ? raw_dynamic_nbytes(layout, numel) : n_escapes;
    if (size != nullptr && lane == 0)
        *size = dynamic_nbytes;
    ((u32 *)frame)[lane] = header_word(lane, layout, numel, raw ? FLAG_RAW : 0, dynamic_nbytes, raw ? 0 : table);
    if (raw)
        return;
    for (u32 at = HEADER_NBYTES + 4 * (layout.n_blocks + lane); at < LINE * layout.meta; at += 4 * 32)
        *(u32 *)(frame + at) = 0;
    for (u32 at = LINE * layout.meta + 2 * (layout.n_blocks + lane); at < LINE * layout.blocks; at += 2 * 32)
        *(u16 *)(frame + at) = 0;
    for (u64 at = n_escapes + lane; at < align(n_escapes); at += 32)
        dynamic[at] = 0;
}

// The planes of the codes of a block without a table. Those of values that do not exist are unspecified.
static __device__ __forceinline__ void slice_by_window(const u32 (&words)[4][4], Coding coding, u32 lane, u32 (&planes)[4]) {
    const u32 base = coding.base();
#ifdef ZIPCCL_BALLOT
    const auto in_window = [=](u32 exponent) { return min(exponent - base & 0xff, 7u); };
    if (coding.mode() == SEVEN)
        slice_by_ballot(words, in_window, lane, planes);
    else
        slice_by_ballot(
            words, [=](u32 exponent) { return exponent == 0 ? 6u : in_window(exponent) < 6 ? in_window(exponent) : 7u; }, lane,
            planes);
#else
    (void)lane;
    const u32 minus_base = minus_exponent(base);
    slice(words, [=](u32 pair) { return distances_from(pair, minus_base); }, planes);
    if (coding.mode() == SIX_AND_ZERO) {  // what is outside of six, code 0 or 1 so far, becomes 1 where it is 0, else 0
        const u32 inside = planes[1] | planes[2];
        u32 zero[4];
        slice(words, is_not_zero, zero);
        planes[0] = (planes[0] & inside) | (zero[0] & ~inside);
    }
#endif
}

// The same with a table, as distances of all exponents.
static __device__ __forceinline__ void slice_by_table(const u32 (&words)[4][4], const u8 *distances, u32 lane, u32 (&planes)[4]) {
    const auto distance = [=](u32 exponent) { return (u32)distances[exponent & 0xff]; };
#ifdef ZIPCCL_BALLOT
    slice_by_ballot(words, distance, lane, planes);
#else
    (void)lane;
    slice(words, [=](u32 pair) { return distance(pair >> 7) << 7 | distance(pair >> 23) << 23; }, planes);
#endif
}

// Encodes each job's values[0..numel) into its frame: everything, header included, but the body of a RAW frame, which
// zipccl_exponent_raw writes.
//
// Grid: the thread blocks of all jobs.
// base   of every block (0..249, mode 0), or negative: base and mode are chosen block by block
// table  0, or seven different exponents, the first in the lowest byte: every block has mode 2 and base is ignored
// state  one word and one more for each thread block, zero when it is first used; not for launches that may run at the same time
// sizes  null, or for each job where its frame's dynamic_nbytes goes
extern "C" __global__ void __launch_bounds__(THREADS, 4)
zipccl_exponent_encode(const __grid_constant__ Batch batch, int base, u64 table, u64 *state, u64 *sizes) {
    __shared__ u8 distances[256];  // of exponents from the table
    __shared__ uint2 blocks[BLOCKS_PER_THREAD_BLOCK];  // escapes, later those before it in this thread block; base and mode
    __shared__ u32 escapes_before;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 index = job_of_thread_block(batch), first = batch.jobs[index].first;
    const u16 *const values = global(batch.jobs[index].values);
    u8 *const frame = global(batch.jobs[index].frame), *const dynamic = global(batch.jobs[index].dynamic);
    const u32 numel = (u32)batch.jobs[index].numel;
    u64 *const size = sizes == nullptr ? nullptr : sizes + index;
    const Layout layout = layout_of(numel);
    if (layout.always_raw) {
        if (blockIdx.x == first && warp == 0)
            write_rest(frame, dynamic, layout, numel, 0, 0, size, lane);
        if (threadIdx.x == 0)
            finish(state);
        return;
    }
    const bool has_table = (u32)table != 0;  // of four different exponents not all are 0
    if (has_table) {
        static_assert(THREADS == 256, "a thread for each exponent");
        distances[threadIdx.x] = 7;
        __syncthreads();
        if (threadIdx.x < 7)
            distances[table >> 8 * threadIdx.x & 0xff] = (u8)threadIdx.x;
        __syncthreads();
    }

    // The warp's blocks are this one and each WARPS behind; turn by turn they move through `escaped` and `up_to_here`, which so
    // need no index.
    const u32 first_block = (blockIdx.x - first) * BLOCKS_PER_THREAD_BLOCK + warp;
    const u32 line = __shfl_sync(ALL, line_of(layout, first_block), 0);  // the compiler would rather find out again than keep it
    u32 escaped[BLOCKS_PER_WARP] = {}, up_to_here[BLOCKS_PER_WARP] = {};
#ifdef ZIPCCL_CP_ASYNC
    __shared__ uint4 ahead[2][WARPS][4][32];
    const auto bring = [&](u32 turn) {
        const u64 begin = (u64)(first_block + turn * WARPS) * BLOCK;
        if (turn < BLOCKS_PER_WARP && begin + BLOCK <= numel && aligned(values, 16)) {
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                __pipeline_memcpy_async(&ahead[turn % 2][warp][k][lane], values + begin + 256 * k + 8 * lane, 16);
        }
        __pipeline_commit();
    };
    bring(0);
#endif
#pragma unroll 1
    for (u32 turn = 0; turn < BLOCKS_PER_WARP; turn++) {
        const u32 block = first_block + turn * WARPS;
#ifdef ZIPCCL_CP_ASYNC
        bring(turn + 1);
        __pipeline_wait_prior(1);
#endif
        u32 mask = 0;
        Coding coding = {};
        if (block < layout.n_blocks) {
            const u32 n = min(BLOCK, numel - block * BLOCK);
            const bool whole = __all_sync(ALL, n == BLOCK);  // once: the compiler would rather ask three times
            u32 words[4][4];
#ifdef ZIPCCL_CP_ASYNC
            if (whole && aligned(values, 16)) {
#pragma unroll
                for (u32 k = 0; k < 4; k++) {
                    const uint4 quad = ahead[turn % 2][warp][k][lane];
                    words[k][0] = quad.x, words[k][1] = quad.y, words[k][2] = quad.z, words[k][3] = quad.w;
                }
            } else
#endif
                load(values + (u64)block * BLOCK, n, whole, lane, words);

            u32 planes[4];
            if (has_table) {
                coding = coding_of(0, TABLE);
                slice_by_table(words, distances, lane, planes);
            } else {
                coding = base < 0 ? choose_coding(words, n, lane) : coding_of((u32)base, SEVEN);
                slice_by_window(words, coding, lane, planes);
            }
            if (!whole) {
                const u32 fillers = ~first_bits(n, lane);
#pragma unroll
                for (u32 j = 0; j < 3; j++)
                    planes[j] |= fillers;
            }
            mask = ~(planes[0] | planes[1] | planes[2]);
            u8 *const to = line_at(frame, line + BLOCK_NBYTES / LINE * WARPS * turn);
            uint2 *const sign_mantissas = element((uint2 *)to, lane);
#pragma unroll
            for (u32 k = 0; k < 4; k++)
                sign_mantissas[32 * k] =
                    make_uint2(sign_mantissa(words[k][0], words[k][1]), sign_mantissa(words[k][2], words[k][3]));
            u32 *const words_of_planes = element((u32 *)to, lane);
#pragma unroll
            for (u32 j = 0; j < 3; j++)
                words_of_planes[(BLOCK + PLANE_NBYTES * j) / 4] = planes[j];
        }
        const u32 sum = inclusive_sum(__popc(mask), lane);
        if (lane == 31)
            blocks[turn * WARPS + warp] = make_uint2(sum, coding.bits);
#pragma unroll
        for (u32 i = 1; i < BLOCKS_PER_WARP; i++)
            escaped[i - 1] = escaped[i], up_to_here[i - 1] = up_to_here[i];
        escaped[BLOCKS_PER_WARP - 1] = mask, up_to_here[BLOCKS_PER_WARP - 1] = sum;
    }

    __syncthreads();
    if (warp == 0) {
        static_assert(BLOCKS_PER_THREAD_BLOCK <= 32, "a lane for each block");
        const uint2 mine = lane < BLOCKS_PER_THREAD_BLOCK ? blocks[lane] : make_uint2(0, 0);
        const u32 up_to_mine = inclusive_sum<BLOCKS_PER_THREAD_BLOCK>(mine.x, lane);
        if (lane < BLOCKS_PER_THREAD_BLOCK)
            blocks[lane].x = up_to_mine - mine.x;
        const u32 own = __shfl_sync(ALL, up_to_mine, BLOCKS_PER_THREAD_BLOCK - 1);
        const u32 before = look_back(state, first, own, lane);
        if (lane == 0)
            escapes_before = before;
        const u32 block = first_block + lane;
        if (lane < BLOCKS_PER_THREAD_BLOCK && block < layout.n_blocks) {
            *(u32 *)(frame + HEADER_NBYTES + 4 * block) = before + up_to_mine - mine.x;
            *(u16 *)(frame + LINE * layout.meta + 2 * block) = (u16)mine.y;
        }
        if (first_block + BLOCKS_PER_THREAD_BLOCK >= layout.n_blocks)
            write_rest(frame, dynamic, layout, numel, before + own, table, size, lane);
    }
    __syncthreads();

#pragma unroll
    for (u32 turn = 0; turn < BLOCKS_PER_WARP; turn++) {
        u32 bits = escaped[turn];
        if (bits == 0)
            continue;
        const u32 block = first_block + turn * WARPS;
        const u16 *from = values + (u64)block * BLOCK + 8 * lane;
        u32 at = escapes_before + blocks[turn * WARPS + warp].x + up_to_here[turn] - __popc(bits);
        for (; bits != 0; at++, bits &= bits - 1) {
            const u32 bit = __ffs(bits) - 1;
            if (at < capacity(layout))
                dynamic[at] = (u8)(from[256 * (bit / 8) + bit % 8] >> 7);
        }
    }
    if (threadIdx.x == 0)
        finish(state);
}

// Writes the bodies of those frames whose header says that they are RAW. Launched behind every zipccl_exponent_encode.
//
// Grid: for each job the same number of thread blocks, any.
extern "C" __global__ void __launch_bounds__(THREADS)
zipccl_exponent_raw(const __grid_constant__ Batch batch, u32 thread_blocks_per_job) {
    const u32 index = blockIdx.x / thread_blocks_per_job, part = blockIdx.x % thread_blocks_per_job;
    const u16 *const values = global(batch.jobs[index].values);
    u8 *const frame = global(batch.jobs[index].frame), *const dynamic = global(batch.jobs[index].dynamic);
    const u32 numel = (u32)batch.jobs[index].numel;
    if (!(frame[6] & FLAG_RAW))
        return;
    const Layout layout = layout_of(numel);
    const bool fast = aligned(values, 8);
    const u64 end = LINE / 2 * (u64)(layout.end - HEADER_NBYTES / LINE);  // the last line is filled up with zeros
    for (u64 i = 4 * ((u64)part * THREADS + threadIdx.x); i < end; i += 4ull * THREADS * thread_blocks_per_job) {
        uint2 quad;
        if (fast && i + 4 <= numel) {
            quad = *(const uint2 *)(values + i);
        } else {
            quad.x = (i < numel ? values[i] : 0u) | (i + 1 < numel ? values[i + 1] : 0u) << 16;
            quad.y = (i + 2 < numel ? values[i + 2] : 0u) | (i + 3 < numel ? values[i + 3] : 0u) << 16;
        }
        *(uint2 *)raw_body(frame, dynamic, layout, 2 * i) = quad;
    }
}

// ---- decode ----

// exponents[code], one a byte; that of code 0, an escape, is only there to be overwritten.
static __device__ __forceinline__ uint2 exponents_of_codes(Coding coding, uint2 table) {
    if (coding.mode() == TABLE)  // in reverse
        return make_uint2(__byte_perm(table.y, 0, 0x0124), __byte_perm(table.x, 0, 0x0123));
    const u32 all = coding.base() * 0x01010101;
    const u32 lower = coding.mode() == SEVEN ? (all & 0xffffff00) + 0x04050600 : (all & 0xffff0000) + 0x04050000;
    return make_uint2(lower, all + 0x00010203);
}

// What is wrong with a header, as far as a device can tell: the checksum is the host's to check. By one warp.
static __device__ __forceinline__ u32 header_faults(const u8 *frame, const Layout &layout, u32 numel, u64 dynamic_room, u32 lane) {
    const u32 *header = (const u32 *)frame;
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
    if (raw ? dynamic_nbytes != raw_dynamic_nbytes(layout, numel) : dynamic_nbytes > capacity(layout))
        return BAD_SIZE;
    return align(dynamic_nbytes) > dynamic_room ? (u32)OVERFLOW : 0;
}

static __device__ __forceinline__ bool is_raw(const u8 *frame) { return __ldg((const u32 *)frame + 1) >> 16 & FLAG_RAW; }

// A lane's part of a block in a frame.
struct Part {
    uint2 sign_mantissas[4];
    u32 planes[3];
};

#ifdef ZIPCCL_CP_ASYNC
// A block on its way: all lanes' parts.
struct Ahead {
    uint2 sign_mantissas[4][32];
    u32 planes[3][32];
};

static __device__ __forceinline__ void bring_part(Ahead &to, const u8 *block, u32 lane) {
#pragma unroll
    for (u32 k = 0; k < 4; k++)
        __pipeline_memcpy_async(&to.sign_mantissas[k][lane], block + 256 * k + 8 * lane, 8);
#pragma unroll
    for (u32 j = 0; j < 3; j++)
        __pipeline_memcpy_async(&to.planes[j][lane], block + BLOCK + PLANE_NBYTES * j + 4 * lane, 4);
}

static __device__ __forceinline__ Part take_part(const Ahead &from, u32 lane) {
    Part part;
#pragma unroll
    for (u32 k = 0; k < 4; k++)
        part.sign_mantissas[k] = from.sign_mantissas[k][lane];
#pragma unroll
    for (u32 j = 0; j < 3; j++)
        part.planes[j] = from.planes[j][lane];
    return part;
}
#else
static __device__ __forceinline__ Part load_part(const u8 *block, u32 lane) {
    Part part;
#pragma unroll
    for (u32 k = 0; k < 4; k++)
        part.sign_mantissas[k] = __ldcs((const uint2 *)(block + 256 * k + 8 * lane));
#pragma unroll
    for (u32 j = 0; j < 3; j++)
        part.planes[j] = __ldcs((const u32 *)(block + BLOCK + PLANE_NBYTES * j + 4 * lane));
    return part;
}
#endif

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

// Restores the n values of a block of a frame that is not RAW and whose header is good. Returns what is wrong, the same in all
// lanes; words are then unspecified. `staged` is the warp's.
static __device__ __forceinline__ u32 decode_block(const u8 *frame, const u8 *dynamic, const Layout &layout, u32 block, u32 n,
                                                   const Part &part, u32 (&staged)[8][32], u32 lane, u32 (&words)[4][4]) {
    const u32 *header = (const u32 *)frame, *offsets = header + HEADER_NBYTES / 4;
    const u32 n_escapes = __ldg(header + 10);
    const u32 begin = __ldg(offsets + block), end = block + 1 < layout.n_blocks ? __ldg(offsets + block + 1) : n_escapes;
    const Coding coding = {__ldg((const u16 *)(frame + LINE * layout.meta) + block)};
    const uint2 table = make_uint2(__ldg(header + 16), __ldg(header + 17) & 0xffffff);

    u32 planes[4] = {part.planes[0], part.planes[1], part.planes[2], 0};
    u32 escaped = ~(planes[0] | planes[1] | planes[2]);
    const u32 own = __popc(escaped);
    const u32 up_to_here = inclusive_sum(own, lane);
    const u32 total = __shfl_sync(ALL, up_to_here, 31);
    u32 faults = 0;
    if (begin > end || end > n_escapes || (block == 0 && begin != 0))
        faults |= BAD_OFFSET;
    else if (end - begin != total)
        faults |= BAD_ESCAPE_COUNT;
    const u32 base = coding.base(), mode = coding.mode();
    if (mode > TABLE || (mode == TABLE && (table.x | table.y) == 0))
        faults |= BAD_MODE;
    else if (base < (mode == SIX_AND_ZERO ? 1 : 0) || base > (mode == SEVEN ? 249 : mode == SIX_AND_ZERO ? 250 : 0))
        faults |= BAD_BASE;
    if (n < BLOCK && !__all_sync(ALL, fillers_are_good(line_at(frame, line_of(layout, block)), planes, n, lane)))
        faults |= BAD_FILLER;
    if (faults != 0)
        return faults;

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
            staged[i][lane] = quads[i];
        for (u32 at = begin + up_to_here - own; escaped != 0; at++, escaped &= escaped - 1) {
            const u32 bit = __ffs(escaped) - 1, k = bit / 8, q = bit % 4, h = bit / 4 % 2;
            ((u8 *)&staged[4 * (k / 2) + q][lane])[2 * (k % 2) + h] = __ldg(dynamic + at);
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++)
            quads[i] = staged[i][lane];
    }
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
#pragma unroll
        for (u32 p = 0; p < 4; p++) {
            const u32 h = p / 2, q = 2 * (p % 2), byte = 2 * (k % 2) + h;
            const u32 pair = __byte_perm(quads[4 * (k / 2) + q], quads[4 * (k / 2) + q + 1], (4 + byte) << 12 | byte << 4);
            const u32 twice = __byte_perm(h ? part.sign_mantissas[k].y : part.sign_mantissas[k].x, 0, q * 0x1111 + 0x1100);
            words[k][p] = select_bits(EXPONENTS, pair >> 1, twice);
        }
    }
    return 0;
}

// Decodes each job's frame, RAW or not, into its values[0..numel). It trusts no byte of it: nothing is read outside of the frame or
// written outside of the output, whatever the frame holds, and what is wrong is or-ed into the job's word of `status` (enum Fault),
// which the caller clears. Values are then unspecified.
//
// Grid: the thread blocks of all jobs. Header and static part are there, of the dynamic part dynamic_room bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 4) zipccl_exponent_decode(const __grid_constant__ Batch batch, u32 *status) {
    __shared__ u32 staged[WARPS][8][32];
    __shared__ u32 wrong;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 index = job_of_thread_block(batch), first = batch.jobs[index].first;
    const u8 *const frame = global(batch.jobs[index].frame), *const dynamic = global(batch.jobs[index].dynamic);
    u16 *const values = global(batch.jobs[index].values);
    const u32 numel = (u32)batch.jobs[index].numel;
    const Layout layout = layout_of(numel);
    const u32 first_block = (blockIdx.x - first) * BLOCKS_PER_THREAD_BLOCK + warp;

    // The first block's bytes are asked for before it is known whether the header is good, as both are a long way off.
    const auto has_part = [&](u32 block) { return block < layout.n_blocks && !layout.always_raw; };
#ifdef ZIPCCL_CP_ASYNC
    __shared__ Ahead ahead[2][WARPS];
    const auto bring = [&](u32 turn) {
        const u32 block = first_block + turn * WARPS;
        if (turn < BLOCKS_PER_WARP && has_part(block))
            bring_part(ahead[turn % 2][warp], line_at(frame, line_of(layout, block)), lane);
        __pipeline_commit();
    };
    bring(0);
#else
    Part part = {};
    if (has_part(first_block))
        part = load_part(line_at(frame, line_of(layout, first_block)), lane);
#endif
    if (warp == 0) {
        const u32 faults = header_faults(frame, layout, numel, batch.jobs[index].dynamic_room, lane);
        if (lane == 0) {
            wrong = faults;
            if (faults != 0 && blockIdx.x == first)
                atomicOr(status + index, faults);
        }
    }
    __syncthreads();
    if (wrong != 0)
        return;

    const bool raw = is_raw(frame);
#pragma unroll 1
    for (u32 turn = 0; turn < BLOCKS_PER_WARP; turn++) {
        const u32 block = first_block + turn * WARPS;
        if (block >= layout.n_blocks)
            return;
        const u32 n = min(BLOCK, numel - block * BLOCK);
        u32 words[4][4];
        if (raw) {
            load_raw(frame, dynamic, layout, block, n, lane, words);
        } else {
#ifdef ZIPCCL_CP_ASYNC
            bring(turn + 1);
            __pipeline_wait_prior(1);
            const Part part = take_part(ahead[turn % 2][warp], lane);
#endif
            const u32 faults = decode_block(frame, dynamic, layout, block, n, part, staged[warp], lane, words);
            if (faults != 0) {
                if (lane == 0)
                    atomicOr(status + index, faults);
                continue;
            }
        }
        store(values + (u64)block * BLOCK, n, lane, words);
    }
}

// ---- decode and reduce ----

// Reads the first n of a block's fp32 values, [8*k + r]; the others are 0.
static __device__ __forceinline__ void load_floats(const float *block, u32 n, u32 lane, float (&numbers)[32]) {
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        const u32 i = 256 * k + 8 * lane;
        if (n == BLOCK && aligned(block, 16)) {
#pragma unroll
            for (u32 r = 0; r < 8; r += 4) {
                const float4 quad = *(const float4 *)(block + i + r);
                numbers[8 * k + r] = quad.x, numbers[8 * k + r + 1] = quad.y;
                numbers[8 * k + r + 2] = quad.z, numbers[8 * k + r + 3] = quad.w;
            }
            continue;
        }
#pragma unroll
        for (u32 r = 0; r < 8; r++)
            numbers[8 * k + r] = i + r < n ? block[i + r] : 0.0f;
    }
}

// Writes the first n of a block's fp32 values.
static __device__ __forceinline__ void store_floats(float *block, u32 n, u32 lane, const float (&numbers)[32]) {
#pragma unroll
    for (u32 k = 0; k < 4; k++) {
        const u32 i = 256 * k + 8 * lane;
        if (n == BLOCK && aligned(block, 16)) {
#pragma unroll
            for (u32 r = 0; r < 8; r += 4)
                *(float4 *)(block + i + r) = make_float4(numbers[8 * k + r], numbers[8 * k + r + 1], numbers[8 * k + r + 2],
                                                         numbers[8 * k + r + 3]);
            continue;
        }
#pragma unroll
        for (u32 r = 0; r < 8; r++)
            if (i + r < n)
                block[i + r] = numbers[8 * k + r];
    }
}

// The bfloat16 nearest to a number, the even one of two; 0x7fc0 for every NaN.
static __device__ __forceinline__ u32 bfloat16(float number) {
    const u32 bits = __float_as_uint(number);
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Adds up what the ranks contribute, in their order, in fp32, and divides: the jobs are the ranks, all of the same numel, each with
// a frame or, where `frame` is null, with values of its own. Nothing but an fp32 sum is rounded before the result is.
//
// Grid: max(1, ceil(numel / (BLOCK * WARPS))) thread blocks; Job::first is ignored.
// initial  null, or an fp32 sum of numel values to begin with
// out      numel values, fp32 where `wide` is not 0, else bfloat16; aligned to their size (16 is fast). It may be `initial`, or the
//          values of one rank
// divisor  1, or what the sum is divided by
// status   of each rank, as zipccl_exponent_decode has it of each job; out is then unspecified
extern "C" __global__ void __launch_bounds__(THREADS, 2)
zipccl_exponent_decode_reduce(const __grid_constant__ Batch batch, const float *initial, void *out, u32 wide, float divisor,
                              u32 *status) {
    __shared__ u32 staged[WARPS][8][32];
    __shared__ u32 wrong[MAX_JOBS];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 numel = (u32)batch.jobs[0].numel;
    const Layout layout = layout_of(numel);
    for (u32 rank = warp; rank < batch.n_jobs; rank += WARPS) {
        const u8 *const frame = global(batch.jobs[rank].frame);
        const u32 faults = frame == nullptr ? 0 : header_faults(frame, layout, numel, batch.jobs[rank].dynamic_room, lane);
        if (lane == 0) {
            wrong[rank] = faults;
            if (faults != 0 && blockIdx.x == 0)
                atomicOr(status + rank, faults);
        }
    }
    __syncthreads();
    const u32 block = blockIdx.x * WARPS + warp;
    if (block >= layout.n_blocks)
        return;
    const u32 n = min(BLOCK, numel - block * BLOCK);
    float totals[32];  // [8*k + r]
#pragma unroll
    for (u32 i = 0; i < 32; i++)
        totals[i] = -0.0f;  // to which any number can be added without a change, -0 too
    if (initial != nullptr)
        load_floats(initial + (u64)block * BLOCK, n, lane, totals);
#ifdef ZIPCCL_CP_ASYNC
    __shared__ Ahead ahead[2][WARPS];
    const auto bring = [&](u32 rank) {
        if (rank < batch.n_jobs && !layout.always_raw) {
            const u8 *const frame = global(batch.jobs[rank].frame);
            if (frame != nullptr)
                bring_part(ahead[rank % 2][warp], line_at(frame, line_of(layout, block)), lane);
        }
        __pipeline_commit();
    };
    bring(0);
#endif
#pragma unroll 1
    for (u32 rank = 0; rank < batch.n_jobs; rank++) {
#ifdef ZIPCCL_CP_ASYNC
        bring(rank + 1);
        __pipeline_wait_prior(1);
#endif
        if (wrong[rank] != 0)
            continue;
        const u8 *const frame = global(batch.jobs[rank].frame), *const dynamic = global(batch.jobs[rank].dynamic);
        u32 words[4][4];
        if (frame == nullptr) {
            load(global(batch.jobs[rank].values) + (u64)block * BLOCK, n, n == BLOCK, lane, words);
        } else if (is_raw(frame)) {
            load_raw(frame, dynamic, layout, block, n, lane, words);
        } else {
#ifdef ZIPCCL_CP_ASYNC
            const Part part = take_part(ahead[rank % 2][warp], lane);
#else
            const Part part = load_part(line_at(frame, line_of(layout, block)), lane);
#endif
            const u32 faults = decode_block(frame, dynamic, layout, block, n, part, staged[warp], lane, words);
            if (faults != 0) {
                if (lane == 0)
                    atomicOr(status + rank, faults);
                continue;
            }
        }
#pragma unroll
        for (u32 i = 0; i < 32; i++) {
            const u32 pair = words[i / 8][i / 2 % 4];
            totals[i] = __fadd_rn(totals[i], __uint_as_float(i % 2 ? pair & 0xffff0000 : pair << 16));
        }
    }

    if (divisor != 1) {
#pragma unroll
        for (u32 i = 0; i < 32; i++)
            totals[i] = __fdiv_rn(totals[i], divisor);
    }
    if (wide) {
        store_floats((float *)out + (u64)block * BLOCK, n, lane, totals);
        return;
    }
    u32 words[4][4];
#pragma unroll
    for (u32 i = 0; i < 16; i++)
        words[i / 4][i % 4] = bfloat16(totals[2 * i]) | bfloat16(totals[2 * i + 1]) << 16;
    store((u16 *)out + (u64)block * BLOCK, n, lane, words);
}
