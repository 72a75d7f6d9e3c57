// Runs CUDA kernels on a CPU: what a .cu file takes from the language, for a C++17 compiler. Include it before the .cu file.
//
// Each thread of a thread block is a fiber with a stack of its own. All run on one thread of the operating system and change over
// only where they wait (barriers, warp collectives) or sleep (__nanosleep, without which a loop that polls never ends), so atomics
// are plain arithmetic. Several thread blocks can be resident at a time, and start in the order of their indices, as on a device.
// Checked are: lanes of a warp that meet at different collectives, a barrier or collective that some threads never reach, and
// launches in which nothing moves any more.
//
// An asynchronous copy happens as early as it can where threads take their turns forwards, and as late as it can, at the wait for
// it, where they do so backwards.
//
// With -DCUSIM_RACE, and the file with the kernels (not cusim.cpp) compiled with `-fsanitize=thread --param
// tsan-distinguish-volatile=1`, a launch fails when two threads use the same byte, one of them writes, and nothing orders them:
// __syncthreads orders all threads of a thread block, __syncwarp those of a warp, the end of a launch everything. Atomics and
// volatile accesses are not looked at. Link without -fsanitize=thread: the sanitizer's calls end in cusim.cpp.
//
// Limits: one dimension; collectives need full warps and the full mask; no dynamic shared memory, no templates with shared
// variables, no streams. Memory is sequentially consistent: a missing fence is not noticed. The address sanitizer does not watch
// the bounds of shared variables.
#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __builtin_assume(condition) ((void)0)
// All shared variables lie in one section of the library, which is exchanged when another thread block runs.
#define __shared__ static __attribute__((section("cusim_shared")))

struct uint2 {
    unsigned x, y;
} __attribute__((aligned(8), may_alias));
struct uint3 {
    unsigned x, y, z;
};
struct uint4 {
    unsigned x, y, z, w;
} __attribute__((aligned(16), may_alias));
struct float4 {
    float x, y, z, w;
} __attribute__((aligned(16), may_alias));
using dim3 = uint3;

inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#pragma GCC visibility push(hidden) // several libraries with simulated kernels can be loaded at the same time
namespace cusim {

struct Launch {
    unsigned grid;     // thread blocks
    unsigned threads;  // in each, a multiple of 32
    unsigned resident; // thread blocks that run at the same time
    bool backwards;    // residents, and the threads in them, take their turns from the last to the first
};

// Runs a launch to its end. Returns what went wrong, or nothing. Launches of several threads of the operating system wait for each
// other.
std::string launch(const Launch &launch, const std::function<void()> &kernel);

// `resident` and `backwards` of launches that do not say: those of cusim_configure(), else of the environment (CUSIM_RESIDENT,
// CUSIM_BACKWARDS), else 3 and backwards.
Launch configured(unsigned grid, unsigned threads);

extern uint3 thread_index, block_index;
extern dim3 block_dim, grid_dim;

// All lanes of a warp meet in these; what they return is made of the values that lanes bring.
unsigned long long exchange(const char *collective, unsigned mask, unsigned long long value, unsigned source);
unsigned ballot(const char *collective, unsigned mask, bool predicate);
unsigned reduce(const char *collective, unsigned mask, unsigned value, unsigned (*combine)(unsigned, unsigned));
void sync_warp(unsigned mask);
void barrier();
void sleep();

void copy_async(void *to, const void *from, size_t nbytes);
void commit_copies();
void wait_for_copies(unsigned all_but);

template <class T> T shuffle(const char *collective, unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "up to 64 bits");
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = exchange(collective, mask, bits, source);
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned lane() { return thread_index.x % 32; }

// Kernel parameters as a driver takes them: one behind the other, each at a multiple of its alignment.
template <class T> T next_parameter(const char *packed, size_t &at) {
    at = (at + alignof(T) - 1) / alignof(T) * alignof(T);
    T value;
    memcpy(&value, packed + at, sizeof value);
    at += sizeof value;
    return value;
}

int report(const std::string &message, char *error, unsigned error_nbytes);

template <class... T>
int launch_packed(void (*kernel)(T...), const void *packed, unsigned grid, unsigned threads, char *error, unsigned error_nbytes) {
    size_t at = 0;
    const std::tuple<T...> parameters{next_parameter<T>((const char *)packed, at)...}; // in order, because of the braces
    return report(launch(configured(grid, threads), [&] { std::apply(kernel, parameters); }), error, error_nbytes);
}

} // namespace cusim
#pragma GCC visibility pop

// Makes a kernel callable from outside: <kernel>__cusim(packed parameters, grid, threads, message, room for it), which returns 0,
// or 1 and a message.
#define CUSIM_EXPORT(kernel)                                                                                                  \
    extern "C" __attribute__((visibility("default"))) int kernel##__cusim(const void *packed, unsigned grid, unsigned threads, \
                                                                          char *error, unsigned error_nbytes) {                \
        return cusim::launch_packed(kernel, packed, grid, threads, error, error_nbytes);                                      \
    }

// How later launches of exported kernels are scheduled.
extern "C" __attribute__((visibility("default"))) void cusim_configure(unsigned resident, int backwards);

#define threadIdx (cusim::thread_index)
#define blockIdx (cusim::block_index)
#define blockDim (cusim::block_dim)
#define gridDim (cusim::grid_dim)

// ---- synchronisation ----

inline void __syncthreads() { cusim::barrier(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { cusim::sync_warp(mask); }
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
inline unsigned __ballot_sync(unsigned mask, int predicate) { return cusim::ballot("__ballot_sync", mask, predicate != 0); }
inline int __any_sync(unsigned mask, int predicate) { return cusim::ballot("__any_sync", mask, predicate != 0) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return cusim::ballot("__all_sync", mask, predicate != 0) == 0xffffffffu; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned value) {
    return cusim::reduce("__reduce_add_sync", mask, value, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
    return cusim::reduce("__reduce_max_sync", mask, value, [](unsigned a, unsigned b) { return a > b ? a : b; });
}

// Not seen by the race detector, whose calls gcc leaves out of such a function.
#define CUSIM_UNSEEN __attribute__((no_sanitize("thread"), noinline))

template <class T> CUSIM_UNSEEN T atomicAdd(T *at, T value) {
    const T before = *at;
    *at = before + value;
    return before;
}
template <class T> CUSIM_UNSEEN T atomicOr(T *at, T value) {
    const T before = *at;
    *at = before | value;
    return before;
}

// ---- memory ----

inline bool __isGlobal(const void *) { return true; }
template <class T> T __ldg(const T *at) { return *at; }
template <class T> T __ldcs(const T *at) { return *at; }
template <class T> void __stcs(T *at, T value) { *at = value; }

inline void __pipeline_memcpy_async(void *to, const void *from, size_t nbytes) { cusim::copy_async(to, from, nbytes); }
inline void __pipeline_commit() { cusim::commit_copies(); }
inline void __pipeline_wait_prior(unsigned all_but) { cusim::wait_for_copies(all_but); }

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
inline float __uint_as_float(unsigned bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}
inline unsigned __float_as_uint(float number) {
    unsigned bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
