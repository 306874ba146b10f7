// The emulated machine: its devices and their memory. Memory is a memfd; what is exported is that
// memfd itself, so it lives as long as anyone holds it, whoever made it.
#pragma once

#include "client_header.h"
#include "transport.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace flowgpu::emu {

struct Config {
    std::string socket;
    int devices = 1;
    uint64_t memory = 8ull << 30;
    uint64_t context_memory = 64ull << 20; // of the device, for each context
    std::string name = "FlowGPU emulated GPU";
    uint32_t architecture = 80; // compute capability: 80 is 8.0
    int idle_seconds = 30;
    int kernel_delay_us = 0; // before every kernel
    int copy_delay_us = 0;   // before every copy or memset that a stream carries out
    std::string log;
    std::string write_log; // one JSON line a launch: the exact ranges that it wrote
    bool peers = true;     // devices reach each other's memory
    bool background = false;
};

// Counts what is alive of a client's: one holder each.
using Owner = std::shared_ptr<void>;

struct Device {
    int index = 0;
    uint64_t total = 0;
    std::atomic<uint64_t> used{0};
    std::atomic<uint64_t> managed{0}; // bytes of managed memory: what is allocated drives them out

    uint64_t left() const { return total - used.load(); }
    uint64_t free() const { return left() - std::min(left(), managed.load()); }
    bool take(uint64_t bytes) {
        uint64_t now = used.load();
        while (bytes <= total - now) {
            if (used.compare_exchange_weak(now, now + bytes)) {
                return true;
            }
        }
        return false;
    }
};

// Physical memory of one device. The descriptor and the mapping are the daemon's own.
class Phys {
  public:
    Phys(UniqueFd fd, uint8_t* host, uint64_t size, Device* device, Owner owner,
         bool managed = false)
        : fd_(std::move(fd)), host_(host), size_(size), device_(device), owner_(std::move(owner)),
          managed_(managed) {}
    ~Phys();
    Phys(const Phys&) = delete;
    Phys& operator=(const Phys&) = delete;

    uint8_t* host() const { return host_; }
    uint64_t size() const { return size_; }
    Device* device() const { return device_; }
    int fd() const { return fd_.get(); }
    // A descriptor for another process; an open file of its own, so that it can be told apart.
    UniqueFd export_fd();
    bool exported() const { return exported_; }
    // True while a descriptor or mapping of this memory exists outside the daemon.
    bool held_elsewhere() const;

  private:
    UniqueFd fd_;
    uint8_t* host_;
    uint64_t size_;
    Device* device_;
    bool exported_ = false;
    Owner owner_;  // none once others may hold it
    bool managed_; // takes no memory of the device's by being there
};

class Machine {
  public:
    explicit Machine(Config config);
    const Config& config() const { return config_; }
    int device_count() const { return static_cast<int>(devices_.size()); }
    Device* device(int index) {
        return index >= 0 && index < device_count() ? devices_[static_cast<size_t>(index)].get()
                                                    : nullptr;
    }
    // True if kernels of `device` may use memory of `other`.
    bool reaches(const Device& device, const Device& other) const {
        return &device == &other || config_.peers;
    }
    CUuuid uuid(int index) const;
    // The devices that CUDA_VISIBLE_DEVICES of this value leaves, in its order; of none, all.
    std::vector<int> visible(const char* wanted) const;
    std::shared_ptr<Phys> create(Device* device, uint64_t size, Owner owner);
    // A part of a file that the program maps as well, at the address that is its offset.
    static std::shared_ptr<Phys> create_managed(int file, uint64_t address, uint64_t size,
                                                Device* device, Owner owner);
    static UniqueFd make_managed_file();
    // Adopts exported memory, known to this daemon or left by an earlier one.
    std::shared_ptr<Phys> import(int fd, CUresult* error);
    // Called when memory is short: waits until the memory of processes that have ended is free, or
    // have let go of the device is free, as with a driver in the kernel, which frees it at once.
    std::function<void()> settle;
    // Addresses for the functions of a module, at which no memory is, and which no other has had.
    uint64_t take_code(uint64_t bytes) { return code_.fetch_add(bytes); }
    // Device memory without contents, such as a context's; false when there is too little left.
    bool take(Device* device, uint64_t bytes);
    // True if the device has this much left. Another process may take it before the caller does.
    bool has_free(const Device& device, uint64_t bytes);
    // Frees memory whose last outside holder is gone; true if some is still held.
    bool reap();
    int device_page() const { return device_page_.get(); }
    void log(const std::string& line);
    void log_writes(const std::string& line);
    void count_unsupported(const std::string& name);

  private:
    using Key = std::pair<uint64_t, uint64_t>;
    std::shared_ptr<Phys> adopt(Phys* phys);
    void dropped(Phys* phys);
    int named(const std::string& word) const;
    bool are_parts() const;

    Config config_;
    std::vector<std::unique_ptr<Device>> devices_;
    UniqueFd device_page_;
    std::atomic<uint64_t> code_;
    std::mutex mutex_;
    std::map<Key, std::weak_ptr<Phys>> known_;
    std::list<std::unique_ptr<Phys>> orphans_; // no handle left here, but a descriptor elsewhere
    std::map<std::string, uint64_t> unsupported_;
    std::mutex log_mutex_;
};

} // namespace flowgpu::emu
