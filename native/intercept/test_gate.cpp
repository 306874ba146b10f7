// Which record of the page a thread has. Run by ctest.
#include "gate.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <set>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sys/mman.h>

#include "check.h"

namespace flowgpu {
extern "C" Page flowgpu_page;
Page flowgpu_page;
} // namespace flowgpu

namespace {

using flowgpu::flowgpu_page;
using flowgpu::gate::find_record;
using flowgpu::gate::ThreadRecord;

constexpr unsigned kRecords = 1 << flowgpu::kRecordBits;

bool in_page(const ThreadRecord* record) {
    return std::begin(flowgpu_page.records) <= record && record < std::end(flowgpu_page.records);
}

struct Shared {
    pthread_barrier_t all;
    std::vector<ThreadRecord*> found;
    std::atomic<unsigned> begun{0};
};

void* body(void* given) {
    auto* shared = static_cast<Shared*>(given);
    ThreadRecord* record = shared->found[shared->begun++] = find_record();
    pthread_barrier_wait(&shared->all);
    for (int again = 0; again < 1000; again++) {
        const uint32_t before = flowgpu::gate::enter();
        CHECK(find_record() == record && record->inside.load() == 1 && before == 0);
        flowgpu::gate::leave(before);
    }
    pthread_barrier_wait(&shared->all);
    return nullptr;
}

// The records of so many threads that live at once, and of this one. Each has a stack elsewhere.
std::set<const ThreadRecord*> records_with(unsigned count) {
    static const size_t page = 4096, bytes = 64 * page, room = 1 << 30;
    static auto* const stacks = static_cast<char*>(mmap(
        nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    static size_t used = 0;
    CHECK(stacks != MAP_FAILED);
    Shared shared;
    CHECK(pthread_barrier_init(&shared.all, nullptr, count) == 0);
    shared.found.resize(count);
    std::vector<pthread_t> threads(count);
    for (pthread_t& thread : threads) {
        pthread_attr_t attributes;
        CHECK(used + bytes <= room && pthread_attr_init(&attributes) == 0);
        CHECK(pthread_attr_setstack(&attributes, stacks + used, bytes) == 0);
        CHECK(pthread_create(&thread, &attributes, body, &shared) == 0);
        pthread_attr_destroy(&attributes);
        used += bytes + used / bytes % 7 * page;
    }
    for (pthread_t thread : threads)
        CHECK(pthread_join(thread, nullptr) == 0);
    pthread_barrier_destroy(&shared.all);
    CHECK(flowgpu::gate::thread_count() == 1);
    std::set<const ThreadRecord*> all(shared.found.begin(), shared.found.end());
    CHECK(all.insert(find_record()).second && all.size() == count + 1);
    return all;
}

// Wherever their stacks lie: a few threads are those of nearly every program.
void four_threads_have_records_in_the_page() {
    for (unsigned round = 0; round < 200; round++)
        for (const ThreadRecord* record : records_with(3))
            CHECK(in_page(record));
}

void many_threads_have_one_each() {
    for (unsigned round = 0; round < 20; round++) {
        const auto all = records_with(4 * kRecords);
        // None is left unused while threads have others.
        CHECK(std::count_if(all.begin(), all.end(), in_page) == kRecords);
    }
}

// As one that was ended in the driver's hands is no more, and its pointer another thread's.
void an_exempt_thread_has_none_of_an_earlier_one() {
    std::thread([] {
        ThreadRecord* const record = find_record();
        CHECK(in_page(record));
        flowgpu::gate::exempt();
        CHECK(!in_page(find_record()) && find_record()->inside.load() > 0);
        CHECK(record->thread.load() == 0);
        record->used.store(0);
    }).join();
}

} // namespace

int main() {
    CHECK(in_page(find_record()));
    four_threads_have_records_in_the_page();
    many_threads_have_one_each();
    an_exempt_thread_has_none_of_an_earlier_one();
    return 0;
}
