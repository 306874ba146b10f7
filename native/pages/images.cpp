#include "images.h"

#include "encode.h"

#include <fcntl.h>
#include <unistd.h>

namespace pages {
namespace {

constexpr size_t kMagicBytes = 8; // two magic numbers, before the messages of a file

// A protobuf message: `next` goes from field to field, in the order of the bytes.
class Message {
  public:
    Message(const char* at, const char* end, const std::string& file)
        : at_(at), end_(end), file_(&file) {}

    bool next() {
        if (at_ == end_)
            return false;
        begin_ = at_;
        const uint64_t key = varint();
        number_ = key >> 3, kind_ = key & 7;
        if (kind_ == kVarint)
            value_ = varint();
        else if (kind_ == kBytes)
            value_ = varint();
        else if (kind_ == kFixed64 || kind_ == kFixed32)
            value_ = kind_ == kFixed64 ? 8 : 4;
        else
            throw wrong();
        if (kind_ != kVarint) {
            if (value_ > static_cast<uint64_t>(end_ - at_))
                throw wrong();
            at_ += value_;
        }
        return true;
    }

    uint64_t number() const { return number_; }

    uint64_t value() const {
        if (kind_ != kVarint)
            throw wrong();
        return value_;
    }

    // The whole field.
    std::string bytes() const { return std::string(begin_, at_); }

    Message message() const {
        if (kind_ != kBytes)
            throw wrong();
        return Message(at_ - value_, at_, *file_);
    }

  private:
    static constexpr uint64_t kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5;

    PagesFailure wrong() const { return PagesFailure(*file_ + ": not a CRIU image"); }

    uint64_t varint() {
        uint64_t value = 0;
        for (unsigned shift = 0; shift < 64 && at_ != end_; shift += 7) {
            const unsigned char byte = static_cast<unsigned char>(*at_++);
            value |= static_cast<uint64_t>(byte & 0x7f) << shift;
            if (byte < 0x80)
                return value;
        }
        throw wrong();
    }

    const char *at_, *end_, *begin_ = at_;
    const std::string* file_;
    uint64_t number_ = 0, kind_ = 0, value_ = 0;
};

class ImageFile {
  public:
    explicit ImageFile(const std::string& path) : path_(path) {
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        ssize_t count = fd < 0 ? -1 : 0;
        char part[64 << 10];
        while (fd >= 0 && (count = read(fd, part, sizeof part)) > 0)
            data_.append(part, static_cast<size_t>(count));
        const int error = errno;
        if (fd >= 0)
            close(fd);
        if (count < 0)
            throw system_failure("cannot read " + path, error);
        if (data_.size() <= kMagicBytes)
            throw PagesFailure(path + ": it ends within a message");
    }
    ImageFile(const ImageFile&) = delete;
    ImageFile& operator=(const ImageFile&) = delete;

    bool ended() const { return at_ == data_.size(); }
    std::string magic() const { return data_.substr(0, kMagicBytes); }

    Message next() {
        uint32_t bytes;
        if (data_.size() - at_ < sizeof bytes)
            throw PagesFailure(path_ + ": it ends within a message");
        memcpy(&bytes, data_.data() + at_, sizeof bytes);
        at_ += sizeof bytes;
        if (data_.size() - at_ < bytes)
            throw PagesFailure(path_ + ": it ends within a message");
        const char* begin = data_.data() + at_;
        at_ += bytes;
        return Message(begin, begin + bytes, path_);
    }

  private:
    std::string path_, data_;
    size_t at_ = kMagicBytes;
};

// Reads the fields of a message that are integers: pairs of number and where it goes.
void read_integers(Message message, std::initializer_list<std::pair<uint64_t, uint64_t*>> wanted) {
    while (message.next())
        for (const auto& [number, value] : wanted)
            if (message.number() == number)
                *value = message.value();
}

Vma read_vma(Message message) {
    Vma vma;
    read_integers(
        message,
        {{1, &vma.start}, {2, &vma.end}, {5, &vma.prot}, {6, &vma.flags}, {7, &vma.status}});
    return vma;
}

// thread_info_x86
void read_cpu(Message cpu, Thread& thread) {
    uint64_t clear_tid = 0, fs_base = 0, gs_base = 0;
    while (cpu.next()) {
        if (cpu.number() == 1)
            clear_tid = cpu.value();
        if (cpu.number() == 2)
            read_integers(cpu.message(), {{20, &thread.stack}, {22, &fs_base}, {23, &gs_base}});
    }
    thread.pointers.insert(thread.pointers.end(), {clear_tid, fs_base, gs_base});
}

// thread_core_entry
void read_own(Message own, Thread& thread) {
    uint64_t robust = 0, rseq = 0, rseq_section = 0, start = 0, bytes = 0;
    while (own.next()) {
        if (own.number() == 1)
            robust = own.value();
        if (own.number() == 7)
            read_integers(own.message(), {{1, &start}, {2, &bytes}});
        if (own.number() == 15)
            read_integers(own.message(), {{1, &rseq}, {4, &rseq_section}});
    }
    thread.signal_stack = {start, start + bytes};
    thread.pointers.insert(thread.pointers.end(), {robust, rseq, rseq_section});
}

} // namespace

std::vector<Process> read_tree(const std::string& path) {
    std::vector<Process> found;
    for (ImageFile file(path); !file.ended();) {
        Process process;
        for (Message entry = file.next(); entry.next();) {
            if (entry.number() == 1)
                process.pid = entry.value();
            if (entry.number() == 2)
                process.parent = entry.value();
            if (entry.number() == 5)
                process.threads.push_back(entry.value());
        }
        found.push_back(std::move(process));
    }
    return found;
}

Memory read_memory(const std::string& path) {
    ImageFile file(path);
    Memory memory;
    for (Message entry = file.next(); entry.next();) {
        if (entry.number() == 12)
            memory.program = entry.value();
        if (entry.number() == 14) {
            memory.vmas.push_back(read_vma(entry.message()));
            memory.vmas.back().entry = memory.vmas.size() - 1;
        }
    }
    return memory;
}

Thread read_thread(const std::string& path) {
    ImageFile file(path);
    Thread thread;
    bool cpu = false, own = false;
    for (Message entry = file.next(); entry.next();) {
        if (entry.number() == 2) {
            read_cpu(entry.message(), thread);
            cpu = true;
        }
        if (entry.number() == 5) {
            read_own(entry.message(), thread);
            own = true;
        }
    }
    if (!cpu || !own)
        throw PagesFailure(path + ": a thread without registers");
    return thread;
}

Pagemap read_pagemap(const std::string& path) {
    ImageFile file(path);
    Pagemap pagemap;
    read_integers(file.next(), {{1, &pagemap.pages}});
    while (!file.ended()) {
        PagemapEntry entry;
        read_integers(
            file.next(),
            {{1, &entry.address}, {3, &entry.in_parent}, {4, &entry.flags}, {5, &entry.count}});
        pagemap.entries.push_back(entry);
    }
    return pagemap;
}

void write_memory(const std::string& source, const std::string& target,
                  const std::vector<Vma>& vmas) {
    ImageFile file(source);
    std::string out;
    size_t number = 0;
    auto vma = vmas.begin();
    for (Message entry = file.next(); entry.next();) {
        if (entry.number() != 14) {
            out += entry.bytes();
            continue;
        }
        for (; vma != vmas.end() && vma->entry == number; vma++) {
            std::string part;
            put_field(part, 1, vma->start);
            put_field(part, 2, vma->end);
            put_field(part, 7, vma->status);
            for (Message field = entry.message(); field.next();)
                if (field.number() != 1 && field.number() != 2 && field.number() != 7)
                    part += field.bytes();
            put_field(out, 14, part);
        }
        number++;
    }
    std::string whole = file.magic();
    put_message(whole, out);
    write_file(target, whole);
}

} // namespace pages
