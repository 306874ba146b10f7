#include "catalogue.h"

#include "failure.h"

#include <algorithm>
#include <sys/mman.h>
#include <utility>

namespace fgg {
namespace {

constexpr unsigned kLeastBits = 12;
// Rows of entries fit the lower half of a slot.
constexpr unsigned kMostBits = 32;

// Slots are at most half in use: then a lookup looks at 2.5 of them at most, on average, of which a
// cache line has 8.
constexpr uint64_t room(unsigned bits) {
    return 1ull << (bits - 1);
}

unsigned bits_for(uint64_t expected) {
    unsigned bits = kLeastBits;
    while (bits < kMostBits && room(bits) < expected)
        bits++;
    return bits;
}

uint64_t load(const uint8_t* from) {
    uint64_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

uint64_t tag(uint64_t low, uint64_t high) {
    return (low + high) >> 32 << 32;
}

uint64_t row_of(uint64_t slot) {
    return (slot & UINT32_MAX) - 1;
}

} // namespace

template <typename T> Table<T>::Table(uint64_t rows) : bytes_(rows * sizeof(T)) {
    void* memory =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        throw Failure(FGG_SYSTEM, std::string("no memory for the catalogue: ") + strerror(errno));
    rows_ = static_cast<T*>(memory);
    // With small pages most lookups would miss the TLB.
    madvise(memory, bytes_, MADV_HUGEPAGE);
    // Where the kernel cannot, the pages come when they are used.
    madvise(memory, bytes_, MADV_POPULATE_WRITE);
}

template <typename T> Table<T>::~Table() {
    if (rows_)
        munmap(rows_, bytes_);
}

template <typename T>
Table<T>::Table(Table&& other) noexcept
    : rows_(std::exchange(other.rows_, nullptr)), bytes_(other.bytes_) {}

template <typename T> Table<T>& Table<T>::operator=(Table&& other) noexcept {
    std::swap(rows_, other.rows_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

Catalogue::Catalogue(uint64_t expected)
    : bits_(bits_for(expected)), slots_(1ull << bits_), entries_(room(bits_)) {}

Catalogue::~Catalogue() = default;

uint64_t Catalogue::home(uint64_t low, uint64_t high) const {
    // Fibonacci hashing: digests are even already, but numbers in their place should do as well.
    return ((low ^ (high >> 32 | high << 32)) * 0x9e3779b97f4a7c15ull) >> (64 - bits_);
}

void Catalogue::fetch(const uint8_t* digests, uint64_t count, Batch& batch) const {
    batch.count = static_cast<unsigned>(std::min<uint64_t>(kBatch, count));
    for (unsigned i = 0; i < batch.count; i++) {
        batch.low[i] = load(digests + i * FGG_DIGEST_BYTES);
        batch.high[i] = load(digests + i * FGG_DIGEST_BYTES + 8);
        __builtin_prefetch(&slots_[home(batch.low[i], batch.high[i])], 1);
    }
}

void Catalogue::fetch_entries(const Batch& batch) const {
    for (unsigned i = 0; i < batch.count; i++) {
        const Slot slot = slots_[home(batch.low[i], batch.high[i])];
        if (slot && (slot ^ tag(batch.low[i], batch.high[i])) <= UINT32_MAX)
            __builtin_prefetch(&entries_[row_of(slot)]);
    }
}

uint64_t Catalogue::find_or_add(uint64_t low, uint64_t high, uint64_t number) {
    const uint64_t mask = (1ull << bits_) - 1;
    for (uint64_t i = home(low, high);; i = (i + 1) & mask) {
        Slot& slot = slots_[i];
        if (!slot) {
            entries_[used_] = {low, high, number};
            slot = tag(low, high) | (used_ + 1);
            return used_++;
        }
        if ((slot ^ tag(low, high)) > UINT32_MAX)
            continue;
        const Entry& entry = entries_[row_of(slot)];
        if (entry.low == low && entry.high == high)
            return row_of(slot);
    }
}

void Catalogue::make_room(uint64_t more) {
    if (used_ + more <= room(bits_))
        return;
    if (bits_ == kMostBits)
        throw Failure(FGG_SYSTEM, "the catalogue is full");
    Table<Entry> entries(room(bits_ + 1));
    slots_ = Table<Slot>(2ull << bits_);
    std::memcpy(&entries[0], &entries_[0], used_ * sizeof(Entry));
    entries_ = std::move(entries);
    bits_++;
    for (uint64_t row = 0; row < used_; row++)
        place(row);
}

void Catalogue::place(uint64_t row) {
    const uint64_t mask = (1ull << bits_) - 1;
    const Entry& entry = entries_[row];
    uint64_t i = home(entry.low, entry.high);
    while (slots_[i])
        i = (i + 1) & mask;
    slots_[i] = tag(entry.low, entry.high) | (row + 1);
}

void Catalogue::match(const uint8_t* digests, uint64_t count, uint64_t first, uint64_t* numbers) {
    if (first > UINT64_MAX - count)
        throw Failure(FGG_ARGUMENT, "numbers beyond 64 bits");
    // The next batch's slots are on their way while this one is looked up.
    Batch batches[2];
    fetch(digests, count, batches[0]);
    for (uint64_t at = 0; at < count; at += kBatch) {
        const Batch& batch = batches[at / kBatch % 2];
        make_room(batch.count);
        fetch_entries(batch);
        const uint64_t next = at + batch.count;
        fetch(digests + next * FGG_DIGEST_BYTES, count - next, batches[(at / kBatch + 1) % 2]);
        for (unsigned i = 0; i < batch.count; i++)
            numbers[at + i] =
                entries_[find_or_add(batch.low[i], batch.high[i], first + at + i)].number;
    }
}

} // namespace fgg
