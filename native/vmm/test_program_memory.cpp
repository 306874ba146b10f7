// Unit and property tests of memory that the program maps itself. Run by ctest; prints the seed of
// a failing sequence.
#include "fake_driver.h"
#include "proc.h"

#include <algorithm>
#include <random>

using namespace fake_driver;
using flowgpu::LiveRange;
using flowgpu::Memory;
using flowgpu::Origin;
using flowgpu::Shared;

namespace {

constexpr uint64_t kBase = 0x700000000000; // a reservation of the program
constexpr uint64_t kSlots = 64;            // granules in it

CUmemAllocationProp asked(int device = 0, bool exportable = false) {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    if (exportable)
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return prop;
}

CUmemAccessDesc access(int device, CUmemAccess_flags flags) {
    CUmemAccessDesc desc = {};
    desc.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    desc.location.id = device;
    desc.flags = flags;
    return desc;
}

void reset(unsigned seed) {
    current_seed = seed;
    fake = FakeDriver();
    fake.reserved[kBase] = kSlots * kGranularity;
}

CUmemGenericAllocationHandle create(Memory& memory, uint64_t granules) {
    CUmemGenericAllocationHandle handle = 0;
    CHECK(memory.create_handle(granules * kGranularity, asked(), context(1), &handle) ==
          CUDA_SUCCESS);
    return handle;
}

void grant(Memory& memory, uint64_t address, uint64_t bytes) {
    CUmemAccessDesc desc = access(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CHECK(memory.set_access(address, bytes, &desc, 1) == CUDA_SUCCESS);
}

// What the ghost keeps.
struct Keeper {
    struct Row {
        uint64_t address, bytes;
        int fd;
    };
    std::map<uint64_t, Row> rows;

    ~Keeper() {
        for (auto& [id, row] : rows)
            close(row.fd);
    }
    CUresult take(Memory& memory) {
        memory.forget_sent();
        return memory.send_new([this](const flowgpu::Block& block, int fd) {
            rows[block.id] = Row{block.address, block.bytes, fd};
            return true;
        });
    }
    CUresult give(Memory& memory, uint64_t id) const {
        const Row& row = rows.at(id);
        return memory.map_back(id, row.address, row.bytes, dup(row.fd));
    }
    void give_all(Memory& memory) const {
        for (uint64_t id : memory.live_ids())
            CHECK(give(memory, id) == CUDA_SUCCESS);
        CHECK(memory.all_present());
    }
};

// What is mapped where, with the memory's identity and its access: all that a hand-over must keep.
std::map<uint64_t, std::tuple<uint64_t, uint64_t, ino_t, std::map<int, CUmemAccess_flags>>>
picture() {
    decltype(picture()) found;
    for (auto& [address, m] : fake.mappings)
        found[address] = {m.bytes, m.offset, m.memory, m.access};
    return found;
}

// --- properties ---

struct Handle {
    uint64_t bytes;
    unsigned references = 1;
    std::set<uint64_t> mappings;
};

class RandomProgram {
  public:
    explicit RandomProgram(unsigned seed) : random_(seed), memory_(driver()) {}

    void step() {
        switch (random_() % 8) {
        case 0:
        case 1:
            return make();
        case 2:
        case 3:
            return map();
        case 4:
            return unmap();
        case 5:
            return change_access();
        case 6:
            return count();
        default:
            if (random_() % 4 == 0)
                hand_over();
        }
    }

    void check() {
        uint64_t bytes = 0, mapped = 0;
        for (auto& [handle, h] : handles_) {
            bytes += h.bytes;
            mapped += h.mappings.size();
            CHECK(memory_.is_program_handle(handle));
            CHECK(memory_.driver_handle(handle) != handle);
        }
        flowgpu::MemoryTotals totals = memory_.totals();
        CHECK(totals.allocations == handles_.size() && totals.blocks == handles_.size());
        CHECK(totals.allocation_bytes == bytes && totals.block_bytes == bytes);
        size_t room = memory_.room_bytes(0) ? 1 : 0;
        CHECK(fake.handles.size() == handles_.size() + room && fake.mappings.size() == mapped);
        // Each byte of each handle is live, where it is mapped or else at its handle.
        std::map<uint64_t, std::set<uint64_t>> live; // handle -> granules
        memory_.for_each_allocation([&](const LiveRange& range) {
            auto it = std::prev(handles_.upper_bound(range.place));
            CHECK(range.place + range.bytes <= it->first + it->second.bytes);
            if (range.address >= flowgpu::kFirstProgramHandle)
                CHECK(range.address == range.place);
            else
                CHECK(fake.mappings.at(range.address).bytes == range.bytes &&
                      fake.mappings.at(range.address).offset == range.place - it->first);
            for (uint64_t at = 0; at < range.bytes; at += kGranularity)
                live[it->first].insert((range.place - it->first + at) / kGranularity);
        });
        for (auto& [handle, h] : handles_)
            CHECK(live[handle].size() == h.bytes / kGranularity);
    }

    void end() {
        while (!handles_.empty()) {
            auto [handle, h] = *handles_.begin();
            for (uint64_t address : h.mappings)
                CHECK(memory_.unmap_range(address, fake.mappings.at(address).bytes) ==
                      CUDA_SUCCESS);
            for (unsigned i = 0; i < h.references; i++)
                CHECK(memory_.release_handle(handle) == CUDA_SUCCESS);
            CHECK(memory_.release_handle(handle) == CUDA_ERROR_INVALID_VALUE);
            handles_.erase(handle);
        }
        check();
    }

  private:
    uint64_t any_slot() { return kBase + random_() % kSlots * kGranularity; }
    std::map<uint64_t, Handle>::iterator any_handle() {
        return std::next(handles_.begin(), static_cast<long>(random_() % handles_.size()));
    }

    void make() {
        uint64_t granules = 1 + random_() % 4;
        if (handles_.size() < 12)
            handles_[create(memory_, granules)].bytes = granules * kGranularity;
    }

    void map() {
        if (handles_.empty())
            return;
        auto& [handle, h] = *any_handle();
        uint64_t offset = random_() % (h.bytes / kGranularity) * kGranularity;
        uint64_t bytes = (1 + random_() % 4) * kGranularity;
        uint64_t address = any_slot();
        bool free = address + bytes <= kBase + kSlots * kGranularity;
        for (auto& [start, m] : fake.mappings)
            free = free && (address + bytes <= start || start + m.bytes <= address);
        bool fits = free && h.references && offset + bytes <= h.bytes;
        CHECK(memory_.map_handle(address, bytes, offset, handle, 0) ==
              (fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE));
        if (fits)
            h.mappings.insert(address);
    }

    // One mapping, a part of one, or a run of several at once.
    void unmap() {
        if (fake.mappings.empty())
            return;
        auto it = fake.mappings.lower_bound(any_slot());
        uint64_t address = it == fake.mappings.end() ? fake.mappings.begin()->first : it->first;
        uint64_t bytes = (1 + random_() % 6) * kGranularity;
        std::vector<uint64_t> gone = fake.exactly(address, bytes);
        CHECK(memory_.unmap_range(address, bytes) ==
              (gone.empty() ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS));
        for (uint64_t start : gone)
            for (auto h = handles_.begin(); h != handles_.end();) {
                h->second.mappings.erase(start);
                h = unused(h->second) ? handles_.erase(h) : std::next(h);
            }
    }

    void change_access() {
        if (fake.mappings.empty())
            return;
        constexpr CUmemAccess_flags kinds[] = {CU_MEM_ACCESS_FLAGS_PROT_NONE,
                                               CU_MEM_ACCESS_FLAGS_PROT_READ,
                                               CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CUmemAccessDesc descs[] = {access(0, kinds[random_() % 3]),
                                   access(1, kinds[random_() % 3])};
        uint64_t address = fake.mappings.begin()->first;
        uint64_t bytes = (1 + random_() % 6) * kGranularity;
        bool fits = !fake.exactly(address, bytes).empty();
        CHECK(memory_.set_access(address, bytes, descs, 1 + random_() % 2) ==
              (fits ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE));
    }

    void count() {
        if (handles_.empty())
            return;
        auto it = any_handle();
        auto& [handle, h] = *it;
        if (random_() % 2 && !h.mappings.empty()) {
            CUmemGenericAllocationHandle found = 0;
            uint64_t address = *h.mappings.begin();
            uint64_t inside = address + random_() % fake.mappings.at(address).bytes;
            CHECK(memory_.retain_handle(inside, &found) && found == handle);
            h.references++;
            return;
        }
        CHECK(memory_.release_handle(handle) ==
              (h.references ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE));
        h.references -= h.references ? 1 : 0;
        if (unused(h))
            handles_.erase(it);
    }

    // With a failure here and there, and what it undoes.
    void hand_over() {
        auto before = picture();
        Keeper keeper;
        CHECK(keeper.take(memory_) == CUDA_SUCCESS);
        CHECK(keeper.rows.size() == handles_.size());
        for (auto& [id, row] : keeper.rows)
            CHECK(handles_.count(row.address) && handles_[row.address].bytes == row.bytes);
        if (random_() % 3 == 0)
            fake.fail_unmap = static_cast<int>(1 + random_() % (fake.mappings.size() + 1));
        CUresult result = memory_.release_all();
        bool failed = result != CUDA_SUCCESS;
        CHECK(!failed || fake.fail_unmap == 0);
        fake.fail_unmap = 0;
        if (!failed)
            CHECK(fake.mappings.empty() && fake.handles.empty());
        if (random_() % 3 == 0 && !before.empty()) {
            int& countdown = random_() % 2 ? fake.fail_map : fake.fail_access;
            countdown = static_cast<int>(1 + random_() % before.size());
            for (uint64_t id : memory_.live_ids())
                keeper.give(memory_, id); // one of them may fail; it is asked for again
            countdown = 0;
        }
        keeper.give_all(memory_);
        CHECK(picture() == before);
        check();
    }

    static bool unused(const Handle& h) { return !h.references && h.mappings.empty(); }

    std::mt19937 random_;
    Memory memory_;
    std::map<uint64_t, Handle> handles_; // by program handle
};

void test_random_program(unsigned seed) {
    reset(seed);
    RandomProgram program(seed);
    for (int step = 0; step < 400; step++) {
        program.step();
        program.check();
    }
    program.end();
}

// --- single rules ---

void test_what_is_taken_over() {
    reset(0);
    auto takes = [](auto change, uint64_t bytes = kGranularity, unsigned long long flags = 0) {
        CUmemAllocationProp prop = asked();
        change(prop);
        return Memory::takes_over(bytes, prop, flags);
    };
    auto nothing = [](CUmemAllocationProp&) {};
    CHECK(takes(nothing));
    CHECK(
        takes([](auto& p) { p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; }));
    CHECK(takes([](auto& p) { p.allocFlags.gpuDirectRDMACapable = 1; }));
    CHECK(!takes([](auto& p) { p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_FABRIC; }));
    CHECK(!takes([](auto& p) { p.type = CU_MEM_ALLOCATION_TYPE_INVALID; }));
    CHECK(!takes([](auto& p) { p.location.type = CU_MEM_LOCATION_TYPE_HOST; }));
    CHECK(!takes([](auto& p) { p.location.id = -1; }));
    CHECK(!takes([](auto& p) { p.allocFlags.compressionType = CU_MEM_ALLOCATION_COMP_GENERIC; }));
    CHECK(!takes([](auto& p) { p.allocFlags.usage = CU_MEM_CREATE_USAGE_TILE_POOL; }));
    CHECK(!takes([](auto& p) { p.win32HandleMetaData = &p; }));
    CHECK(!takes(nothing, 0) && !takes(nothing, kGranularity + 4096) &&
          !takes(nothing, kGranularity, 1));
}

void test_the_driver_decides_about_mappings_that_are_not_ours() {
    reset(0);
    Memory memory(driver());
    CUmemAllocationProp prop = asked(0, true);
    CUmemGenericAllocationHandle foreign = 0;
    CHECK(fake_driver::create(&foreign, kGranularity, &prop, 0) == CUDA_SUCCESS);
    CHECK(!memory.is_program_handle(foreign) && memory.driver_handle(foreign) == foreign);
    CHECK(fake_driver::map(kBase, kGranularity, 0, foreign, 0) == CUDA_SUCCESS);
    CUmemGenericAllocationHandle own = create(memory, 1), found = 0;
    CHECK(memory.map_handle(kBase + kGranularity, kGranularity, 0, own, 0) == CUDA_SUCCESS);
    CHECK(!memory.retain_handle(kBase, &found));
    grant(memory, kBase, 2 * kGranularity); // over both
    Keeper keeper;
    CHECK(keeper.take(memory) == CUDA_SUCCESS && keeper.rows.size() == 1);
    CHECK(memory.release_all() == CUDA_SUCCESS);
    CHECK(fake.mappings.size() == 1 && fake.mappings.count(kBase));
    keeper.give_all(memory);
    CHECK(fake.mappings.at(kBase + kGranularity).access.size() == 1);
    CHECK(memory.unmap_range(kBase, 2 * kGranularity) == CUDA_SUCCESS && fake.mappings.empty());
}

void test_the_handle_and_what_was_asked_for_stay_after_a_handover() {
    reset(0);
    Memory memory(driver());
    CUmemGenericAllocationHandle handle = 0, found = 0;
    CUmemAllocationProp prop = asked(3, true), answer = {};
    prop.allocFlags.gpuDirectRDMACapable = 1;
    CHECK(memory.create_handle(2 * kGranularity, prop, context(1), &handle) == CUDA_SUCCESS);
    CHECK(handle >= flowgpu::kFirstProgramHandle);
    CHECK(memory.map_handle(kBase, kGranularity, 0, handle, 0) == CUDA_SUCCESS);
    CUmemGenericAllocationHandle real = memory.driver_handle(handle);
    Keeper keeper;
    CHECK(keeper.take(memory) == CUDA_SUCCESS && memory.release_all() == CUDA_SUCCESS);
    keeper.give_all(memory);
    CHECK(memory.driver_handle(handle) != real);
    CHECK(memory.retain_handle(kBase + 5, &found) && found == handle);
    CHECK(memory.asked_for(handle, &answer) && answer.location.id == 3 &&
          answer.allocFlags.gpuDirectRDMACapable == 1);
    CHECK(memory.asked_at(kBase + 5, &answer) && !memory.asked_at(kBase + kGranularity, &answer));
    // The driver exports no imported handle, but the descriptor it came by can be given again.
    int fd = -1;
    auto type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CHECK(memory.may_export(&fd, handle, type, 0) == CUDA_SUCCESS);
    Shared shared;
    CHECK(memory.share(handle, &shared) == CUDA_SUCCESS && shared.bytes == 2 * kGranularity);
    CHECK(fake_driver::import_handle(&found, reinterpret_cast<void*>(intptr_t{shared.fd}), type) ==
          CUDA_SUCCESS);
    CHECK(fake.handles.at(found).first == fake.handles.at(memory.driver_handle(handle)).first);
    close(shared.fd);
}

void test_an_import_is_memory_of_its_owners_until_a_handover_and_after_it() {
    reset(0);
    Memory owner(driver()), importer(driver());
    CUmemGenericAllocationHandle made = 0, handle = 0, again = 0;
    CHECK(owner.create_handle(2 * kGranularity, asked(0, true), context(1), &made) == CUDA_SUCCESS);
    CHECK(owner.map_handle(kBase, 2 * kGranularity, 0, made, 0) == CUDA_SUCCESS);
    grant(owner, kBase, 2 * kGranularity);
    const auto import = [&](CUmemGenericAllocationHandle* out) {
        Shared shared;
        CHECK(owner.share(made, &shared) == CUDA_SUCCESS);
        const Origin origin = {{1, 2}, shared.id};
        CHECK(importer.import_block(origin, shared.block_bytes, shared.fd, context(2), out) ==
              CUDA_SUCCESS);
    };
    import(&handle);
    import(&again);
    CHECK(handle == again && importer.release_handle(again) == CUDA_SUCCESS);
    const uint64_t there = kBase + 8 * kGranularity;
    CHECK(importer.map_handle(there, kGranularity, kGranularity, handle, 0) == CUDA_SUCCESS);
    grant(importer, there, kGranularity);
    int fd = -1;
    CHECK(importer.may_export(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) ==
          CUDA_ERROR_INVALID_VALUE);
    CHECK(importer.totals().blocks == 1 && importer.totals().block_bytes == 0 &&
          importer.totals().allocations == 0 && importer.contexts().count(context(2)));
    const auto before = picture();
    CHECK(before.size() == 2 && std::get<2>(before.at(kBase)) == std::get<2>(before.at(there)));

    Keeper keepers[2];
    Memory* both[] = {&owner, &importer};
    for (int i = 0; i < 2; i++) {
        CHECK(keepers[i].take(*both[i]) == CUDA_SUCCESS && both[i]->release_all() == CUDA_SUCCESS);
        CHECK(!both[i]->all_present());
    }
    CHECK(fake.mappings.empty());
    for (int i = 2; i-- > 0;) // in either order: the descriptor is enough
        keepers[i].give_all(*both[i]);
    CHECK(picture() == before);
    // An owner that lets go leaves it to its importer.
    CHECK(owner.unmap_range(kBase, 2 * kGranularity) == CUDA_SUCCESS &&
          owner.release_handle(made) == CUDA_SUCCESS);
    Keeper last;
    CHECK(last.take(importer) == CUDA_SUCCESS && importer.release_all() == CUDA_SUCCESS);
    last.give_all(importer);
    CHECK(picture().at(there) == before.at(there));
    CHECK(importer.unmap_range(there, kGranularity) == CUDA_SUCCESS &&
          importer.release_handle(handle) == CUDA_SUCCESS && importer.totals().blocks == 0);
    CHECK(!importer.is_program_handle(handle) && fake.mappings.empty());
}

void test_memory_that_did_not_ask_for_it_is_not_exported() {
    reset(0);
    Memory memory(driver());
    CUmemGenericAllocationHandle handle = create(memory, 1);
    int fd = -1;
    CHECK(memory.may_export(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) ==
          CUDA_ERROR_INVALID_VALUE);
    CHECK(fd == -1);
}

void test_a_released_handle_is_good_for_nothing_but_retaining() {
    reset(0);
    Memory memory(driver());
    CUmemGenericAllocationHandle handle = create(memory, 1), found = 0;
    CHECK(memory.map_handle(kBase, kGranularity, 0, handle, 0) == CUDA_SUCCESS);
    CHECK(memory.release_handle(handle) == CUDA_SUCCESS);
    CHECK(memory.release_handle(handle) == CUDA_ERROR_INVALID_VALUE);
    CHECK(memory.map_handle(kBase + kGranularity, kGranularity, 0, handle, 0) ==
          CUDA_ERROR_INVALID_VALUE);
    CHECK(memory.retain_handle(kBase, &found) && found == handle);
    CHECK(memory.map_handle(kBase + kGranularity, kGranularity, 0, handle, 0) == CUDA_SUCCESS);
    CHECK(memory.release_handle(handle) == CUDA_SUCCESS);
    CHECK(memory.unmap_range(kBase, 2 * kGranularity) == CUDA_SUCCESS);
    CHECK(!memory.is_program_handle(handle) && fake.memory.size() == 1); // the room
}

void test_contexts_and_peers_do_not_touch_it() {
    reset(0);
    Memory memory(driver());
    CUmemGenericAllocationHandle handle = create(memory, 1);
    CHECK(memory.map_handle(kBase, kGranularity, 0, handle, 0) == CUDA_SUCCESS);
    CHECK(memory.contexts() == std::set<CUcontext>{context(1)});
    CHECK(memory.set_peer(0, 1, true) == CUDA_SUCCESS && fake.mappings.at(kBase).access.empty());
    memory.release_context(context(1));
    CHECK(memory.contexts().empty() && fake.mappings.count(kBase));
}

long descriptors() {
    long count = 0;
    flowgpu::proc::each_number("/proc/self/fd", [&](const char*, int) { count++; });
    return count;
}

void test_half_of_a_handle_that_stays_behind_is_joined_by_the_rest() {
    reset(0);
    Memory memory(driver());
    CUmemGenericAllocationHandle handle = create(memory, 2);
    for (uint64_t slot : {0, 4})
        CHECK(memory.map_handle(kBase + slot * kGranularity, kGranularity, 0, handle, 0) ==
              CUDA_SUCCESS);
    auto before = picture();
    Keeper keeper;
    CHECK(keeper.take(memory) == CUDA_SUCCESS);
    const auto fail = [&] {
        fake.fail_unmap = 2; // the first mapping goes, the second does not,
        fake.fail_map = 1;   // and the first does not come back
        CHECK(memory.release_all() == CUDA_ERROR_UNKNOWN);
        CHECK(!memory.all_present() && fake.mappings.size() == 1);
        keeper.give_all(memory);
    };
    fail();
    const long open_files = descriptors();
    fail(); // of memory that was imported, the task has a descriptor
    CHECK(descriptors() == open_files);
    CHECK(picture() == before && fake.handles.size() == 2); // the room is one
    memory.forget_all();
    CHECK(!memory.is_program_handle(handle) && memory.totals().blocks == 0);
}

// Memory that gets its address only after a hand-over, and only where the driver has begun anew.
void test_what_is_to_be_mapped_later_waits() {
    for (bool anew : {false, true}) {
        reset(0);
        Memory memory(driver());
        CUmemGenericAllocationHandle other = create(memory, 1), handle = create(memory, 2);
        CHECK(memory.map_handle(kBase + 8 * kGranularity, kGranularity, 0, other, 0) ==
              CUDA_SUCCESS);
        const auto before = picture();
        memory.map_later(kBase, handle);
        unsigned seen = 0;
        memory.for_each_allocation([&](const LiveRange& range) {
            seen += range.address == kBase && range.bytes == 2 * kGranularity;
        });
        CHECK(seen == 1 && picture() == before && memory.all_present());
        Keeper keeper;
        CHECK(keeper.take(memory) == CUDA_SUCCESS && keeper.rows.size() == 2);
        CHECK(memory.release_all() == CUDA_SUCCESS && fake.mappings.empty());
        if (anew)
            memory.stop_waiting();
        keeper.give_all(memory);
        if (!anew) {
            CHECK(picture() == before);
            memory.drop_waiting();
            CHECK(picture() == before && memory.totals().blocks == 1);
            continue;
        }
        CHECK(picture().size() == 2 && fake.mappings.at(kBase).bytes == 2 * kGranularity);
        CHECK(fake.mappings.at(kBase).access.at(0) == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
        memory.drop_waiting(); // nothing does
        CHECK(memory.unmap_range(kBase, 2 * kGranularity) == CUDA_SUCCESS);
        CHECK(picture() == before && memory.totals().blocks == 1);
    }
}

} // namespace

int main() {
    for (unsigned seed = 1; seed <= 300; seed++)
        test_random_program(seed);
    test_what_is_taken_over();
    test_the_driver_decides_about_mappings_that_are_not_ours();
    test_the_handle_and_what_was_asked_for_stay_after_a_handover();
    test_an_import_is_memory_of_its_owners_until_a_handover_and_after_it();
    test_memory_that_did_not_ask_for_it_is_not_exported();
    test_a_released_handle_is_good_for_nothing_but_retaining();
    test_contexts_and_peers_do_not_touch_it();
    test_half_of_a_handle_that_stays_behind_is_joined_by_the_rest();
    test_what_is_to_be_mapped_later_waits();
    puts("program memory: all passed");
    return 0;
}
