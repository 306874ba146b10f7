#include "server.h"

#include "fault.h"
#include "standing.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <sstream>

namespace pages {
namespace {

using Clock = std::chrono::steady_clock;

enum Command : uint32_t { kOpen = 4, kAdd = 6, kClose = 0x1023, kForceClose = 0x1024 };
constexpr uint32_t kCommandBits = 16; // flags of a page above them
enum Target : uint64_t { kProcess = 1, kSharedMemory = 2 };
constexpr unsigned kTargetBits = 8;

constexpr unsigned kParts =
    4; // of a list of mappings: each is read up to it while the process runs
constexpr unsigned kPieces = 4;             // of a process's pages, for each thread
constexpr uint64_t kMostPages = 1ull << 34; // 64 TiB: more is no message of CRIU
constexpr int kRestMs = 15000;              // the rest of a message that has begun

std::vector<Kin> joined(const std::vector<std::vector<Kin>>& all) {
    std::vector<Kin> found;
    for (const std::vector<Kin>& kin : all)
        found.insert(found.end(), kin.begin(), kin.end());
    return found;
}

bool is_in(const std::vector<pid_t>& pids, pid_t pid) {
    return std::find(pids.begin(), pids.end(), pid) != pids.end();
}

uint64_t target_of(pid_t pid) {
    return static_cast<uint64_t>(pid) << kTargetBits | kProcess;
}

double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

bool runs(pid_t pid) {
    const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
    const size_t name = stat.rfind(')');
    return name != std::string::npos && stat.compare(name, 3, ") Z") != 0;
}

PagesFailure bad_message(const std::string& what) {
    return PagesFailure("CRIU sent " + what + ", which its version 4.2 would not");
}

// CRIU has failed, as a rule, and its own log says why.
Gone not_sent(pid_t pid) {
    return Gone("CRIU has not sent process " + std::to_string(pid));
}

} // namespace

Server::Server(int socket, const std::string& folder, unsigned threads, Telling telling,
               std::map<pid_t, std::unique_ptr<PageFile>> reserved,
               std::map<pid_t, std::unique_ptr<Tracked>> tracked)
    : socket_(socket), folder_(folder), threads_(threads), telling_(telling),
      reserved_(std::move(reserved)), tracked_(std::move(tracked)),
      next_number_(static_cast<uint32_t>(reserved_.size()) + 1),
      copier_(threads, [socket] { shutdown(socket, SHUT_RDWR); }) {}

Server::~Server() {
    copier_.end();
    if (copying_.joinable())
        copying_.join();
}

Totals Server::serve() {
    Clock::time_point began, closing;
    await();
    copy_still();
    try {
        for (bool first = true;; first = false) {
            Header header = receive_header();
            if (first)
                began = Clock::now();
            const uint32_t command = header.command & ((1u << kCommandBits) - 1);
            if (command == kOpen) {
                open(header);
            } else if (command == kAdd) {
                add(header, header.command >> kCommandBits);
            } else if (command == kClose || command == kForceClose) {
                closing = Clock::now();
                close();
                totals_.seconds = seconds_since(began);
                totals_.tail = seconds_since(closing);
                join_tracked();
                break;
            } else {
                throw bad_message("command " + std::to_string(header.command));
            }
        }
    } catch (const PagesFailure&) {
        // A worker's failure ends the connection, and is what we then see here as well.
        std::string first = copier_.failure();
        if (!first.empty())
            throw PagesFailure(first);
        throw;
    }
    return totals_;
}

Server::Header Server::receive_header() {
    Header header;
    ssize_t count;
    do
        count = recv(socket_, &header, sizeof header, 0);
    while (count < 0 && errno == EINTR);
    if (count < 0 && errno != ECONNRESET)
        throw system_failure("cannot hear CRIU", errno);
    if (count <= 0)
        throw Gone("CRIU ended before its last message");
    receive(reinterpret_cast<char*>(&header) + count, sizeof header - static_cast<size_t>(count),
            "half a message");
    return header;
}

void Server::receive(char* to, uint64_t bytes, const char* what) {
    while (bytes) {
        pollfd waiting = {socket_, POLLIN, 0};
        if (poll(&waiting, 1, kRestMs) == 0)
            throw bad_message(what);
        ssize_t count = recv(socket_, to, bytes, MSG_DONTWAIT);
        if (count < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        if (count < 0 && errno != ECONNRESET)
            throw system_failure("cannot hear CRIU", errno);
        if (count <= 0)
            throw Gone("CRIU ended in the middle of a message");
        to += count;
        bytes -= static_cast<uint64_t>(count);
    }
}

void Server::open(const Header& header) {
    flush();
    const uint64_t kind = header.target & ((1u << kTargetBits) - 1);
    const uint64_t id = header.target >> kTargetBits;
    if (kind != kProcess && kind != kSharedMemory)
        throw bad_message("target " + std::to_string(header.target));
    auto [place, is_new] = outputs_.try_emplace(header.target);
    if (!is_new)
        throw bad_message("a second set of pages for target " + std::to_string(header.target));
    const char no_parent = 0;
    answer(&no_parent, sizeof no_parent);
    // CRIU is at work now; what follows costs no time.
    output_ = &place->second;
    target_ = header.target;
    const char* prefix = kind == kProcess ? "/pagemap-" : "/pagemap-shmem-";
    output_->pagemap = folder_ + prefix + std::to_string(id) + ".img";
    const pid_t pid = kind == kProcess ? static_cast<pid_t>(id) : 0;
    open_apart_ = pid ? apart(pid) : nullptr;
    if (pid)
        output_->zeros =
            open_apart_ && open_apart_->still ? open_apart_->still->zeros() : anonymous(pid);
    if (open_apart_) {
        output_->file = &open_apart_->rest;
        return;
    }
    files_.push_back(file_for(pid));
    output_->file = files_.back().get();
}

// Nothing where we have copied no pages.
Server::Apart* Server::apart(pid_t pid) {
    const auto tracked = tracked_.find(pid);
    const auto still = still_.find(pid);
    if (tracked == tracked_.end() && still == still_.end())
        return nullptr;
    return &apart_
                .try_emplace(pid, tracked == tracked_.end() ? nullptr : tracked->second.get(),
                             still == still_.end() ? nullptr : still->second.get(), folder_)
                .first->second;
}

// The one that was prepared, or a new one.
std::unique_ptr<PageFile> Server::file_for(pid_t pid) {
    const auto prepared = reserved_.find(pid);
    if (prepared == reserved_.end())
        return std::make_unique<PageFile>(folder_, next_number_++);
    std::unique_ptr<PageFile> file = std::move(prepared->second);
    reserved_.erase(prepared);
    return file;
}

void Server::copy_still() {
    if (has_begun_copying_)
        return;
    has_begun_copying_ = true;
    for (auto one = still_.begin(); one != still_.end();) {
        if (!runs(one->first)) { // it was killed meanwhile: CRIU stores none of its pages
            one = still_.erase(one);
            continue;
        }
        one->second->begin(file_for(one->first));
        one++;
    }
    std::vector<pid_t> pids = pids_of(still_);
    for (const pid_t pid : pids_of(tracked_))
        pids.push_back(pid);
    kin_ = generations(pids);
    if (still_.empty())
        return;
    by_generation(threads_, kin_, [&](const Kin& kin, unsigned) {
        const auto one = still_.find(kin.pid), parent = still_.find(kin.parent);
        if (one == still_.end() || !kin.parent)
            return;
        if (parent != still_.end())
            one->second->inherit(parent->second->memory(), parent->second->chosen());
        else
            one->second->inherit(tracked_.at(kin.parent)->memory(),
                                 tracked_.at(kin.parent)->present());
    });
    for (const auto& [pid, one] : still_)
        totals_.still_bytes += one->bytes();
    copying_ = std::thread([this] {
        try {
            for (const auto& [pid, one] : still_)
                one->hand_over(copier_, is_copied_for_nothing_);
        } catch (const std::exception& error) {
            copying_failure_ = error.what();
        }
    });
}

// The pages of processes that stand still, with what CRIU has sent of them.
void Server::join_still() {
    for (const Kin& kin : joined(kin_)) {
        const auto next = still_.find(kin.pid);
        if (next == still_.end())
            continue;
        Still* const one = next->second.get();
        const auto found = apart_.find(kin.pid);
        if (found == apart_.end()) {
            if (runs(kin.pid))
                throw not_sent(kin.pid);
            continue;
        }
        const Output& sent = outputs_.at(target_of(kin.pid));
        const uint64_t bytes = one->bytes();
        if (!one->join(found->second.sent, sent.entries, found->second.rest))
            totals_.still_bytes -= bytes;
        files_.push_back(one->take_file());
        if (const auto parent = tracked_.find(kin.parent); parent != tracked_.end())
            for (const Entry& entry : one->inherited())
                if (pages_in(parent->second->stored(), entry.address, entry.count) != entry.count)
                    throw not_stored(kin);
    }
}

void Server::add(const Header& header, uint32_t flags) {
    if (!output_ || header.target != target_)
        throw bad_message("pages for a target that is not open");
    if (!(flags & kPresent) || flags & ~(kPresent | kLazy) || header.pages == 0 ||
        header.pages > kMostPages || header.address % kPage)
        throw bad_message("pages that are not in its message");
    uint64_t address = header.address, left = header.pages;
    if (open_apart_) {
        open_apart_->sent.push_back({address, left, kPresent});
        flags = kPresent; // as those have that we copy, and lie between them
        if (open_apart_->still && open_apart_->still->is_chosen(address, left))
            is_copied_for_nothing_ = true;
    }
    while (left) {
        if (!chunk_) {
            chunk_ = &copier_.next();
            chunk_->output = output_;
        }
        const uint64_t count = std::min(left, (kChunk - chunk_->bytes) / kPage);
        chunk_->entries.push_back({address, count, flags});
        fetch(*chunk_, count * kPage);
        address += count * kPage;
        left -= count;
        if (chunk_->bytes == kChunk)
            flush();
    }
    totals_.bytes += header.pages * kPage;
}

void Server::fetch(Chunk& chunk, uint64_t bytes) {
    // Pages move from CRIU's pipes through the socket into this pipe by reference. What comes after
    // bytes that had to be copied is copied too, so that their order stays.
    while (bytes && pipes_work_ && chunk.piped == chunk.bytes) {
        pollfd waiting = {socket_, POLLIN, 0};
        if (poll(&waiting, 1, kRestMs) == 0)
            throw bad_message("fewer pages than announced");
        ssize_t count = splice(socket_, nullptr, chunk.pipe[1], nullptr, bytes,
                               SPLICE_F_MOVE | SPLICE_F_NONBLOCK);
        if (count < 0 && errno == EINTR)
            continue;
        if (count == 0 || (count < 0 && errno == ECONNRESET))
            throw Gone("CRIU ended in the middle of its pages");
        if (count < 0) {
            if (errno != EINVAL && errno != EAGAIN)
                throw system_failure("cannot hear CRIU", errno);
            pipes_work_ = errno == EAGAIN; // a full pipe; else no such call on this kernel
            break;
        }
        chunk.bytes += static_cast<uint64_t>(count);
        chunk.piped = chunk.bytes;
        bytes -= static_cast<uint64_t>(count);
    }
    receive(chunk.buffer.get() + chunk.bytes, bytes, "fewer pages than announced");
    chunk.bytes += bytes;
    totals_.copied_twice += bytes;
}

void Server::flush() {
    if (chunk_)
        copier_.submit(*chunk_);
    chunk_ = nullptr;
}

void Server::close() {
    flush();
    if (copying_.joinable())
        copying_.join();
    if (!copying_failure_.empty())
        throw PagesFailure(copying_failure_);
    copier_.wait();
    settle_tracked();
    join_still();
    if (tracked_.empty())
        write_lists();
    for (const auto& [target, output] : outputs_)
        if ((target & ((1u << kTargetBits) - 1)) != kProcess ||
            !apart_.count(static_cast<pid_t>(target >> kTargetBits)))
            write(output, output.entries);
    for (auto& file : files_)
        file->finish();
    reserved_.clear(); // of processes that have ended since
    const int32_t success = 0;
    answer(&success, sizeof success);
}

void Server::write(const Output& output, const std::vector<Entry>& entries) {
    write_pagemap(output.pagemap, output.file->number(), entries);
    totals_.entries += entries.size();
}

// Each behind that of its parent. The files of those that were tracked are made as well.
void Server::write_lists() {
    for (const Kin& kin : joined(kin_)) {
        const auto found = apart_.find(kin.pid);
        if (found == apart_.end())
            continue;
        const Apart& one = found->second;
        const Output& rest = outputs_.at(target_of(kin.pid));
        if (one.still) {
            Output output = one.still->output();
            output.pagemap = rest.pagemap;
            write(output, lists_.add(kin, output.entries, one.still->inherited(), output.zeros));
            continue;
        }
        Output output;
        output.pagemap = rest.pagemap;
        output.zeros = rest.zeros;
        files_.push_back(std::make_unique<PageFile>(folder_, next_number_++));
        output.file = files_.back().get();
        one.tracked->hand_over(copier_, output, rest.entries, one.rest);
        copier_.wait();
        write(output, lists_.add(kin, output.entries, one.tracked->inherited(), output.zeros));
        output.file->finish();
    }
}

// The processes are still stopped.
void Server::settle_tracked() {
    take_commands();
    for (const auto& [pid, tracked] : tracked_)
        if (!apart_.count(pid) && runs(pid))
            throw not_sent(pid);
    by_generation(threads_, kin_, [&](const Kin& kin, unsigned threads) {
        const auto found = apart_.find(kin.pid);
        if (found == apart_.end() || !found->second.tracked)
            return;
        const auto devices = devices_.find(kin.pid), none = devices_.end();
        const auto parent = apart_.find(kin.parent);
        found->second.tracked->settle(
            found->second.sent, devices == none ? std::vector<Range>() : devices->second, threads,
            parent == apart_.end() ? nullptr : parent->second.tracked);
    });
    for (const auto& [pid, tracked] : tracked_) {
        totals_.early_bytes += tracked->kept_bytes();
        totals_.compared_bytes += tracked->compared_bytes();
        totals_.mended_bytes += tracked->mended_bytes();
    }
}

// The processes may go on: the files of those that were tracked are made now.
void Server::join_tracked() {
    for (const auto& [pid, tracked] : tracked_)
        tracked->release();
    if (!tracked_.empty())
        write_lists();
    totals_.inherited = lists_.inherited();
    totals_.files = files_.size();
    totals_.bytes += totals_.still_bytes;
    totals_.zero_bytes = copier_.zero_bytes();
}

// Until CRIU's first message.
void Server::await() {
    for (bool commands = true;;) {
        pollfd waiting[] = {{socket_, POLLIN, 0}, {commands ? STDIN_FILENO : -1, POLLIN, 0}};
        if (poll(waiting, 2, -1) < 0 && errno != EINTR)
            throw system_failure("cannot wait for CRIU", errno);
        if (waiting[0].revents)
            return;
        if (waiting[1].revents)
            commands = take_commands();
    }
}

// What standard input has now, a line each. False: it has ended.
bool Server::take_commands() {
    for (;;) {
        pollfd waiting = {STDIN_FILENO, POLLIN, 0};
        char part[4096];
        if (poll(&waiting, 1, 0) <= 0)
            return true;
        const ssize_t count = read(STDIN_FILENO, part, sizeof part);
        if (count <= 0)
            return false;
        commands_.append(part, static_cast<size_t>(count));
        for (size_t end; (end = commands_.find('\n')) != std::string::npos;) {
            obey(commands_.substr(0, end));
            commands_.erase(0, end + 1);
        }
    }
}

void Server::obey(const std::string& command) {
    int pid;
    unsigned long start, end;
    if (sscanf(command.c_str(), "device %d %lx-%lx", &pid, &start, &end) == 3) {
        devices_[pid].push_back({start, end});
        return;
    }
    if (command == "pass") {
        pass();
        return;
    }
    if (command == "copy") {
        copy_still();
        return;
    }
    if (command.compare(0, 5, "look ") != 0)
        throw PagesFailure("no such command: " + command);
    std::vector<pid_t> pids;
    std::istringstream words(command.substr(5));
    for (pid_t one; words >> one;)
        pids.push_back(one);
    if (flowgpu::fires_told(flowgpu::Fault::at_look_dies))
        throw PagesFailure("it fails as it was told to");
    if (flowgpu::fires_told(flowgpu::Fault::at_look_untold)) {
        ::close(telling_.said);
        return;
    }
    look(pids);
    tell(pids);
}

void Server::pass() {
    const auto divide = [&](pid_t pid, const std::function<uint64_t(const Range&)>& count) {
        smaps_.try_emplace(pid, pid).first->second.divide(std::min(threads_, kParts), count);
    };
    for (const auto& [pid, one] : tracked_) {
        const Tracked& tracked = *one;
        divide(pid, [&](const Range& range) { return tracked.copied(range); });
    }
    for (const auto& [pid, file] : reserved_)
        if (ProcessMemory memory(pid); memory.open()) {
            std::vector<Entry> found;
            memory.each_region(kAllMemory, 0, 0, [&](const scan::Region& one) {
                found.push_back({one.start, (one.end - one.start) / kPage, 0});
            });
            divide(pid, [&](const Range& range) {
                return pages_in(found, range.start, (range.end - range.start) / kPage);
            });
        }
    const unsigned long long pages = pass_all(tracked_, threads_);
    printf("passed %llu\n", pages);
    fflush(stdout);
}

// The list of mappings first, since CRIU asks for it first.
void Server::look(const std::vector<pid_t>& pids) {
    std::vector<std::function<void()>> begins, rest;
    for (const pid_t pid : pids) {
        Smaps& smaps = smaps_.try_emplace(pid, pid).first->second;
        if (!smaps.parts())
            smaps.divide(1, [](const Range&) { return 0; });
        for (size_t n = 0; n < smaps.parts(); n++) {
            begins.push_back([&smaps, n] { smaps.begin(n); });
            rest.push_back([&smaps, n] { smaps.end(n); });
        }
    }
    // CRIU would name them to us by those numbers.
    const bool has_others = std::any_of(pids.begin(), pids.end(), has_other_number);
    for (const pid_t pid : pids) {
        const auto tracked = tracked_.find(pid);
        if (tracked == tracked_.end() && has_others)
            continue;
        ProcessMemory& memory =
            tracked != tracked_.end()
                ? tracked->second->memory()
                : still_.try_emplace(pid, std::make_unique<Still>(pid)).first->second->memory();
        const size_t parts = memory.divide(smaps_.at(pid).pieces(kPieces * threads_));
        for (size_t n = 0; n < parts; n++)
            rest.push_back([&memory, n] { memory.look(n); });
    }
    for (const auto* const all : {&begins, &rest})
        in_parallel(threads_, all->size(), [&](size_t n) { (*all)[n](); });
    for (auto one = still_.begin(); one != still_.end();) {
        one->second->choose();
        one = one->second->has_pages() ? std::next(one) : still_.erase(one);
    }
    by_generation(threads_, generations(pids_of(tracked_)), [&](const Kin& kin, unsigned) {
        if (kin.parent && is_in(pids, kin.pid) && is_in(pids, kin.parent))
            tracked_.at(kin.pid)->spare(*tracked_.at(kin.parent));
    });
}

void Server::tell(const std::vector<pid_t>& pids) {
    std::vector<std::string> texts(pids.size());
    in_parallel(threads_, pids.size(), [&](size_t n) { texts[n] = smaps_.at(pids[n]).text(); });
    std::vector<standing::Process> all(pids.size());
    std::string data;
    const uint64_t begin = sizeof(standing::Head) + all.size() * sizeof(standing::Process);
    const auto add = [&](const void* bytes, size_t size) {
        const uint64_t at = begin + data.size();
        data.append(static_cast<const char*>(bytes), size);
        data.append(-data.size() % sizeof(uint64_t), '\0');
        return at;
    };
    for (size_t n = 0; n < all.size(); n++) {
        all[n].pid = static_cast<uint64_t>(pids[n]);
        all[n].smaps = add(texts[n].data(), texts[n].size());
        all[n].smaps_bytes = texts[n].size();
        const auto tracked = tracked_.find(pids[n]);
        const auto still = still_.find(pids[n]);
        if (tracked == tracked_.end() && still == still_.end())
            continue;
        const bool is_tracked = tracked != tracked_.end();
        const std::vector<scan::Region> regions =
            is_tracked ? tracked->second->for_criu() : still->second->for_criu();
        all[n].regions = add(regions.data(), regions.size() * sizeof regions[0]);
        all[n].region_count = regions.size();
        all[n].kinds = (is_tracked ? tracked->second->memory() : still->second->memory()).kinds();
    }
    const standing::Head head = {all.size()};
    std::string file(reinterpret_cast<const char*>(&head), sizeof head);
    file.append(reinterpret_cast<const char*>(all.data()), all.size() * sizeof all[0]);
    file += data;
    // Where this fails, CRIU asks the kernel.
    if (::write(telling_.file, file.data(), file.size()) == static_cast<ssize_t>(file.size()) &&
        ::write(telling_.said, &standing::kIsThere, 1) != 1)
        return;
}

void Server::answer(const void* data, size_t bytes) {
    const ssize_t sent = send(socket_, data, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EPIPE)
        throw Gone("CRIU ended before it was answered");
    if (sent != static_cast<ssize_t>(bytes))
        throw system_failure("cannot answer CRIU", errno);
}

} // namespace pages
