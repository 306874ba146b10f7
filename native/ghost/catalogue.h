// A hash table digest -> number in host memory: small slots by open addressing, which name entries
// that lie in the order of their arrival. Lookups go in batches, whose memory is fetched in
// advance. A large table is made of several, each of some of the digests and with a thread of its
// own: a pause waits for the digests of all GPUs of a job.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fgg {

// Zeroed memory in huge pages, touched in advance.
template <typename T> class Table {
  public:
    explicit Table(uint64_t rows);
    ~Table();
    Table(Table&& other) noexcept;
    Table& operator=(Table&& other) noexcept;
    T& operator[](uint64_t row) const { return rows_[row]; }

  private:
    T* rows_;
    uint64_t bytes_;
};

class Shard {
  public:
    // Room for this many digests is made now, so that matching them takes no page faults.
    explicit Shard(uint64_t expected);
    ~Shard();
    Shard(Shard&&) = default;

    // Looks up the digests in these rows. A new digest gets the number first + row.
    void match(const uint8_t* digests, const std::vector<uint32_t>& rows, uint64_t first,
               uint64_t* numbers);

  private:
    struct Entry {
        uint64_t low, high; // the digest
        uint64_t number;
    };
    // Upper half: part of the digest; lower half: the entry's row plus 1, 0 in a free slot.
    using Slot = uint64_t;
    static constexpr unsigned kBatch = 64;
    struct Batch {
        uint64_t low[kBatch], high[kBatch];
        unsigned count = 0;
    };

    uint64_t home(uint64_t low, uint64_t high) const;
    void fetch(const uint8_t* digests, const uint32_t* rows, uint64_t count, Batch& batch) const;
    void fetch_entries(const Batch& batch) const;
    // Row of the digest's entry, or, after adding it, of a new one with this number.
    uint64_t find_or_add(uint64_t low, uint64_t high, uint64_t number);
    void make_room(uint64_t more);
    void place(uint64_t row);

    unsigned bits_;
    uint64_t used_ = 0;
    Table<Slot> slots_;
    Table<Entry> entries_;
};

class Catalogue {
  public:
    explicit Catalogue(uint64_t expected);

    void match(const uint8_t* digests, uint64_t count, uint64_t first, uint64_t* numbers);

  private:
    std::vector<Shard> shards_; // a power of two
};

} // namespace fgg
