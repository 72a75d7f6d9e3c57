// The scheduler: fibers, warps, thread blocks, and the race detector. See cusim.h.
#include "cusim.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <dlfcn.h>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <unordered_map>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define ASAN_ONLY(...) __VA_ARGS__
#else
#define ASAN_ONLY(...)
#endif

// Begin and end of the section of shared variables: names that the linker gives.
extern "C" {
extern char __start_cusim_shared[] __attribute__((visibility("hidden")));
extern char __stop_cusim_shared[] __attribute__((visibility("hidden")));
}

#if defined(__x86_64__)
// Pushes what a function must keep, exchanges the stack pointer, and pops it there. swapcontext() would ask the kernel of the
// operating system for the signal mask, each time.
extern "C" __attribute__((visibility("hidden"))) void cusim_switch(void **from, void *to);
asm(R"(
.text
.hidden cusim_switch
.type cusim_switch, @function
cusim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size cusim_switch, .-cusim_switch
)");
#endif

namespace cusim {

uint3 thread_index, block_index;
dim3 block_dim, grid_dim;

namespace {

constexpr size_t STACK_NBYTES = 128 * 1024;
constexpr unsigned IDLE_ROUNDS = 10'000; // in which all that run sleep: nobody will wake them
constexpr unsigned ALL = 0xffffffffu;

#if defined(__x86_64__)
struct Context {
    void *stack_pointer;

    void begin(char *stack, void (*function)()) {
        void **top = (void **)((uintptr_t)(stack + STACK_NBYTES) / 16 * 16);
        *--top = nullptr; // where a return address would stand: `function` does not return
        *--top = (void *)function;
        stack_pointer = top - 6; // six registers are popped first, whatever they hold
    }
    static void change(Context &from, Context &to) { cusim_switch(&from.stack_pointer, to.stack_pointer); }
};
#else
struct Context {
    ucontext_t context;

    void begin(char *stack, void (*function)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = STACK_NBYTES;
        context.uc_link = nullptr;
        makecontext(&context, function, 0);
    }
    static void change(Context &from, Context &to) { swapcontext(&from.context, &to.context); }
};
#endif

enum State { READY, WAITING, SLEEPING, DONE };

struct Copy {
    void *to;
    const void *from;
    size_t nbytes;
};

struct Fiber {
    Context context;
    std::unique_ptr<char[]> stack;
    State state;
    const char *where; // it waits
    void *sanitizer_stack;
    std::deque<std::vector<Copy>> copies; // groups, the last of which is not committed yet
};

struct Warp {
    unsigned long long values[2][32]; // of this meeting and the one before, which slower lanes may still read
    unsigned arrived, meetings;
    const char *collective;
    uint32_t syncs; // __syncwarp: how many
};

// Who used a byte, and when. Nothing where `launch` is 0.
struct Use {
    uint32_t launch, block, thread, barriers, warp_syncs;
};

struct Uses {
    Use write, reads[2];
};

struct Block {
    unsigned index;
    unsigned at_barrier, done;
    uint32_t barriers; // how many are behind it
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<char> shared;
    std::vector<Uses> uses; // of shared memory
};

struct Scheduler {
    const std::function<void()> *kernel;
    bool backwards;
    Context context;
    Block *block; // whose turn it is
    Fiber *fiber;
    unsigned thread;
    std::string error;
    void *sanitizer_stack;
    const void *stack; // of the scheduler
    size_t stack_nbytes;
};

Scheduler *scheduler;

// From a fiber to the scheduler, until its next turn.
void leave(State state, const char *where = "") {
    Fiber &fiber = *scheduler->fiber;
    fiber.state = state;
    fiber.where = where;
    ASAN_ONLY(__sanitizer_start_switch_fiber(state == DONE ? nullptr : &fiber.sanitizer_stack, scheduler->stack,
                                             scheduler->stack_nbytes);)
    Context::change(fiber.context, scheduler->context);
    ASAN_ONLY(__sanitizer_finish_switch_fiber(fiber.sanitizer_stack, nullptr, nullptr);)
}

std::string here() {
    return "thread block " + std::to_string(scheduler->block->index) + ", thread " + std::to_string(scheduler->thread);
}

void run_thread() {
    ASAN_ONLY(__sanitizer_finish_switch_fiber(nullptr, &scheduler->stack, &scheduler->stack_nbytes);)
    try {
        (*scheduler->kernel)();
    } catch (const std::exception &failure) {
        scheduler->error = here() + ": " + failure.what();
    }
    scheduler->block->done++;
    leave(DONE);
}

size_t shared_nbytes() { return (size_t)(__stop_cusim_shared - __start_cusim_shared); }

void start(Block &block, unsigned index) {
    block.index = index;
    block.at_barrier = block.done = block.barriers = 0;
    block.fibers.resize(block_dim.x);
    block.warps.assign(block_dim.x / 32, Warp());
    block.shared.assign(shared_nbytes(), (char)0xcd);
#ifdef CUSIM_RACE
    block.uses.assign(shared_nbytes(), Uses());
#endif
    for (Fiber &fiber : block.fibers) {
        if (!fiber.stack)
            fiber.stack.reset(new char[STACK_NBYTES]);
        ASAN_ONLY(__asan_unpoison_memory_region(fiber.stack.get(), STACK_NBYTES);) // of frames that were never left
        fiber.context.begin(fiber.stack.get(), run_thread);
        fiber.state = READY;
        fiber.sanitizer_stack = nullptr;
        fiber.copies.assign(1, {});
    }
}

void run_fiber(Fiber &fiber, unsigned thread) {
    scheduler->fiber = &fiber;
    scheduler->thread = thread;
    thread_index = {thread, 0, 0};
    ASAN_ONLY(__sanitizer_start_switch_fiber(&scheduler->sanitizer_stack, fiber.stack.get(), STACK_NBYTES);)
    Context::change(scheduler->context, fiber.context);
    ASAN_ONLY(__sanitizer_finish_switch_fiber(scheduler->sanitizer_stack, nullptr, nullptr);)
}

// A turn: runs the threads of a block until each has ended, waits or sleeps. Returns whether one did more than go to sleep again.
bool run(Block &block) {
    scheduler->block = &block;
    block_index = {block.index, 0, 0};
    std::copy(block.shared.begin(), block.shared.end(), __start_cusim_shared);
    for (Fiber &fiber : block.fibers)
        if (fiber.state == SLEEPING)
            fiber.state = READY;
    bool moved = false, again = true;
    while (again && scheduler->error.empty()) {
        again = false;
        for (unsigned i = 0; i < block_dim.x && scheduler->error.empty(); i++) {
            const unsigned thread = scheduler->backwards ? block_dim.x - 1 - i : i;
            Fiber &fiber = block.fibers[thread];
            if (fiber.state != READY)
                continue;
            run_fiber(fiber, thread);
            again = true;
            moved |= fiber.state != SLEEPING;
        }
    }
    std::copy(__start_cusim_shared, __stop_cusim_shared, block.shared.begin());
    return moved;
}

// Nothing moves: who waits where?
std::string stuck(const std::deque<std::unique_ptr<Block>> &blocks) {
    std::string text = "nothing moves any more:";
    for (const auto &block : blocks)
        for (unsigned i = 0; i < block->fibers.size(); i++)
            if (block->fibers[i].state != DONE && text.size() < 300)
                text += " thread block " + std::to_string(block->index) + ", thread " + std::to_string(i) + " at " +
                        block->fibers[i].where + ";";
    return text;
}

// ---- races ----

#ifdef CUSIM_RACE
constexpr uintptr_t PAGE_NBYTES = 4096;
uint32_t launches;
std::unordered_map<uintptr_t, std::unique_ptr<Uses[]>> pages; // of global memory

bool in_shared(uintptr_t at) { return at >= (uintptr_t)__start_cusim_shared && at < (uintptr_t)__stop_cusim_shared; }

Uses &uses_of(uintptr_t at) {
    if (in_shared(at))
        return scheduler->block->uses[at - (uintptr_t)__start_cusim_shared];
    auto &page = pages[at / PAGE_NBYTES];
    if (!page)
        page.reset(new Uses[PAGE_NBYTES]());
    return page[at % PAGE_NBYTES];
}

bool ordered(const Use &before, const Use &now) {
    if (before.launch != now.launch || (before.block == now.block && before.thread == now.thread))
        return true;
    if (before.block != now.block)
        return false;
    return before.barriers != now.barriers || (before.thread / 32 == now.thread / 32 && before.warp_syncs != now.warp_syncs);
}

// The fiber that did this ends here and is never entered again.
void fail(const std::string &what, const void *caller) {
    Dl_info info = {};
    dladdr(caller, &info);
    char place[32];
    snprintf(place, sizeof place, "+0x%zx", (size_t)((const char *)caller - (const char *)info.dli_fbase));
    scheduler->error = here() + " " + what + ", at " + (info.dli_fname == nullptr ? "?" : info.dli_fname) + place;
    scheduler->block->done++;
    leave(DONE);
}

void use(const void *pointer, size_t nbytes, bool writes, bool is_aligned, const void *caller) {
    if (scheduler == nullptr || scheduler->fiber == nullptr)
        return;
    const uintptr_t begin = (uintptr_t)pointer, stack = (uintptr_t)scheduler->fiber->stack.get();
    if (begin - stack < STACK_NBYTES)
        return;
    const char *where = in_shared(begin) ? "shared memory" : "global memory";
    if (is_aligned && begin % nbytes != 0)
        return fail("uses misaligned " + std::string(where), caller);
    const Block &block = *scheduler->block;
    const Use now = {launches, block.index, scheduler->thread, block.barriers, block.warps[scheduler->thread / 32].syncs};
    const auto check = [&](const Use &before, const char *did) {
        if (!ordered(before, now))
            fail(std::string(writes ? "writes " : "reads ") + where + " that thread block " + std::to_string(before.block) +
                     ", thread " + std::to_string(before.thread) + " " + did + ", and nothing orders them",
                 caller);
    };
    for (uintptr_t at = begin; at < begin + nbytes; at++) {
        Uses &uses = uses_of(at);
        check(uses.write, "has written");
        if (writes) {
            for (const Use &read : uses.reads)
                check(read, "has read");
            uses.write = now;
        } else if (ordered(uses.reads[0], now)) {
            uses.reads[0] = now; // what was ordered before this needs no remembering
        } else if (ordered(uses.reads[1], now) || uses.reads[1].thread / 32 == uses.reads[0].thread / 32) {
            uses.reads[1] = now;
        }
    }
}
#endif

void copy(const Copy &copy) {
#ifdef CUSIM_RACE
    use(copy.from, copy.nbytes, false, true, __builtin_return_address(0));
    use(copy.to, copy.nbytes, true, true, __builtin_return_address(0));
#endif
    memcpy(copy.to, copy.from, copy.nbytes);
}

unsigned configured_resident = 0; // not yet
bool configured_backwards;
std::mutex mutex; // one launch at a time: there is one section of shared variables

// All lanes of a warp meet here, each with a value; returns those of lanes 0..31, valid until the next call.
const unsigned long long *meet(const char *collective, unsigned mask, unsigned long long value) {
    Block &block = *scheduler->block;
    Warp &warp = block.warps[scheduler->thread / 32];
    if (mask != ALL)
        throw std::runtime_error(std::string(collective) + ": only the full mask is supported");
    if (warp.arrived == 0)
        warp.collective = collective;
    else if (strcmp(warp.collective, collective) != 0)
        throw std::runtime_error(std::string("lanes of a warp meet at ") + warp.collective + " and " + collective);
    unsigned long long *values = warp.values[warp.meetings % 2];
    values[lane()] = value;
    warp.arrived |= 1u << lane();
    if (warp.arrived != ALL) {
        leave(WAITING, collective);
        return values;
    }
    warp.arrived = 0;
    warp.meetings++;
    const unsigned first = scheduler->thread / 32 * 32;
    for (unsigned i = first; i < first + 32; i++)
        block.fibers[i].state = READY;
    return values;
}

} // namespace

unsigned long long exchange(const char *collective, unsigned mask, unsigned long long value, unsigned source) {
    return meet(collective, mask, value)[source];
}

unsigned ballot(const char *collective, unsigned mask, bool predicate) {
    const unsigned long long *all = meet(collective, mask, predicate);
    unsigned bits = 0;
    for (unsigned i = 0; i < 32; i++)
        bits |= (unsigned)all[i] << i;
    return bits;
}

unsigned reduce(const char *collective, unsigned mask, unsigned value, unsigned (*combine)(unsigned, unsigned)) {
    const unsigned long long *all = meet(collective, mask, value);
    unsigned result = (unsigned)all[0];
    for (unsigned i = 1; i < 32; i++)
        result = combine(result, (unsigned)all[i]);
    return result;
}

void sync_warp(unsigned mask) {
    Warp &warp = scheduler->block->warps[scheduler->thread / 32];
    if (warp.arrived == (ALL & ~(1u << lane()))) // the last; nobody has come out yet
        warp.syncs++;
    meet("__syncwarp", mask, 0);
}

void barrier() {
    Block &block = *scheduler->block;
    if (++block.at_barrier < block_dim.x) {
        leave(WAITING, "__syncthreads");
        return;
    }
    block.at_barrier = 0;
    block.barriers++;
    for (Fiber &fiber : block.fibers)
        fiber.state = READY;
}

void sleep() { leave(SLEEPING, "__nanosleep"); }

void copy_async(void *to, const void *from, size_t nbytes) {
    if ((nbytes != 4 && nbytes != 8 && nbytes != 16) || (uintptr_t)to % nbytes != 0 || (uintptr_t)from % nbytes != 0)
        throw std::runtime_error("an asynchronous copy is of 4, 8 or 16 bytes, aligned to that");
    if ((char *)to < __start_cusim_shared || (char *)to >= __stop_cusim_shared)
        throw std::runtime_error("an asynchronous copy goes to shared memory");
    if (scheduler->backwards)
        scheduler->fiber->copies.back().push_back({to, from, nbytes});
    else
        copy({to, from, nbytes});
}

void commit_copies() { scheduler->fiber->copies.emplace_back(); }

void wait_for_copies(unsigned all_but) {
    auto &groups = scheduler->fiber->copies;
    for (; groups.size() > all_but + 1; groups.pop_front())
        for (const Copy &each : groups.front())
            copy(each);
}

std::string launch(const Launch &launch, const std::function<void()> &kernel) {
    if (launch.threads == 0 || launch.threads % 32 != 0)
        return "a thread block needs a multiple of 32 threads";
    const std::lock_guard<std::mutex> lock(mutex);
    Scheduler own = {};
    own.kernel = &kernel;
    own.backwards = launch.backwards;
    scheduler = &own;
    grid_dim = {launch.grid, 1, 1};
    block_dim = {launch.threads, 1, 1};
#ifdef CUSIM_RACE
    launches++;
    pages.clear();
#endif
    std::deque<std::unique_ptr<Block>> residents;
    static std::vector<std::unique_ptr<Block>> free; // with their stacks
    unsigned started = 0, idle = 0;
    while (own.error.empty()) {
        while (started < launch.grid && residents.size() < std::max(1u, launch.resident)) {
            if (free.empty())
                free.push_back(std::make_unique<Block>());
            residents.push_back(std::move(free.back()));
            free.pop_back();
            start(*residents.back(), started++);
        }
        if (residents.empty())
            break;
        bool moved = false;
        for (size_t i = 0; i < residents.size() && own.error.empty(); i++)
            moved |= run(*residents[launch.backwards ? residents.size() - 1 - i : i]);
        bool asleep = false;
        for (auto &block : residents)
            for (Fiber &fiber : block->fibers)
                asleep |= fiber.state == SLEEPING;
        idle = moved ? 0 : idle + 1;
        if (own.error.empty() && !moved && (!asleep || idle > IDLE_ROUNDS))
            own.error = stuck(residents);
        for (size_t i = residents.size(); i-- > 0;)
            if (residents[i]->done == launch.threads) {
                free.push_back(std::move(residents[i]));
                residents.erase(residents.begin() + (long)i);
            }
    }
    scheduler = nullptr;
    return own.error;
}

Launch configured(unsigned grid, unsigned threads) {
    if (configured_resident == 0) {
        const char *resident = getenv("CUSIM_RESIDENT"), *backwards = getenv("CUSIM_BACKWARDS");
        cusim_configure(resident == nullptr ? 3 : (unsigned)atoi(resident), backwards == nullptr || atoi(backwards) != 0);
    }
    return {grid, threads, configured_resident, configured_backwards};
}

int report(const std::string &message, char *error, unsigned error_nbytes) {
    if (error_nbytes != 0)
        snprintf(error, error_nbytes, "%s", message.c_str());
    return message.empty() ? 0 : 1;
}

} // namespace cusim

extern "C" void cusim_configure(unsigned resident, int backwards) {
    cusim::configured_resident = std::max(1u, resident);
    cusim::configured_backwards = backwards != 0;
}

#ifdef CUSIM_RACE
// What gcc calls before each access where a file is compiled with -fsanitize=thread.
#define HERE __builtin_return_address(0)
#define ACCESSES(n)                                                                                                          \
    extern "C" void __tsan_read##n(void *at) { cusim::use(at, n, false, true, HERE); }                                       \
    extern "C" void __tsan_write##n(void *at) { cusim::use(at, n, true, true, HERE); }                                       \
    extern "C" void __tsan_unaligned_read##n(void *at) { cusim::use(at, n, false, false, HERE); }                            \
    extern "C" void __tsan_unaligned_write##n(void *at) { cusim::use(at, n, true, false, HERE); }                            \
    extern "C" void __tsan_volatile_read##n(void *) {}                                                                       \
    extern "C" void __tsan_volatile_write##n(void *) {}
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
extern "C" void __tsan_read_range(void *at, size_t nbytes) { cusim::use(at, nbytes, false, false, HERE); }
extern "C" void __tsan_write_range(void *at, size_t nbytes) { cusim::use(at, nbytes, true, false, HERE); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}
#endif
