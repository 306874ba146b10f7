// Unit and property tests of the range allocator and the memory tables. Run by ctest; prints the
// seed of a failing sequence.
#include "fake_driver.h"

#include <random>

using namespace fake_driver;

namespace {

void test_ranges_against_a_bitmap(unsigned seed) {
    current_seed = seed;
    std::mt19937 random(seed);
    constexpr uint64_t base = 1000, units = 200;
    flowgpu::Ranges ranges(base, units);
    std::vector<bool> used(units);
    std::map<uint64_t, uint64_t> taken;
    for (int step = 0; step < 2000; step++) {
        uint64_t n = 1 + random() % 20;
        if (random() % 2) {
            uint64_t expected = 0;
            for (uint64_t at = 0; at + n <= units && !expected; at++) {
                bool free = true;
                for (uint64_t i = at; i < at + n; i++)
                    free = free && !used[i];
                if (free)
                    expected = base + at;
            }
            uint64_t got = ranges.claim(n);
            CHECK(got == expected);
            if (got) {
                taken[got] = n;
                for (uint64_t i = 0; i < n; i++)
                    used[got - base + i] = true;
            }
        } else if (!taken.empty()) {
            auto it = std::next(taken.begin(), static_cast<long>(random() % taken.size()));
            CHECK(ranges.release(it->first, it->second));
            CHECK(!ranges.release(it->first, it->second)); // twice
            for (uint64_t i = 0; i < it->second; i++)
                used[it->first - base + i] = false;
            taken.erase(it);
        }
        uint64_t free = 0;
        for (bool u : used)
            free += !u;
        CHECK(ranges.free_bytes() == free);
    }
    CHECK(!ranges.release(base - 1, 1) && !ranges.release(base + units, 1) &&
          !ranges.release(base, 0));
    for (auto [address, bytes] : taken)
        CHECK(ranges.release(address, bytes));
    CHECK(ranges.all_free());
}

uint64_t some_size(std::mt19937& random) {
    switch (random() % 4) {
    case 0:
        return 1 + random() % 1024;
    case 1:
        return 1 + random() % kGranularity;
    case 2:
        return kGranularity * (1 + random() % 4);
    default:
        return kGranularity + 1 + random() % (8 * kGranularity);
    }
}

constexpr flowgpu::Kinds kAllocation = flowgpu::only(flowgpu::MemoryKind::allocation);

struct Model {
    uint64_t bytes;
    uintptr_t context;
};

void check_against(const flowgpu::Memory& memory, const std::map<uint64_t, Model>& model) {
    uint64_t bytes = 0, previous_end = 0;
    for (auto& [address, entry] : model) {
        CHECK(address >= previous_end && address % flowgpu::kSmallGranule == 0);
        previous_end = address + entry.bytes;
        bytes += entry.bytes;
        flowgpu::Region found;
        CHECK(memory.map().find(address, kAllocation, &found) && found.address == address &&
              found.bytes == entry.bytes);
        CHECK(memory.map().find(address + entry.bytes - 1, kAllocation, &found) &&
              found.address == address);
        bool past = memory.map().find(address + entry.bytes, kAllocation, &found);
        CHECK(!past || found.address == address + entry.bytes);
        auto mapping = fake.mappings.upper_bound(address);
        CHECK(mapping != fake.mappings.begin());
        --mapping;
        CHECK(address + entry.bytes <= mapping->first + mapping->second.bytes);
        CHECK(mapping->second.access.count(found.device));
    }
    CHECK(memory.totals().allocations == model.size());
    CHECK(memory.totals().allocation_bytes == bytes);
    uint64_t mapped = 0;
    for (auto& [address, mapping] : fake.mappings)
        mapped += mapping.bytes;
    CHECK(memory.totals().block_bytes == mapped && memory.totals().blocks == fake.mappings.size());
}

// Hands everything over to a keeper of descriptors and takes it back; addresses and contents'
// identity must stay.
void hand_over_and_back(flowgpu::Memory& memory, std::mt19937& random) {
    struct Row {
        flowgpu::Block const* block;
        uint64_t id, address, bytes;
        int fd;
    };
    std::map<uint64_t, Row> kept;
    auto sink = [&kept](const flowgpu::Block& block, int fd) {
        CHECK(!kept.count(block.id));
        kept[block.id] = Row{&block, block.id, block.address, block.bytes, fd};
        return true;
    };
    memory.forget_sent();
    CHECK(memory.send_new(sink) == CUDA_SUCCESS);
    size_t first = kept.size();
    CHECK(memory.send_new(sink) == CUDA_SUCCESS && kept.size() == first); // only what is new
    std::vector<uint64_t> live = memory.live_ids();
    CHECK(live.size() == kept.size());
    std::map<uint64_t, ino_t> before;
    for (auto& [address, mapping] : fake.mappings)
        before[address] = mapping.memory;
    CHECK(memory.release_all() == CUDA_SUCCESS);
    CHECK(fake.mappings.empty() && fake.handles.empty());
    CHECK(kept.empty() || !memory.all_present());
    for (auto& [id, row] : kept) {
        if (random() % 8 == 0) {
            CHECK(memory.map_back(id, row.address + kGranularity, row.bytes, dup(row.fd)) ==
                  CUDA_ERROR_INVALID_VALUE);
            CHECK(memory.map_back(id + 1000000, row.address, row.bytes, dup(row.fd)) ==
                  CUDA_ERROR_INVALID_VALUE);
        }
        CHECK(memory.map_back(id, row.address, row.bytes, row.fd) == CUDA_SUCCESS);
    }
    CHECK(memory.all_present());
    memory.refill_rooms();
    std::map<uint64_t, ino_t> after;
    for (auto& [address, mapping] : fake.mappings)
        after[address] = mapping.memory;
    CHECK(before == after);
}

void test_random_program(unsigned seed) {
    current_seed = seed;
    fake = FakeDriver();
    fake.capacity = 64 * kGranularity;
    std::mt19937 random(seed);
    flowgpu::Memory memory(driver());
    std::map<uint64_t, Model> model;
    for (int step = 0; step < 400; step++) {
        unsigned action = random() % 100;
        if (action < 55) {
            uint64_t bytes = some_size(random);
            uintptr_t owner = 1 + random() % 2;
            CUdeviceptr address = 0;
            CUresult result = memory.allocate(0, context(owner), bytes, &address);
            if (result == CUDA_SUCCESS)
                model[address] = Model{bytes, owner};
            else
                CHECK(result == CUDA_ERROR_OUT_OF_MEMORY &&
                      fake.in_use + bytes > fake.capacity - kGranularity);
        } else if (action < 90 && !model.empty()) {
            auto it = std::next(model.begin(), static_cast<long>(random() % model.size()));
            if (it->second.bytes > 1)
                CHECK(memory.release(it->first + 1) == CUDA_ERROR_INVALID_VALUE);
            CHECK(memory.release(it->first) == CUDA_SUCCESS);
            CHECK(!memory.map().starts_at(it->first, kAllocation));
            model.erase(it);
        } else if (action < 93) {
            memory.release_context(context(2));
            for (auto it = model.begin(); it != model.end();)
                it = it->second.context == 2 ? model.erase(it) : std::next(it);
        } else if (action < 97) {
            hand_over_and_back(memory, random);
        } else {
            fake.fail_map = 1;
            CUdeviceptr address = 0;
            CUresult result = memory.allocate(0, context(1), 3 * kGranularity, &address);
            CHECK(result == CUDA_ERROR_UNKNOWN || result == CUDA_ERROR_OUT_OF_MEMORY);
            fake.fail_map = 0;
        }
        check_against(memory, model);
    }
    for (auto& [address, entry] : model)
        CHECK(memory.release(address) == CUDA_SUCCESS);
    CHECK(memory.totals().allocations == 0 && memory.totals().blocks <= 1); // the spare small block
}

std::set<int> devices_of(uint64_t mapping) {
    std::set<int> found;
    for (auto& [device, flags] : fake.mappings.at(mapping).access)
        found.insert(device);
    return found;
}

void test_peers_reach_old_and_new_memory() {
    current_seed = 0;
    fake = FakeDriver();
    flowgpu::Memory memory(driver());
    CUdeviceptr first = 0, second = 0;
    CHECK(memory.allocate(1, context(1), kGranularity, &first) == CUDA_SUCCESS);
    CHECK(memory.set_peer(1, 0, true) == CUDA_SUCCESS);
    CHECK(memory.allocate(1, context(1), kGranularity, &second) == CUDA_SUCCESS);
    CHECK(devices_of(first) == (std::set<int>{0, 1}));
    CHECK(devices_of(second) == (std::set<int>{0, 1}));
    CHECK(memory.set_peer(1, 0, false) == CUDA_SUCCESS);
    CHECK(devices_of(first) == (std::set<int>{1}));
    CHECK(first >= flowgpu::kWindowBase + flowgpu::kWindowBytes);
}

void test_memory_that_the_driver_does_not_let_go_of_stays() {
    current_seed = 0;
    fake = FakeDriver();
    flowgpu::Memory memory(driver());
    CUdeviceptr large = 0, of_ended = 0;
    CHECK(memory.allocate(0, context(1), kGranularity, &large) == CUDA_SUCCESS);
    CHECK(memory.allocate(0, context(2), kGranularity, &of_ended) == CUDA_SUCCESS);
    fake.fail_unmap = 1;
    CHECK(memory.release(large) == CUDA_ERROR_UNKNOWN);
    CHECK(memory.map().starts_at(large, kAllocation) && memory.totals().allocations == 2);
    fake.fail_unmap = 1;
    memory.release_context(context(2));
    CHECK(memory.map().starts_at(of_ended, kAllocation) &&
          memory.contexts() == std::set<CUcontext>{context(1)});
    CHECK(memory.live_ids().size() == 2 && fake.mappings.count(of_ended));
    for (CUdeviceptr address : {large, of_ended})
        CHECK(memory.release(address) == CUDA_SUCCESS);
    CHECK(memory.totals().blocks == 0 && !fake.mappings.count(large));
}

void test_a_small_block_that_the_driver_does_not_let_go_of_is_used_again() {
    current_seed = 0;
    fake = FakeDriver();
    flowgpu::Memory memory(driver());
    std::vector<CUdeviceptr> all(2 * kGranularity / 1024 / 512);
    for (CUdeviceptr& address : all)
        CHECK(memory.allocate(0, context(1), 1024 * 512, &address) == CUDA_SUCCESS);
    const uint64_t blocks = memory.totals().blocks;
    CHECK(blocks > 1);
    fake.fail_unmap = 1;
    for (CUdeviceptr address : all)
        CHECK(memory.release(address) == CUDA_SUCCESS);
    CHECK(memory.totals().allocations == 0 && fake.fail_unmap == 0);
    CHECK(memory.totals().blocks == 1); // the spare
    for (CUdeviceptr& address : all)
        CHECK(memory.allocate(0, context(1), 1024 * 512, &address) == CUDA_SUCCESS);
    CHECK(memory.totals().blocks == blocks);
    fake.fail_unmap = 2; // the spare, which goes with the context
    memory.release_context(context(1));
    CHECK(memory.totals().blocks == 1 && memory.totals().allocations == 0);
    memory.release_context(context(1));
    CHECK(memory.totals().blocks == 0);
}

void test_a_failed_map_back_can_be_tried_again() {
    current_seed = 0;
    fake = FakeDriver();
    flowgpu::Memory memory(driver());
    CUdeviceptr address = 0;
    CHECK(memory.allocate(0, context(1), kGranularity, &address) == CUDA_SUCCESS);
    int kept = -1;
    uint64_t id = 0;
    CHECK(memory.send_new([&](const flowgpu::Block& block, int fd) {
        id = block.id;
        kept = fd;
        return true;
    }) == CUDA_SUCCESS);
    CHECK(memory.release_all() == CUDA_SUCCESS);
    fake.fail_map = 1;
    CHECK(memory.map_back(id, address, kGranularity, dup(kept)) == CUDA_ERROR_UNKNOWN);
    CHECK(!memory.all_present() && fake.handles.empty());
    CHECK(memory.map_back(id, address, kGranularity, dup(kept)) == CUDA_SUCCESS);
    CHECK(memory.all_present());
    // A block that is there is left alone, but its row is still checked.
    CHECK(memory.map_back(id, address, kGranularity, dup(kept)) == CUDA_SUCCESS);
    CHECK(fake.handles.size() == 1);
    CHECK(memory.map_back(id, address, 2 * kGranularity, kept) == CUDA_ERROR_INVALID_VALUE);
}

void test_the_last_context_leaves_nothing() {
    current_seed = 0;
    fake = FakeDriver();
    flowgpu::Memory memory(driver());
    CUdeviceptr first = 0, second = 0;
    CHECK(memory.allocate(0, context(1), 100, &first) == CUDA_SUCCESS);
    CHECK(memory.allocate(0, context(2), 100, &second) == CUDA_SUCCESS);
    CHECK(memory.map().in_window(first + 100) &&
          !memory.map().in_window(flowgpu::kWindowBase - 1) &&
          !memory.map().in_window(flowgpu::kWindowBase + flowgpu::kWindowBytes));
    memory.release_context(context(1));
    CHECK(memory.totals().blocks == 1 && memory.map().starts_at(second, kAllocation));
    CHECK(memory.release(second) == CUDA_SUCCESS);
    CHECK(memory.totals().blocks == 1); // spare
    memory.release_context(context(2));
    CHECK(memory.totals().blocks == 0 && fake.handles.empty() && fake.mappings.empty());
}

void test_forgetting_leaves_nothing_missing() {
    current_seed = 0;
    fake = FakeDriver();
    flowgpu::Memory memory(driver());
    CUdeviceptr address = 0;
    CHECK(memory.allocate(0, context(1), 300, &address) == CUDA_SUCCESS);
    CHECK(memory.send_new([](const flowgpu::Block&, int fd) { return close(fd) == 0; }) ==
          CUDA_SUCCESS);
    CHECK(memory.release_all() == CUDA_SUCCESS && !memory.all_present());
    memory.forget_all();
    CHECK(memory.all_present() && memory.live_ids().empty() &&
          !memory.map().starts_at(address, kAllocation));
    CHECK(memory.totals().blocks == 0 && memory.totals().allocation_bytes == 0);
    CHECK(memory.release(address) == CUDA_ERROR_INVALID_VALUE);
}

void test_what_a_dead_driver_had_is_taken_back_by_the_next() {
    current_seed = 0;
    fake = FakeDriver();
    flowgpu::Memory memory(driver());
    CUdeviceptr address = 0;
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp prop = {};
    CUdeviceptr place = 0;
    CHECK(address_reserve(&place, kGranularity, 0, 0x700000000000, 0) == CUDA_SUCCESS);
    CHECK(memory.allocate(0, context(1), kGranularity, &address) == CUDA_SUCCESS);
    CHECK(memory.create_handle(kGranularity, prop, context(1), &handle) == CUDA_SUCCESS);
    CHECK(memory.map_handle(place, kGranularity, 0, handle, 0) == CUDA_SUCCESS);
    std::map<uint64_t, std::pair<uint64_t, int>> kept; // by id: address, descriptor
    auto sink = [&](const flowgpu::Block& block, int fd) {
        kept[block.id] = {block.address, fd};
        return true;
    };
    for (int turn = 0; turn < 2; turn++) { // blocks of the second have descriptors of their own
        kept.clear();
        memory.forget_sent();
        CHECK(memory.send_new(sink) == CUDA_SUCCESS && kept.size() == 2);
        const size_t before = fake.handles.size();
        memory.lose_all();
        CHECK(!memory.all_present() && fake.handles.size() == before);
        CHECK(memory.totals().blocks == 2 && memory.room_bytes(0) == 0);
        fake.handles.clear();
        fake.mappings.clear();
        fake.in_use = 0;
        for (auto& [id, block] : kept)
            CHECK(memory.map_back(id, block.first, kGranularity, block.second) == CUDA_SUCCESS);
        CHECK(memory.all_present() && fake.mappings.size() == 2 && fake.mappings.count(place));
    }
    CHECK(memory.release(address) == CUDA_SUCCESS);
}

// Handles of the driver that are nobody's block.
size_t rooms(const flowgpu::Memory& memory) {
    return fake.handles.size() - memory.totals().blocks;
}

void test_a_room_is_as_large_as_its_device_lets_it() {
    constexpr uint64_t mib = 1ull << 20;
    struct {
        uint64_t total, expected;
    } cases[] = {{127, 0},        {128, 4},        {256, 4},        {2048, 4},
                 {2049, 6},       {8 * 1024, 16},  {16 * 1024, 32}, {16 * 1024 + 1, 32},
                 {80 * 1024, 32}, {143 * 1024, 32}};
    for (auto [total, expected] : cases)
        CHECK(flowgpu::Memory::room_for(total * mib, kGranularity) == expected * mib);
}

void test_a_room_is_free_while_the_memory_is_away() {
    current_seed = 0;
    fake = FakeDriver();
    fake.capacity = 128 * kGranularity;
    flowgpu::Memory memory(driver());
    CUdeviceptr address = 0;
    CHECK(memory.room_bytes(0) == 0);
    CHECK(memory.allocate(0, context(1), 126 * kGranularity, &address) == CUDA_SUCCESS);
    CHECK(memory.room_bytes(0) == 2 * kGranularity && fake.in_use == fake.capacity);
    CHECK(memory.totals().blocks == 1 && memory.live_ids().size() == 1 && rooms(memory) == 1);
    CHECK(memory.totals().block_bytes == 126 * kGranularity);
    int kept = -1;
    uint64_t id = 0;
    auto sink = [&](const flowgpu::Block& block, int fd) {
        CHECK(kept < 0); // of the program's memory only
        id = block.id;
        kept = fd;
        return true;
    };
    CHECK(memory.send_new(sink) == CUDA_SUCCESS);
    fake.fail_unmap = 1; // the memory stays, and so does the room
    CHECK(memory.release_all() == CUDA_ERROR_UNKNOWN && memory.room_bytes(0) == 2 * kGranularity);
    CHECK(memory.release_all() == CUDA_SUCCESS);
    CHECK(memory.room_bytes(0) == 0 && fake.handles.empty());
    CHECK(fake.capacity - fake.in_use == 2 * kGranularity);
    CHECK(memory.map_back(id, address, 126 * kGranularity, kept) == CUDA_SUCCESS);
    memory.refill_rooms();
    memory.refill_rooms(); // a second is never taken
    CHECK(memory.room_bytes(0) == 2 * kGranularity && fake.in_use == fake.capacity);
}

void test_a_room_that_the_driver_refuses_is_tried_again_at_a_checkpoint_only() {
    current_seed = 0;
    fake = FakeDriver();
    fake.capacity = 128 * kGranularity;
    fake.in_use = 127 * kGranularity; // of others
    flowgpu::Memory memory(driver());
    CUdeviceptr address = 0;
    CHECK(memory.allocate(0, context(1), kGranularity, &address) == CUDA_SUCCESS);
    CHECK(memory.room_bytes(0) == 0 && rooms(memory) == 0);
    fake.in_use -= 64 * kGranularity;
    CHECK(memory.allocate(0, context(1), kGranularity, &address) == CUDA_SUCCESS);
    CHECK(memory.room_bytes(0) == 0);
    memory.refill_rooms();
    CHECK(memory.room_bytes(0) == 2 * kGranularity && rooms(memory) == 1);
}

void test_a_room_goes_with_the_last_use_of_its_device() {
    current_seed = 0;
    fake = FakeDriver();
    flowgpu::Memory memory(driver());
    CUdeviceptr first = 0, second = 0;
    CHECK(memory.allocate(0, context(1), 100, &first) == CUDA_SUCCESS);
    CHECK(memory.allocate(1, context(2), 100, &second) == CUDA_SUCCESS);
    CHECK(rooms(memory) == 2);
    memory.release_context(context(1));
    CHECK(memory.room_bytes(0) == 0 && memory.room_bytes(1) != 0 && rooms(memory) == 1);
    CHECK(memory.allocate(0, context(3), 100, &first) == CUDA_SUCCESS);
    CHECK(memory.room_bytes(0) != 0);
    memory.forget_parents(); // in the child of a fork, whose driver must not be called
    CHECK(memory.room_bytes(0) == 0 && memory.room_bytes(1) == 0 && rooms(memory) == 2);
    memory.refill_rooms();
    CHECK(rooms(memory) == 2);
}

void test_a_handle_of_the_program_has_a_room_too() {
    current_seed = 0;
    fake = FakeDriver();
    flowgpu::Memory memory(driver());
    CUmemAllocationProp prop = {};
    prop.location.id = 3;
    CUmemGenericAllocationHandle handle = 0;
    CHECK(memory.create_handle(kGranularity, prop, context(1), &handle) == CUDA_SUCCESS);
    CHECK(memory.room_bytes(3) == 16 * kGranularity && rooms(memory) == 1);
    memory.release_context(context(1));
    CHECK(rooms(memory) == 1); // the handle outlives its context
    CHECK(memory.release_handle(handle) == CUDA_SUCCESS);
    CHECK(fake.handles.empty() && memory.totals().blocks == 0);
}

void test_memory_is_capable_of_rdma_where_the_device_offers_it() {
    current_seed = 0;
    for (int offered : {0, 1}) {
        fake = FakeDriver();
        fake.rdma = offered;
        flowgpu::Memory memory(driver());
        CUdeviceptr address = 0;
        CHECK(memory.allocate(0, context(1), 2 * kGranularity, &address) == CUDA_SUCCESS);
        CHECK(fake.capable == offered * static_cast<int>(fake.handles.size())); // and its room
    }
}

} // namespace

int main() {
    for (unsigned seed = 1; seed <= 50; seed++)
        test_ranges_against_a_bitmap(seed);
    for (unsigned seed = 1; seed <= 200; seed++)
        test_random_program(seed);
    test_peers_reach_old_and_new_memory();
    test_memory_that_the_driver_does_not_let_go_of_stays();
    test_a_small_block_that_the_driver_does_not_let_go_of_is_used_again();
    test_a_failed_map_back_can_be_tried_again();
    test_the_last_context_leaves_nothing();
    test_forgetting_leaves_nothing_missing();
    test_what_a_dead_driver_had_is_taken_back_by_the_next();
    test_a_room_is_as_large_as_its_device_lets_it();
    test_a_room_is_free_while_the_memory_is_away();
    test_a_room_that_the_driver_refuses_is_tried_again_at_a_checkpoint_only();
    test_a_room_goes_with_the_last_use_of_its_device();
    test_a_handle_of_the_program_has_a_room_too();
    test_memory_is_capable_of_rdma_where_the_device_offers_it();
    puts("vmm: all passed");
    return 0;
}
