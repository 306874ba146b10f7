#include "still.h"

namespace pages {
namespace {

constexpr uint64_t kPart = 256; // pages

uint64_t pages_of(const std::vector<Entry>& entries) {
    uint64_t pages = 0;
    for (const Entry& entry : entries)
        pages += entry.count;
    return pages;
}

} // namespace

void Still::choose() {
    const std::vector<Own> all = own(pid_);
    for (const Own& one : all)
        if (one.anonymous)
            output_.zeros.push_back(one.range);
    memory_.keep(first_code(pid_));
    auto next = all.begin();
    memory_.each_found([&](const scan::Region& region) {
        uint64_t at = region.start;
        const auto leave = [&](uint64_t end) {
            if (at < end)
                left_.push_back({at, end, region.categories});
            at = std::max(at, end);
        };
        while (next != all.end() && next->range.end <= region.start)
            next++;
        for (auto one = next; one != all.end() && one->range.start < region.end; one++) {
            if (!(region.categories & scan::kPresent))
                break;
            leave(one->range.start);
            const uint64_t end = std::min(region.end, one->range.end);
            chosen_.push_back({at, (end - at) / kPage, kPresent});
            at = end;
        }
        leave(region.end);
    });
}

void Still::inherit(const ProcessMemory& parent, const std::vector<Entry>& theirs) {
    for (const Entry& entry : chosen_)
        within(theirs, entry.address, entry.address + entry.count * kPage,
               [&](uint64_t start, uint64_t end) {
                   each_common(memory_, &parent, start, (end - start) / kPage,
                               [&](uint64_t address, uint64_t count, bool common) {
                                   if (common)
                                       inherited_.push_back({address, count, kInParent});
                               });
               });
}

uint64_t Still::bytes() const {
    return (pages_of(chosen_) - pages_of(inherited_)) * kPage;
}

std::vector<scan::Region> Still::for_criu() const {
    return left_;
}

bool Still::is_chosen(uint64_t address, uint64_t count) const {
    return pages_in(chosen_, address, count) > 0;
}

void Still::begin(std::unique_ptr<PageFile> file) {
    file_ = std::move(file);
    output_.file = file_.get();
}

void Still::hand_over(Copier& copier, const std::atomic<bool>& stops) {
    Feed feed(copier, output_);
    for (const Entry& entry : chosen_)
        without(inherited_, entry.address, entry.address + entry.count * kPage,
                [&](uint64_t start, uint64_t end) {
                    for (uint64_t bytes; start < end && !stops; start += bytes) {
                        bytes = std::min(kPart * kPage, end - start);
                        feed.add(start, bytes / kPage, {&memory_, nullptr, 0});
                    }
                });
    feed.end();
    complete_ = !stops;
}

bool Still::join(const std::vector<Entry>& sent, const std::vector<Entry>& kept,
                 const PageFile& sent_file) {
    uint64_t not_sent = 0;
    for (const Entry& entry : chosen_)
        not_sent += entry.count - pages_in(sent, entry.address, entry.count);
    if (not_sent == 0) {
        output_.entries.clear();
        inherited_.clear();
        file_->restart();
    } else if (not_sent != pages_of(chosen_) || !complete_) {
        throw PagesFailure("CRIU has sent only a part of the pages of process " +
                           std::to_string(pid_));
    }
    insert(kept, sent_file);
    return not_sent > 0;
}

// What lies behind the first page that was sent moves, the last first: few pages, as a rule, since
// CRIU sends little but the kernel's code, which lies high.
void Still::insert(const std::vector<Entry>& kept, const PageFile& sent_file) {
    struct Piece {
        Entry entry;
        bool is_sent;
        uint64_t from, to;
    };
    std::vector<Piece> pieces;
    uint64_t from = 0, to = 0, sent_from = 0;
    const auto add = [&](const Entry& entry, bool is_sent, uint64_t& at) {
        pieces.push_back({entry, is_sent, at, to});
        at += entry.count * kPage, to += entry.count * kPage;
    };
    auto next = kept.begin();
    for (const Entry& entry : output_.entries) {
        for (; next != kept.end() && next->address < entry.address; next++)
            add(*next, true, sent_from);
        add(entry, false, from);
    }
    for (; next != kept.end(); next++)
        add(*next, true, sent_from);
    file_->take(sent_from);
    for (auto piece = pieces.rbegin(); piece != pieces.rend(); piece++)
        if (!piece->is_sent)
            file_->move(piece->from, piece->to, piece->entry.count * kPage);
    std::vector<char> buffer(kPart * kPage);
    output_.entries.clear();
    for (const Piece& piece : pieces) {
        output_.entries.push_back(piece.entry);
        for (uint64_t n = 0; piece.is_sent && n < piece.entry.count; n += kPart) {
            const uint64_t bytes = std::min(kPart, piece.entry.count - n) * kPage;
            sent_file.read(piece.from + n * kPage, buffer.data(), bytes);
            file_->write(piece.to + n * kPage, buffer.data(), bytes);
        }
    }
}

} // namespace pages
