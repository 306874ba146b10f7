// Property test of the address map against a table with a row for each address. Run by ctest;
// prints the seed of a failing sequence.
#include "fake_driver.h"

#include "address_map.h"

#include <random>

using namespace fake_driver;
using namespace flowgpu;

namespace {

constexpr uint64_t kBase = 1000, kAddresses = 120;
constexpr Kinds kAllKinds = (1u << kMemoryKinds) - 1;

bool is_same(const Region& one, const Region& other) {
    return one.address == other.address && one.bytes == other.bytes && one.kind == other.kind &&
           one.device == other.device && one.context == other.context;
}

// What lies at an address is one row a layer.
class Model {
  public:
    const Region* at(size_t layer, uint64_t address) const {
        const Region& row = rows_[layer][address - kBase];
        return row.bytes ? &row : nullptr;
    }

    void forget(size_t layer, uint64_t address) {
        const Region* there = at(layer, address);
        if (!there)
            return;
        const Region gone = *there;
        allocations_removed += gone.kind == MemoryKind::allocation;
        for (uint64_t one = gone.address; one < gone.address + gone.bytes; one++)
            rows_[layer][one - kBase] = Region();
    }

    void put(const Region& region) {
        const auto layer = static_cast<size_t>(facts_of(region.kind).layer);
        for (uint64_t one = region.address; one < region.address + region.bytes; one++)
            forget(layer, one);
        for (uint64_t one = region.address; one < region.address + region.bytes; one++)
            rows_[layer][one - kBase] = region;
    }

    const Region* find(uint64_t address, Kinds kinds) const {
        for (size_t layer = kLayers; layer-- > 0;) {
            const Region* region = at(layer, address);
            if (region && (kinds & only(region->kind)))
                return region;
        }
        return nullptr;
    }

    std::vector<Region> all(Kinds kinds) const {
        std::vector<Region> found;
        for (size_t layer = 0; layer < kLayers; layer++)
            for (uint64_t one = kBase; one < kBase + kAddresses; one++) {
                const Region* region = at(layer, one);
                if (region && region->address == one && (kinds & only(region->kind)))
                    found.push_back(*region);
            }
        return found;
    }

    bool remove(uint64_t address, Kinds kinds, Region* removed) {
        for (size_t layer = kLayers; layer-- > 0;) {
            const Region* region = at(layer, address);
            if (!region || region->address != address || !(kinds & only(region->kind)))
                continue;
            *removed = *region;
            forget(layer, address);
            return true;
        }
        return false;
    }

    uint64_t allocations_removed = 0;

  private:
    Region rows_[kLayers][kAddresses];
};

void check(const AddressMap& map, const Model& model, Kinds kinds) {
    for (uint64_t address = kBase; address < kBase + kAddresses; address++) {
        Region found;
        const Region* expected = model.find(address, kinds);
        CHECK(map.find(address, kinds, &found) == (expected != nullptr));
        CHECK(!expected || is_same(found, *expected));
        const bool starts = expected && expected->address == address;
        CHECK(map.starts_at(address, kinds) == starts);
        CHECK(map.in_window(address) == (model.find(address, kShared) != nullptr));
    }
    const std::vector<Region> expected = model.all(kinds), found = map.all(kinds);
    uint64_t bytes = 0;
    CHECK(found.size() == expected.size() && map.any(kinds) == !expected.empty());
    for (size_t i = 0; i < found.size(); i++) {
        CHECK(is_same(found[i], expected[i]));
        bytes += found[i].bytes;
    }
    CHECK(map.bytes(kinds) == bytes);
    CHECK(map.version() == 1 + model.allocations_removed);
}

void test_random_regions(unsigned seed) {
    current_seed = seed;
    std::mt19937 random(seed);
    AddressMap map;
    Model model;
    const auto some_kinds = [&] { return random() % 3 ? random() & kAllKinds : kAllKinds; };
    for (int step = 0; step < 300; step++) {
        const uint64_t address = kBase + random() % kAddresses;
        if (random() % 3) {
            Region region;
            region.address = address;
            region.bytes = random() % std::min<uint64_t>(20, kBase + kAddresses - address + 1);
            region.kind = static_cast<MemoryKind>(random() % kMemoryKinds);
            region.device = step;
            region.context = context(random() % 3);
            map.put(region);
            model.put(region);
        } else if (random() % 20) {
            const Kinds kinds = some_kinds();
            Region removed, expected;
            CHECK(map.remove(address, kinds, &removed) == model.remove(address, kinds, &expected));
            CHECK(is_same(removed, expected));
        } else {
            const Kinds kinds = some_kinds();
            map.remove_all(kinds);
            for (const Region& region : model.all(kinds))
                model.forget(static_cast<size_t>(facts_of(region.kind).layer), region.address);
        }
        check(map, model, some_kinds());
    }
}

void test_each_query_has_kinds_that_answer_it() {
    current_seed = 0;
    CHECK(kinds_that_answer(kRange) == only(MemoryKind::allocation, MemoryKind::imported,
                                            MemoryKind::adopted, MemoryKind::variable,
                                            MemoryKind::managed));
    CHECK(kinds_that_answer(kHandleTypes) == only(MemoryKind::allocation, MemoryKind::mapping));
    CHECK(kinds_that_answer(kPool) == only(MemoryKind::adopted, MemoryKind::managed));
    CHECK(kinds_that_answer(0) == 0);
}

void test_a_refusal_names_what_no_other_part_names() {
    current_seed = 0;
    for (const KindFacts& facts : kKindFacts) {
        const bool refused = facts.native == Saver::nobody || facts.replay == Saver::nobody;
        CHECK((facts.name != nullptr) == refused);
    }
}

void test_an_address_outside_the_windows_needs_no_lookup() {
    current_seed = 0;
    AddressMap map;
    CHECK(!map.may_be_in_window(0) && !map.may_be_in_window(kWindowBase));
    Region window;
    window.kind = MemoryKind::window;
    window.address = kWindowBase;
    window.bytes = kWindowBytes;
    map.put(window);
    CHECK(map.may_be_in_window(kWindowBase) &&
          map.may_be_in_window(kWindowBase + kWindowBytes - 1));
    CHECK(!map.may_be_in_window(kWindowBase - 1) &&
          !map.may_be_in_window(kWindowBase + kWindowBytes));
}

} // namespace

int main() {
    for (unsigned seed = 1; seed <= 200; seed++)
        test_random_regions(seed);
    test_each_query_has_kinds_that_answer_it();
    test_a_refusal_names_what_no_other_part_names();
    test_an_address_outside_the_windows_needs_no_lookup();
    puts("address map: all passed");
    return 0;
}
