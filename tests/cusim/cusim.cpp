// The scheduler: fibers by ucontext, warps, thread blocks. See cusim.h.
#include "cusim.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <stdexcept>
#include <ucontext.h>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
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

namespace cusim {

uint3 thread_index, block_index;
dim3 block_dim, grid_dim;

namespace {

constexpr size_t STACK_NBYTES = 128 * 1024;
constexpr unsigned IDLE_ROUNDS = 10'000; // in which all that run sleep: nobody will wake them
constexpr unsigned ALL = 0xffffffffu;

enum State { READY, WAITING, SLEEPING, DONE };

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    State state;
    const char *where;       // it waits
    void *sanitizer_stack;
};

struct Warp {
    unsigned long long values[2][32]; // of this meeting and the one before, which slower lanes may still read
    unsigned arrived, meetings;
    const char *collective;
};

struct Block {
    unsigned index;
    unsigned at_barrier, done;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<char> shared;
};

struct Scheduler {
    const std::function<void()> *kernel;
    ucontext_t context;
    Block *block;  // whose turn it is
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
    swapcontext(&fiber.context, &scheduler->context);
    ASAN_ONLY(__sanitizer_finish_switch_fiber(fiber.sanitizer_stack, nullptr, nullptr);)
}

void run_thread() {
    ASAN_ONLY(__sanitizer_finish_switch_fiber(nullptr, &scheduler->stack, &scheduler->stack_nbytes);)
    try {
        (*scheduler->kernel)();
    } catch (const std::exception &failure) {
        scheduler->error = "thread block " + std::to_string(scheduler->block->index) + ", thread " +
                           std::to_string(scheduler->thread) + ": " + failure.what();
    }
    scheduler->block->done++;
    leave(DONE);
}

void start(Block &block, unsigned index) {
    block.index = index;
    block.at_barrier = block.done = 0;
    block.fibers.resize(block_dim.x);
    block.warps.assign(block_dim.x / 32, Warp());
    block.shared.assign((size_t)(__stop_cusim_shared - __start_cusim_shared), (char)0xcd);
    for (Fiber &fiber : block.fibers) {
        if (!fiber.stack)
            fiber.stack.reset(new char[STACK_NBYTES]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK_NBYTES;
        fiber.context.uc_link = nullptr;
        fiber.state = READY;
        fiber.sanitizer_stack = nullptr;
        makecontext(&fiber.context, run_thread, 0);
    }
}

void run_fiber(Fiber &fiber, unsigned thread) {
    scheduler->fiber = &fiber;
    scheduler->thread = thread;
    thread_index = {thread, 0, 0};
    ASAN_ONLY(__sanitizer_start_switch_fiber(&scheduler->sanitizer_stack, fiber.stack.get(), STACK_NBYTES);)
    swapcontext(&scheduler->context, &fiber.context);
    ASAN_ONLY(__sanitizer_finish_switch_fiber(scheduler->sanitizer_stack, nullptr, nullptr);)
}

// A turn: runs the threads of a block until each has ended, waits or sleeps. Returns whether one did more than go to sleep again.
bool run(Block &block, bool backwards) {
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
            const unsigned thread = backwards ? block_dim.x - 1 - i : i;
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

} // namespace

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

void barrier() {
    Block &block = *scheduler->block;
    if (++block.at_barrier < block_dim.x) {
        leave(WAITING, "__syncthreads");
        return;
    }
    block.at_barrier = 0;
    for (Fiber &fiber : block.fibers)
        fiber.state = READY;
}

void sleep() { leave(SLEEPING, "__nanosleep"); }

std::string launch(const Launch &launch, const std::function<void()> &kernel) {
    if (launch.threads == 0 || launch.threads % 32 != 0)
        return "a thread block needs a multiple of 32 threads";
    Scheduler own = {};
    own.kernel = &kernel;
    scheduler = &own;
    grid_dim = {launch.grid, 1, 1};
    block_dim = {launch.threads, 1, 1};
    std::deque<std::unique_ptr<Block>> residents;
    std::vector<std::unique_ptr<Block>> free;
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
            moved |= run(*residents[launch.backwards ? residents.size() - 1 - i : i], launch.backwards);
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

} // namespace cusim
