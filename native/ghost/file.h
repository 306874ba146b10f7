// A data file of an image: read and write calls with or without the page cache, or a shared
// mapping.
#pragma once

#include "failure.h"

namespace fgg {

class File {
  public:
    // Creates a file that does not exist.
    static File create(const std::string& path, bool direct);
    static File open(const std::string& path, bool direct);
    File(File&& other) noexcept;
    ~File();

    uint64_t size() const;
    void resize(uint64_t bytes);
    // Takes the blocks now, so that a full disk is found early; false where the file system cannot.
    bool reserve(uint64_t offset, uint64_t bytes);
    // From O_DIRECT, host, offset and bytes must be multiples of kAlignment; resize() cuts a padded
    // end off.
    void write(const char* host, uint64_t bytes, uint64_t offset);
    // Reads all bytes, or up to the end of a file that was padded to kAlignment. Throws FGG_SHORT.
    void read(char* host, uint64_t bytes, uint64_t offset);

    // Maps [0, bytes) to write. Once a file.
    void map(uint64_t bytes);
    char* mapping() const { return mapping_; }
    uint64_t mapped() const { return mapping_ ? mapped_ : 0; }
    void unmap();
    // Faults pages of the mapping in; false on a kernel that cannot. Throws FGG_NO_SPACE when the
    // file system is full.
    bool populate(uint64_t offset, uint64_t bytes);
    // Lets go of pages of the mapping. The file keeps what is in them.
    void leave(uint64_t offset, uint64_t bytes);

    bool direct() const { return direct_; }
    const std::string& path() const { return path_; }

    static constexpr uint64_t kAlignment = 4096;

  private:
    File(int fd, const std::string& path, bool direct) : fd_(fd), path_(path), direct_(direct) {}
    bool leave_direct(int error, bool& retried);

    int fd_;
    std::string path_;
    bool direct_;
    char* mapping_ = nullptr;
    uint64_t mapped_ = 0;
};

} // namespace fgg
