// Unit and property tests of the range allocator and the memory tables, against a driver of our own
// that is as strict as the real one about granularity, double maps, and handles. Run by ctest;
// prints the seed of a failing sequence.
#include "memory.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace {

unsigned current_seed;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: failed: %s (seed %u)\n", __FILE__, __LINE__, #condition,       \
                    current_seed);                                                                 \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

constexpr uint64_t kGranularity = 2u << 20;

struct Physical {
    uint64_t bytes;
    int references = 0; // handles and mappings
};
struct Mapping {
    uint64_t bytes;
    CUmemGenericAllocationHandle handle;
    std::set<int> accessible;
};

struct FakeDriver {
    std::map<uint64_t, uint64_t> reserved;
    std::map<CUmemGenericAllocationHandle, std::pair<ino_t, bool>> handles; // -> memory, imported
    std::map<ino_t, Physical> memory;
    std::map<uint64_t, Mapping> mappings;
    CUmemGenericAllocationHandle next_handle = 100;
    ino_t next_memory = 1;
    uint64_t capacity = 1ull << 40;
    uint64_t in_use = 0;
    std::map<ino_t, ino_t> exported; // inode of the exported file -> memory
    int fail_map = 0;                // the nth map from now fails

    void drop(ino_t id) {
        if (--memory.at(id).references == 0) {
            in_use -= memory.at(id).bytes;
            memory.erase(id);
        }
    }
} fake;

CUresult address_reserve(CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr hint,
                         unsigned long long) {
    CHECK(bytes % kGranularity == 0);
    *out = hint;
    fake.reserved[hint] = bytes;
    return CUDA_SUCCESS;
}
CUresult address_free(CUdeviceptr, size_t) {
    return CUDA_SUCCESS;
}
CUresult create(CUmemGenericAllocationHandle* out, size_t bytes, const CUmemAllocationProp* prop,
                unsigned long long) {
    CHECK(bytes && bytes % kGranularity == 0);
    CHECK(prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (fake.in_use + bytes > fake.capacity)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fake.in_use += bytes;
    ino_t id = fake.next_memory++;
    fake.memory[id] = Physical{bytes, 1};
    *out = fake.next_handle++;
    fake.handles[*out] = {id, false};
    return CUDA_SUCCESS;
}
CUresult release(CUmemGenericAllocationHandle handle) {
    auto it = fake.handles.find(handle);
    CHECK(it != fake.handles.end());
    ino_t id = it->second.first;
    fake.handles.erase(it);
    fake.drop(id);
    return CUDA_SUCCESS;
}
CUresult map(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long) {
    if (fake.fail_map && --fake.fail_map == 0)
        return CUDA_ERROR_UNKNOWN;
    CHECK(offset == 0 && address % kGranularity == 0 && bytes % kGranularity == 0);
    auto window = fake.reserved.upper_bound(address);
    CHECK(window != fake.reserved.begin());
    --window;
    CHECK(address + bytes <= window->first + window->second);
    for (auto& [start, mapping] : fake.mappings)
        CHECK(address + bytes <= start || start + mapping.bytes <= address);
    ino_t id = fake.handles.at(handle).first;
    CHECK(fake.memory.at(id).bytes == bytes);
    fake.memory.at(id).references++;
    fake.mappings[address] = Mapping{bytes, id, {}};
    return CUDA_SUCCESS;
}
CUresult unmap(CUdeviceptr address, size_t bytes) {
    auto it = fake.mappings.find(address);
    CHECK(it != fake.mappings.end() && it->second.bytes == bytes);
    ino_t id = it->second.handle;
    fake.mappings.erase(it);
    fake.drop(id);
    return CUDA_SUCCESS;
}
CUresult set_access(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* descs, size_t count) {
    auto it = fake.mappings.find(address);
    CHECK(it != fake.mappings.end() && it->second.bytes == bytes);
    for (size_t i = 0; i < count; i++) {
        if (descs[i].flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            it->second.accessible.insert(descs[i].location.id);
        else
            it->second.accessible.erase(descs[i].location.id);
    }
    return CUDA_SUCCESS;
}
CUresult export_handle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                       unsigned long long) {
    auto [id, imported] = fake.handles.at(handle);
    if (imported)
        return CUDA_ERROR_INVALID_VALUE; // E2
    int fd = memfd_create("exported", MFD_CLOEXEC);
    struct stat status;
    CHECK(fd >= 0 && fstat(fd, &status) == 0);
    fake.exported[status.st_ino] = id;
    fake.memory.at(id).references++; // the descriptor keeps the memory; tests never give it back
    *static_cast<int*>(out) = fd;
    return CUDA_SUCCESS;
}
CUresult import_handle(CUmemGenericAllocationHandle* out, void* fd, CUmemAllocationHandleType) {
    struct stat status;
    if (fstat(static_cast<int>(reinterpret_cast<intptr_t>(fd)), &status) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    ino_t id = fake.exported.at(status.st_ino);
    fake.memory.at(id).references++;
    *out = fake.next_handle++;
    fake.handles[*out] = {id, true};
    return CUDA_SUCCESS;
}
CUresult granularity(size_t* out, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    *out = kGranularity;
    return CUDA_SUCCESS;
}

flowgpu::VmmDriver driver() {
    return {address_reserve, address_free, create,        release,       map,
            unmap,           set_access,   export_handle, import_handle, granularity};
}

CUcontext context(uintptr_t n) {
    return reinterpret_cast<CUcontext>(n);
}

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
            uint64_t got = ranges.take(n);
            CHECK(got == expected);
            if (got) {
                taken[got] = n;
                for (uint64_t i = 0; i < n; i++)
                    used[got - base + i] = true;
            }
        } else if (!taken.empty()) {
            auto it = std::next(taken.begin(), static_cast<long>(random() % taken.size()));
            CHECK(ranges.give(it->first, it->second));
            CHECK(!ranges.give(it->first, it->second)); // twice
            for (uint64_t i = 0; i < it->second; i++)
                used[it->first - base + i] = false;
            taken.erase(it);
        }
        uint64_t free = 0;
        for (bool u : used)
            free += !u;
        CHECK(ranges.free_bytes() == free);
    }
    CHECK(!ranges.give(base - 1, 1) && !ranges.give(base + units, 1) && !ranges.give(base, 0));
    for (auto [address, bytes] : taken)
        CHECK(ranges.give(address, bytes));
    CHECK(ranges.all_free());
    CHECK(ranges.take_at(base + 10, 5) && !ranges.take_at(base + 14, 2) &&
          ranges.take_at(base + 15, 2));
    CHECK(!ranges.take_at(base + units - 1, 2));
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
        flowgpu::Allocation found;
        CHECK(memory.find(address, &found) && found.address == address &&
              found.bytes == entry.bytes);
        CHECK(memory.find(address + entry.bytes - 1, &found) && found.address == address);
        bool past = memory.find(address + entry.bytes, &found);
        CHECK(!past || found.address == address + entry.bytes);
        auto mapping = fake.mappings.upper_bound(address);
        CHECK(mapping != fake.mappings.begin());
        --mapping;
        CHECK(address + entry.bytes <= mapping->first + mapping->second.bytes);
        CHECK(mapping->second.accessible.count(found.device));
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
        before[address] = mapping.handle;
    CHECK(memory.release_all() == CUDA_SUCCESS);
    CHECK(fake.mappings.empty() && fake.handles.empty());
    CHECK(kept.empty() || !memory.all_present());
    for (auto& [id, row] : kept) {
        if (random() % 8 == 0) {
            CHECK(memory.take_back(id, row.address + kGranularity, row.bytes, dup(row.fd)) ==
                  CUDA_ERROR_INVALID_VALUE);
            CHECK(memory.take_back(id + 1000000, row.address, row.bytes, dup(row.fd)) ==
                  CUDA_ERROR_INVALID_VALUE);
        }
        CHECK(memory.take_back(id, row.address, row.bytes, row.fd) == CUDA_SUCCESS);
    }
    CHECK(memory.all_present());
    std::map<uint64_t, ino_t> after;
    for (auto& [address, mapping] : fake.mappings)
        after[address] = mapping.handle;
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
            CHECK(!memory.starts_at(it->first));
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

void test_peers_reach_old_and_new_memory() {
    current_seed = 0;
    fake = FakeDriver();
    flowgpu::Memory memory(driver());
    CUdeviceptr first = 0, second = 0;
    CHECK(memory.allocate(1, context(1), kGranularity, &first) == CUDA_SUCCESS);
    CHECK(memory.set_peer(1, 0, true) == CUDA_SUCCESS);
    CHECK(memory.allocate(1, context(1), kGranularity, &second) == CUDA_SUCCESS);
    CHECK(fake.mappings.at(first).accessible == (std::set<int>{0, 1}));
    CHECK(fake.mappings.at(second).accessible == (std::set<int>{0, 1}));
    CHECK(memory.set_peer(1, 0, false) == CUDA_SUCCESS);
    CHECK(fake.mappings.at(first).accessible == (std::set<int>{1}));
    CHECK(first >= flowgpu::kWindowBase + flowgpu::kWindowBytes);
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
    CHECK(memory.take_back(id, address, kGranularity, dup(kept)) == CUDA_ERROR_UNKNOWN);
    CHECK(!memory.all_present() && fake.handles.empty());
    CHECK(memory.take_back(id, address, kGranularity, dup(kept)) == CUDA_SUCCESS);
    CHECK(memory.all_present());
    // A block that is there is left alone, but its row is still checked.
    CHECK(memory.take_back(id, address, kGranularity, dup(kept)) == CUDA_SUCCESS);
    CHECK(fake.handles.size() == 1);
    CHECK(memory.take_back(id, address, 2 * kGranularity, kept) == CUDA_ERROR_INVALID_VALUE);
}

void test_the_last_context_leaves_nothing() {
    current_seed = 0;
    fake = FakeDriver();
    flowgpu::Memory memory(driver());
    CUdeviceptr first = 0, second = 0;
    CHECK(memory.allocate(0, context(1), 100, &first) == CUDA_SUCCESS);
    CHECK(memory.allocate(0, context(2), 100, &second) == CUDA_SUCCESS);
    CHECK(memory.in_window(first + 100) && !memory.in_window(flowgpu::kWindowBase - 1) &&
          !memory.in_window(flowgpu::kWindowBase + flowgpu::kWindowBytes));
    memory.release_context(context(1));
    CHECK(memory.totals().blocks == 1 && memory.starts_at(second));
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
    CHECK(memory.all_present() && memory.live_ids().empty() && !memory.starts_at(address));
    CHECK(memory.totals().blocks == 0 && memory.totals().allocation_bytes == 0);
    CHECK(memory.release(address) == CUDA_ERROR_INVALID_VALUE);
}

} // namespace

int main() {
    for (unsigned seed = 1; seed <= 50; seed++)
        test_ranges_against_a_bitmap(seed);
    for (unsigned seed = 1; seed <= 200; seed++)
        test_random_program(seed);
    test_peers_reach_old_and_new_memory();
    test_a_failed_map_back_can_be_tried_again();
    test_the_last_context_leaves_nothing();
    test_forgetting_leaves_nothing_missing();
    puts("vmm: all passed");
    return 0;
}
