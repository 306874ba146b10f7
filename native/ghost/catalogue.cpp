#include "catalogue.h"

#include "failure.h"
#include "threads.h"

#include <algorithm>
#include <exception>
#include <sched.h>
#include <sys/mman.h>
#include <utility>

namespace fgg {
namespace {

constexpr unsigned kLeastBits = 12;
// Below it, threads cost more than they gain.
constexpr uint64_t kFewDigests = 1ull << 16;
constexpr unsigned kMostShards = 16;
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

unsigned shards_for(uint64_t expected) {
    cpu_set_t cores;
    const bool known = sched_getaffinity(0, sizeof cores, &cores) == 0;
    const unsigned most = known ? static_cast<unsigned>(CPU_COUNT(&cores)) : 1;
    unsigned shards = 1;
    while (expected >= kFewDigests && 2 * shards <= std::min(most, kMostShards))
        shards *= 2;
    return shards;
}

// Where a digest is, by other bits than those that say where in its shard.
unsigned shard_of(const uint8_t* digest, unsigned shards) {
    return static_cast<unsigned>((load(digest) ^ load(digest + 8)) >> 17) & (shards - 1);
}

// Does what run_threads does, and throws the first failure of work when all threads have ended.
template <typename Work> void run_guarded(unsigned count, Work work) {
    if (count == 1)
        return work(0);
    std::vector<std::exception_ptr> errors(count);
    run_threads(count, [&](unsigned i) {
        try {
            work(i);
        } catch (...) {
            errors[i] = std::current_exception();
        }
    });
    for (const std::exception_ptr& error : errors)
        if (error)
            std::rethrow_exception(error);
}

} // namespace

template <typename T> Table<T>::Table(uint64_t rows) : bytes_(rows * sizeof(T)) {
    void* memory =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        throw MoverFailure(FGG_SYSTEM,
                           std::string("no memory for the catalogue: ") + strerror(errno));
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

Shard::Shard(uint64_t expected)
    : bits_(bits_for(expected)), slots_(1ull << bits_), entries_(room(bits_)) {}

Shard::~Shard() = default;

uint64_t Shard::home(uint64_t low, uint64_t high) const {
    // Fibonacci hashing: digests are even already, but numbers in their place should do as well.
    return ((low ^ (high >> 32 | high << 32)) * 0x9e3779b97f4a7c15ull) >> (64 - bits_);
}

void Shard::fetch(const uint8_t* digests, const uint32_t* rows, uint64_t count,
                  Batch& batch) const {
    batch.count = static_cast<unsigned>(std::min<uint64_t>(kBatch, count));
    for (unsigned i = 0; i < batch.count; i++) {
        const uint8_t* digest = digests + uint64_t{rows[i]} * FGG_DIGEST_BYTES;
        batch.low[i] = load(digest);
        batch.high[i] = load(digest + 8);
        __builtin_prefetch(&slots_[home(batch.low[i], batch.high[i])], 1);
    }
}

void Shard::fetch_entries(const Batch& batch) const {
    for (unsigned i = 0; i < batch.count; i++) {
        const Slot slot = slots_[home(batch.low[i], batch.high[i])];
        if (slot && (slot ^ tag(batch.low[i], batch.high[i])) <= UINT32_MAX)
            __builtin_prefetch(&entries_[row_of(slot)]);
    }
}

uint64_t Shard::find_or_add(uint64_t low, uint64_t high, uint64_t number) {
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

void Shard::make_room(uint64_t more) {
    if (used_ + more <= room(bits_))
        return;
    if (bits_ == kMostBits)
        throw MoverFailure(FGG_SYSTEM, "the catalogue is full");
    Table<Entry> entries(room(bits_ + 1));
    slots_ = Table<Slot>(2ull << bits_);
    std::memcpy(&entries[0], &entries_[0], used_ * sizeof(Entry));
    entries_ = std::move(entries);
    bits_++;
    for (uint64_t row = 0; row < used_; row++)
        place(row);
}

void Shard::place(uint64_t row) {
    const uint64_t mask = (1ull << bits_) - 1;
    const Entry& entry = entries_[row];
    uint64_t i = home(entry.low, entry.high);
    while (slots_[i])
        i = (i + 1) & mask;
    slots_[i] = tag(entry.low, entry.high) | (row + 1);
}

void Shard::match(const uint8_t* digests, const std::vector<uint32_t>& rows, uint64_t first,
                  uint64_t* numbers) {
    // The next batch's slots are on their way while this one is looked up.
    Batch batches[2];
    const uint64_t count = rows.size();
    fetch(digests, rows.data(), count, batches[0]);
    for (uint64_t at = 0; at < count; at += kBatch) {
        const Batch& batch = batches[at / kBatch % 2];
        make_room(batch.count);
        fetch_entries(batch);
        const uint64_t next = at + batch.count;
        fetch(digests, rows.data() + next, count - next, batches[(at / kBatch + 1) % 2]);
        for (unsigned i = 0; i < batch.count; i++)
            numbers[at + i] =
                entries_[find_or_add(batch.low[i], batch.high[i], first + rows[at + i])].number;
    }
}

Catalogue::Catalogue(uint64_t expected) {
    const unsigned shards = shards_for(expected);
    for (unsigned i = 0; i < shards; i++)
        shards_.emplace_back(expected / shards);
}

void Catalogue::match(const uint8_t* digests, uint64_t count, uint64_t first, uint64_t* numbers) {
    if (first > UINT64_MAX - count)
        throw MoverFailure(FGG_ARGUMENT, "numbers beyond 64 bits");
    struct Bucket {
        std::vector<uint32_t> rows; // in their part
        std::vector<uint64_t> numbers;
    };
    const unsigned shards = static_cast<unsigned>(shards_.size());
    // A part has rows of 32 bits.
    const uint64_t least = count / UINT32_MAX + 1;
    const unsigned parts =
        static_cast<unsigned>(std::max<uint64_t>(count < kFewDigests ? 1 : shards, least));
    const uint64_t size = (count + parts - 1) / parts;
    const auto begin = [&](unsigned part) { return std::min(count, part * size); };
    const auto digest = [&](uint64_t row) { return digests + row * FGG_DIGEST_BYTES; };
    std::vector<std::vector<Bucket>> buckets(parts, std::vector<Bucket>(shards));
    run_guarded(parts, [&](unsigned part) {
        for (uint64_t row = begin(part); row < begin(part + 1); row++)
            buckets[part][shard_of(digest(row), shards)].rows.push_back(
                static_cast<uint32_t>(row - begin(part)));
    });
    // Parts in order, because the first of equal digests gives the number.
    const auto look_up = [&](unsigned shard) {
        for (unsigned part = 0; part < parts; part++) {
            Bucket& bucket = buckets[part][shard];
            bucket.numbers.resize(bucket.rows.size());
            shards_[shard].match(digest(begin(part)), bucket.rows, first + begin(part),
                                 bucket.numbers.data());
        }
    };
    if (parts == 1)
        for (unsigned shard = 0; shard < shards; shard++)
            look_up(shard);
    else
        run_guarded(shards, look_up);
    run_guarded(parts, [&](unsigned part) {
        for (const Bucket& bucket : buckets[part])
            for (uint64_t i = 0; i < bucket.rows.size(); i++)
                numbers[begin(part) + bucket.rows[i]] = bucket.numbers[i];
    });
}

} // namespace fgg
