// Runs CUDA kernels on a CPU: what a .cu file takes from the language, for a C++17 compiler. Include it before the .cu file.
//
// Each thread of a thread block is a fiber with a stack of its own. All run on one thread of the operating system and change over
// only where they wait (barriers, warp collectives) or sleep (__nanosleep, without which a loop that polls never ends), so atomics
// are plain arithmetic. Several thread blocks can be resident at a time, and start in the order of their indices, as on a device.
// Checked are: lanes of a warp that meet at different collectives, a barrier or collective that some threads never reach, and
// launches in which nothing moves any more.
//
// Limits: one dimension; collectives need full warps and the full mask; no dynamic shared memory, no templates with shared
// variables, no streams. Memory is sequentially consistent: a missing fence is not noticed. The address sanitizer does not watch
// the bounds of shared variables.
#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <type_traits>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
// All shared variables lie in one section of the library, which is exchanged when another thread block runs.
#define __shared__ static __attribute__((section("cusim_shared")))

struct uint2 {
    unsigned x, y;
} __attribute__((aligned(8)));
struct uint3 {
    unsigned x, y, z;
};
struct uint4 {
    unsigned x, y, z, w;
} __attribute__((aligned(16)));
using dim3 = uint3;

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace cusim {

struct Launch {
    unsigned grid;     // thread blocks
    unsigned threads;  // in each, a multiple of 32
    unsigned resident; // thread blocks that run at the same time
    bool backwards;    // residents, and the threads in them, take their turns from the last to the first
};

// Runs a launch to its end. Returns what went wrong, or nothing.
std::string launch(const Launch &launch, const std::function<void()> &kernel);

extern uint3 thread_index, block_index;
extern dim3 block_dim, grid_dim;

// All lanes of a warp meet here, each with a value; returns those of lanes 0..31, valid until the next call.
const unsigned long long *meet(const char *collective, unsigned mask, unsigned long long value);
void barrier();
void sleep();

template <class T> T shuffle(const char *collective, unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "up to 64 bits");
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = meet(collective, mask, bits)[source];
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned lane() { return thread_index.x % 32; }

} // namespace cusim

#define threadIdx (cusim::thread_index)
#define blockIdx (cusim::block_index)
#define blockDim (cusim::block_dim)
#define gridDim (cusim::grid_dim)

// ---- synchronisation ----

inline void __syncthreads() { cusim::barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { cusim::meet("__syncwarp", mask, 0); }
inline void __threadfence() {}
inline void __nanosleep(unsigned) { cusim::sleep(); }

template <class T> T __shfl_sync(unsigned mask, T value, int source) {
    return cusim::shuffle("__shfl_sync", mask, value, (unsigned)source % 32);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned step) {
    return cusim::shuffle("__shfl_up_sync", mask, value, cusim::lane() >= step ? cusim::lane() - step : cusim::lane());
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned step) {
    return cusim::shuffle("__shfl_down_sync", mask, value, cusim::lane() + step < 32 ? cusim::lane() + step : cusim::lane());
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int bits) {
    return cusim::shuffle("__shfl_xor_sync", mask, value, cusim::lane() ^ (unsigned)bits);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    const unsigned long long *all = cusim::meet("__ballot_sync", mask, predicate != 0);
    unsigned bits = 0;
    for (unsigned i = 0; i < 32; i++)
        bits |= (unsigned)all[i] << i;
    return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == 0xffffffffu; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    const unsigned long long *all = cusim::meet("__reduce_add_sync", mask, value);
    unsigned sum = 0;
    for (unsigned i = 0; i < 32; i++)
        sum += (unsigned)all[i];
    return sum;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    const unsigned long long *all = cusim::meet("__reduce_max_sync", mask, value);
    unsigned largest = 0;
    for (unsigned i = 0; i < 32; i++)
        largest = all[i] > largest ? (unsigned)all[i] : largest;
    return largest;
}

template <class T> T atomicAdd(T *at, T value) {
    const T before = *at;
    *at = before + value;
    return before;
}
template <class T> T atomicOr(T *at, T value) {
    const T before = *at;
    *at = before | value;
    return before;
}

// ---- memory ----

template <class T> T __ldg(const T *at) { return *at; }
template <class T> T __ldcs(const T *at) { return *at; }
template <class T> void __stcs(T *at, T value) { *at = value; }

// ---- arithmetic ----

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs((int)bits); }
inline int __clz(unsigned bits) { return bits == 0 ? 32 : __builtin_clz(bits); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; i++) {
        const unsigned which = selector >> 4 * i & 15, byte = (unsigned)(bytes >> 8 * (which & 7)) & 0xff;
        result |= (which & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i; // bit 3 spreads the sign
    }
    return result;
}
inline unsigned __vminu2(unsigned a, unsigned b) {
    const unsigned lower = (a & 0xffff) < (b & 0xffff) ? a & 0xffff : b & 0xffff;
    return lower | ((a >> 16 < b >> 16 ? a : b) & 0xffff0000);
}
inline unsigned __viaddmin_u16x2(unsigned a, unsigned b, unsigned c) {
    return __vminu2(((a + b) & 0xffff) | (((a >> 16) + (b >> 16)) << 16), c);
}
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
