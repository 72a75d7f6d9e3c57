// Runs the kernels on the cases that it reads from standard input and compares every byte: alone and in batches, with the parts of
// a frame as neighbours and apart, under several schedules, then damaged frames, then sums over ranks. All buffers have exact
// sizes, so that a sanitizer sees what is read or written outside of them. Ends at the first difference, with 1 and a message.
//
// A case: i32 base, u32 offset of the values from an aligned address, u64 table, u64 numel, u64 bytes of the frame, values, frame.
#include "cusim.h"

#include "../../cuda/exponent.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

using Kernel = int(const void *, unsigned, unsigned, char *, unsigned);
extern "C" Kernel zipccl_exponent_encode__cusim, zipccl_exponent_raw__cusim, zipccl_exponent_decode__cusim,
    zipccl_exponent_decode_reduce__cusim;

namespace {

struct Head {
    int base;
    u32 offset;
    u64 table, numel, frame_nbytes;
};

struct Case {
    Head head;
    std::vector<u8> values, frame;
    int number;

    u64 numel() const { return head.numel; }
    u64 static_end() const { return (u64)LINE * layout_of((u32)numel()).dynamic; }
    u64 room() const { return (u64)LINE * layout_of((u32)numel()).end; }
    u64 dynamic_nbytes() const { return frame.size() - static_end(); }
    bool raw() const { return frame[6] & FLAG_RAW; }
};

struct Schedule {
    unsigned resident;
    bool backwards;
};

// Memory of an exact size, `offset` bytes behind an aligned address.
struct Memory {
    char *begin;
    u64 nbytes, offset;

    explicit Memory(u64 nbytes, u64 offset = 0) : nbytes(nbytes), offset(offset) {
        begin = (char *)malloc(nbytes + offset) + offset;
        memset(begin, 0xa5, nbytes);
    }
    explicit Memory(const std::vector<u8> &bytes, u64 offset = 0) : Memory(bytes.size(), offset) {
        std::copy(bytes.begin(), bytes.end(), begin);
    }
    Memory(Memory &&other) : begin(other.begin), nbytes(other.nbytes), offset(other.offset) { other.begin = nullptr; }
    ~Memory() {
        if (begin != nullptr)
            free(begin - offset);
    }
    template <class T> T *at(u64 byte = 0) const { return (T *)(begin + byte); }
};

[[noreturn]] void fail(const std::string &what) {
    fprintf(stderr, "%s\n", what.c_str());
    exit(1);
}

void expect(bool condition, const char *what, const Case &about) {
    if (!condition)
        fail("case " + std::to_string(about.number) + ": " + what);
}

bool same(const void *a, const void *b, u64 nbytes) { return nbytes == 0 || memcmp(a, b, nbytes) == 0; }

template <class T> void pack(std::vector<char> &packed, const T &parameter) {
    packed.resize((packed.size() + alignof(T) - 1) / alignof(T) * alignof(T));
    const char *const begin = (const char *)&parameter;
    packed.insert(packed.end(), begin, begin + sizeof parameter);
}

template <class... T> void run(Kernel *kernel, u32 grid, const Schedule &schedule, const T &...parameters) {
    std::vector<char> packed;
    (pack(packed, parameters), ...);
    char error[1000] = "";
    cusim_configure(schedule.resident, schedule.backwards);
    if (kernel(packed.data(), grid, THREADS, error, sizeof error) != 0)
        fail(error);
}

u32 thread_blocks_for(u64 numel) { return (u32)max((numel + BLOCK * WARPS - 1) / (BLOCK * WARPS), (u64)1); }

// The thread blocks of the jobs, which it numbers.
u32 number_thread_blocks(Batch &batch) {
    u32 first = 0;
    for (u32 i = 0; i < batch.n_jobs; i++) {
        batch.jobs[i].first = first;
        const u64 values = BLOCK * BLOCKS_PER_THREAD_BLOCK;
        first += (u32)max((batch.jobs[i].numel + values - 1) / values, (u64)1);
    }
    return first;
}

u64 state[1 + 1024]; // of all encodings, never cleared

void encode(const std::vector<const Case *> &cases, bool apart, const Schedule &schedule) {
    Batch batch = {};
    std::vector<Memory> values, statics, dynamics;
    for (const Case *each : cases) {
        values.emplace_back(each->values, each->head.offset);
        statics.emplace_back(apart ? each->static_end() : each->room());
        dynamics.emplace_back(apart ? each->room() - each->static_end() : 0);
        u8 *const dynamic = apart ? dynamics.back().at<u8>() : statics.back().at<u8>(each->static_end());
        batch.jobs[batch.n_jobs++] = {values.back().at<u16>(), statics.back().at<u8>(), dynamic, each->numel(), 0, 0, 0};
    }
    Memory sizes(8 * batch.n_jobs);
    const u32 grid = number_thread_blocks(batch);
    const Head &head = cases[0]->head;
    run(zipccl_exponent_encode__cusim, grid, schedule, batch, head.base, head.table, (u64 *)state, sizes.at<u64>());
    run(zipccl_exponent_raw__cusim, 2 * batch.n_jobs, schedule, batch, (u32)2);
    for (u32 i = 0; i < batch.n_jobs; i++) {
        const Case &each = *cases[i];
        const u64 end = each.static_end();
        expect(same(batch.jobs[i].frame, each.frame.data(), end), "encode: other bytes in the static part", each);
        expect(same(batch.jobs[i].dynamic, each.frame.data() + end, each.dynamic_nbytes()),
               "encode: other bytes in the dynamic part", each);
        expect(same(sizes.at<u64>(8 * i), each.frame.data() + 40, 8), "encode: another size", each);
    }
}

// Decodes frames of which only `room` bytes of the dynamic part are there. Where `wanted` is 0, the values are compared.
void decode(const std::vector<const Case *> &cases, const std::function<u64(const Case &)> &room,
            const std::function<u32(const Case &)> &wanted, const Schedule &schedule) {
    Batch batch = {};
    std::vector<Memory> values, statics, dynamics;
    for (const Case *each : cases) {
        const u8 *const middle = each->frame.data() + each->static_end();
        values.emplace_back(2 * each->numel(), each->head.offset);
        statics.emplace_back(std::vector<u8>(each->frame.data(), middle));
        dynamics.emplace_back(std::vector<u8>(middle, middle + room(*each)));
        batch.jobs[batch.n_jobs++] = {values.back().at<u16>(), statics.back().at<u8>(), dynamics.back().at<u8>(),
                                      each->numel(),           dynamics.back().nbytes,  0,
                                      0};
    }
    Memory status(4 * batch.n_jobs);
    memset(status.begin, 0, status.nbytes);
    const u32 grid = number_thread_blocks(batch);
    run(zipccl_exponent_decode__cusim, grid, schedule, batch, status.at<u32>());
    for (u32 i = 0; i < batch.n_jobs; i++) {
        const u32 found = *status.at<u32>(4 * i), expected = wanted(*cases[i]);
        expect(found == expected || (expected != 0 && expected != OVERFLOW && (found & expected) != 0),
               ("decode: status " + std::to_string(found) + ", not " + std::to_string(expected)).c_str(), *cases[i]);
        if (expected == 0)
            expect(same(values[i].begin, cases[i]->values.data(), values[i].nbytes), "decode: other values", *cases[i]);
    }
}

void decode_damaged(const Case &whole, const std::function<void(u8 *)> &damage, u32 fault, const Schedule &schedule) {
    Case damaged = whole;
    damage(damaged.frame.data());
    decode({&damaged}, [](const Case &each) { return each.dynamic_nbytes(); }, [=](const Case &) { return fault; }, schedule);
}

void decode_damage(const Case &each, const Schedule &schedule) {
    const Layout layout = layout_of((u32)each.numel());
    const u32 n_escapes = *(const u32 *)(each.frame.data() + 40), last = layout.n_blocks - 1;
    const auto offset = [=](u8 *frame, u32 block) { return (u32 *)(frame + HEADER_NBYTES) + block; };
    const auto meta = [=](u8 *frame, u32 block) { return frame + LINE * layout.meta + 2 * block; };
    for (const u32 at : {0u, 4u, 12u, 33u, 49u, 60u, 100u})
        decode_damaged(each, [=](u8 *frame) { frame[at] ^= 0x40; }, BAD_HEADER, schedule);
    decode_damaged(each, [](u8 *frame) { *(u64 *)(frame + 40) = 1ull << 40; }, BAD_SIZE, schedule);
    if (each.raw())
        return;
    decode_damaged(each, [=](u8 *frame) { *offset(frame, 0) += 1; }, BAD_OFFSET, schedule);
    decode_damaged(each, [=](u8 *frame) { *offset(frame, last) = n_escapes + 1; }, BAD_OFFSET, schedule);
    decode_damaged(each, [=](u8 *frame) { *offset(frame, last) = 0x80000000; }, BAD_OFFSET, schedule);
    decode_damaged(each, [=](u8 *frame) { meta(frame, last)[1] = 3; }, BAD_MODE, schedule);
    decode_damaged(each, [=](u8 *frame) { meta(frame, last)[0] = 255; }, BAD_BASE, schedule);
    if (last > 0 && n_escapes > 0)
        decode_damaged(each, [=](u8 *frame) { *offset(frame, last) ^= 1; }, BAD_ESCAPE_COUNT | BAD_OFFSET, schedule);
    if (each.numel() % BLOCK != 0) {
        u8 *const filler = (u8 *)nullptr + LINE * (u64)(layout.blocks + BLOCK_NBYTES / LINE * last) + BLOCK - 1;
        const u64 at = (u64)(filler - (u8 *)nullptr);
        decode_damaged(each, [=](u8 *frame) { frame[at] = 1; }, BAD_FILLER, schedule);
        decode_damaged(each, [=](u8 *frame) { frame[at + PLANE_NBYTES] ^= 0x80; }, BAD_FILLER, schedule);
    }
    if (n_escapes != 0) { // offsets point to escapes that the header does not admit and that are not there
        Case cut = each;
        memset(cut.frame.data() + 40, 0, 8);
        decode({&cut}, [](const Case &) { return 0; }, [](const Case &) { return BAD_OFFSET | BAD_ESCAPE_COUNT; }, schedule);
    }
    static u32 random = 1;
    for (const u64 end : {(u64)HEADER_NBYTES, min(each.static_end(), (u64)512), each.static_end()}) { // only no access outside
        random = random * 1664525 + 1013904223;
        Case damaged = each;
        damaged.frame[(random >> 8) % end] ^= (u8)(1 + (random >> 3) % 255);
        Batch batch = {};
        const Memory values(2 * each.numel()), frame(damaged.frame);
        u32 status = 0;
        batch.jobs[batch.n_jobs++] = {values.at<u16>(),       frame.at<u8>(),        frame.at<u8>(each.static_end()),
                                      each.numel(),           each.dynamic_nbytes(), 0,
                                      0};
        const u32 grid = number_thread_blocks(batch);
        run(zipccl_exponent_decode__cusim, grid, schedule, batch, &status);
        const Memory sum(2 * each.numel());
        run(zipccl_exponent_decode_reduce__cusim, thread_blocks_for(each.numel()), schedule, batch, (const float *)nullptr,
            sum.begin, (u32)0, 1.0f, &status);
    }
}

float from_bfloat16(const u8 *at) {
    u16 bits;
    memcpy(&bits, at, 2);
    return __uint_as_float((u32)bits << 16);
}

// Rank `own`, if there is one, contributes values, in whose place the result goes if it is bfloat16; the others frames.
void decode_reduce(const std::vector<const Case *> &ranks, u32 own, bool has_initial, bool wide, float divisor,
                   const Schedule &schedule) {
    const Case &any = *ranks[0];
    const u64 numel = any.numel();
    Batch batch = {};
    std::vector<Memory> frames;
    const Memory values(ranks[own % ranks.size()]->values, any.head.offset), separate(numel * (wide ? 4 : 2), 2 * any.head.offset);
    const Memory initial(4 * numel), status(4 * ranks.size());
    for (u64 i = 0; i < numel; i++)
        initial.at<float>()[i] = 0.5f * (float)i;
    memset(status.begin, 0, status.nbytes);
    for (const Case *each : ranks) {
        frames.emplace_back(each->frame);
        u8 *const frame = frames.back().at<u8>();
        batch.jobs[batch.n_jobs++] = {nullptr, frame, frame + each->static_end(), numel, each->dynamic_nbytes(), 0, 0};
    }
    const bool in_place = own < ranks.size() && !wide;
    if (own < ranks.size())
        batch.jobs[own] = {values.at<u16>(), nullptr, nullptr, numel, 0, 0, 0};
    void *const out = in_place ? values.begin : separate.begin;
    run(zipccl_exponent_decode_reduce__cusim, thread_blocks_for(numel), schedule, batch,
        has_initial ? initial.at<const float>() : (const float *)nullptr, out, (u32)wide, divisor, status.at<u32>());
    for (u32 rank = 0; rank < ranks.size(); rank++)
        expect(status.at<u32>()[rank] == 0, "decode_reduce: status", *ranks[rank]);
    for (u64 i = 0; i < numel; i++) {
        float sum = has_initial ? initial.at<float>()[i] : from_bfloat16(&ranks[0]->values[2 * i]);
        for (u64 rank = has_initial ? 0 : 1; rank < ranks.size(); rank++)
            sum += from_bfloat16(&ranks[rank]->values[2 * i]);
        if (divisor != 1)
            sum /= divisor;
        const u32 bits = __float_as_uint(sum);
        if (wide) {
            const float got = ((const float *)out)[i];
            expect(sum != sum ? got != got : __float_as_uint(got) == bits, "decode_reduce: another fp32 sum", any);
        } else {
            const u32 rounded = sum != sum ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            u16 got;
            memcpy(&got, (const char *)out + 2 * i, 2);
            expect(got == rounded, "decode_reduce: another bfloat16 sum", any);
        }
    }
}

std::vector<Case> read_cases() {
    std::vector<Case> cases;
    Case each = {};
    for (; fread(&each.head, sizeof each.head, 1, stdin) == 1; each.number++) {
        each.values.resize(2 * each.head.numel);
        each.frame.resize(each.head.frame_nbytes);
        expect(fread(each.values.data(), 2, each.head.numel, stdin) == each.head.numel, "cut off", each);
        expect(fread(each.frame.data(), 1, each.frame.size(), stdin) == each.frame.size(), "cut off", each);
        cases.push_back(each);
    }
    return cases;
}

} // namespace

int main() {
    const std::vector<Case> cases = read_cases();
    const Schedule schedules[] = {{1, false}, {3, true}, {64, true}};
    u32 turn = 0;
    for (const Case &each : cases) {
        if (each.numel() > 50 * BLOCK) { // many thread blocks: none knows its prefix while all look back
            encode({&each}, true, schedules[2]);
            continue;
        }
        const Schedule &schedule = schedules[turn++ % 3];
        encode({&each}, turn % 2, schedule);
        decode({&each}, [](const Case &that) { return that.dynamic_nbytes(); }, [](const Case &) { return 0; }, schedule);
        decode_damage(each, schedule);
    }
    for (u64 begin = 0; begin < cases.size();) { // those with the same base, table and offset, up to 64
        std::vector<const Case *> batch;
        const Head &head = cases[begin].head;
        for (; begin < cases.size() && batch.size() < MAX_JOBS; begin++) {
            const Head &next = cases[begin].head;
            if (next.base != head.base || next.table != head.table)
                break;
            if (next.numel <= 50 * BLOCK)
                batch.push_back(&cases[begin]);
        }
        if (batch.empty())
            continue;
        for (const Schedule &schedule : schedules) {
            std::reverse(batch.begin(), batch.end()); // so that no launch is like the one before
            encode(batch, schedule.backwards, schedule);
            decode(batch, [](const Case &each) { return each.dynamic_nbytes(); }, [](const Case &) { return 0; }, schedule);
        }
        const auto overflows = [](const Case &each) { return each.dynamic_nbytes() == 0 ? 0u : (u32)OVERFLOW; };
        decode(batch, [](const Case &) { return 0; }, overflows, schedules[1]);
        decode(batch, [](const Case &each) { return each.dynamic_nbytes() - min(each.dynamic_nbytes(), (u64)LINE); }, overflows,
               schedules[0]);
        for (u32 i = 0; i < batch.size(); i++) { // with those of the same numel, the same one once more where there are none
            std::vector<const Case *> ranks = {batch[i]};
            for (u32 k = i + 1; k < batch.size() && ranks.size() < 5; k++)
                if (batch[k]->numel() == batch[i]->numel())
                    ranks.push_back(batch[k]);
            if (ranks.size() == 1)
                ranks.push_back(batch[i]);
            const u32 own = i % (ranks.size() + 1);
            decode_reduce(ranks, own, false, false, i % 2 ? 1.0f : (float)ranks.size(), schedules[i % 2]);
            decode_reduce(ranks, own, i % 3 == 0, true, i % 2 ? 3.0f : 1.0f, schedules[(i + 1) % 2]);
        }
    }
    printf("%zu cases\n", cases.size());
    return 0;
}
