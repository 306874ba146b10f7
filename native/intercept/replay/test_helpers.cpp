// Pieces of work that threads share, also where the system has no thread for them. Run by ctest.
#include "helpers.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include <dlfcn.h>

#include "check.h"

namespace {

std::atomic<int> threads_left{0}; // that the system has
std::atomic<int> exempted{0};

} // namespace

namespace flowgpu::gate {

void exempt() {
    exempted++;
}

} // namespace flowgpu::gate

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) {
    static const auto real =
        reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
    return threads_left-- > 0 ? real(thread, attributes, body, argument) : EAGAIN;
}

namespace {

using flowgpu::replay::Helpers;

constexpr size_t kPieces = 100;

void each_piece_is_done_once(int threads) {
    threads_left = threads;
    exempted = 0;
    std::atomic<int> done[kPieces] = {};
    {
        Helpers helpers(kPieces, [&](size_t piece) { done[piece]++; });
        helpers.wait_for(kPieces / 2);
        CHECK(done[kPieces / 2] == 1);
        helpers.wait_for_all();
        for (const auto& times : done)
            CHECK(times == 1);
    }
    CHECK(exempted == threads);
}

// All wait for each other, so each is with a thread of its own.
void pieces_are_done_side_by_side() {
    threads_left = 4;
    std::atomic<int> begun{0};
    Helpers helpers(4, [&](size_t) {
        begun++;
        while (begun < 4)
            std::this_thread::yield();
    });
    helpers.wait_for_all();
    CHECK(begun == 4);
}

void what_has_not_begun_is_left_undone() {
    threads_left = 1;
    std::atomic<int> begun{0}, ended{0};
    {
        Helpers helpers(kPieces, [&](size_t) {
            begun++;
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
            ended++;
        });
        while (!begun)
            std::this_thread::yield();
    }
    CHECK(ended >= 1 && begun == ended && ended < static_cast<int>(kPieces));
}

} // namespace

int main() {
    for (int threads : {4, 2, 0})
        each_piece_is_done_once(threads);
    pieces_are_done_side_by_side();
    what_has_not_begun_is_left_undone();
    return 0;
}
