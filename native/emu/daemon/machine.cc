#include "machine.h"

#include "ptx.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <sstream>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

namespace flowgpu::emu {

namespace {

// memfd_create's own file does not count as a writer of its inode, an opened one does: only with
// opened ones a lease can tell whether there is another.
UniqueFd reopen(int fd) {
    return UniqueFd(::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC));
}

// As nvidia-smi prints it.
std::string uuid_text(const CUuuid& uuid, const char* kind) {
    std::string text = kind;
    for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
        char byte[4];
        std::snprintf(byte, sizeof byte, "%02x", static_cast<unsigned char>(uuid.bytes[i]));
        text += i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
        text += byte;
    }
    return text;
}

void append_line(const std::string& path, const std::string& line) {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd >= 0) {
        const std::string whole = line + "\n";
        if (::write(fd, whole.data(), whole.size()) < 0) {
            // A log that cannot be written must not disturb the device.
        }
        ::close(fd);
    }
}

// At random, so that no address means the same on another device. What a checkpoint has brought
// from there keeps its addresses.
uint64_t first_code() {
    uint64_t place = 0;
    if (::getrandom(&place, sizeof place, 0) != sizeof place) {
        place = static_cast<uint64_t>(::getpid()) << 32;
    }
    constexpr uint64_t kPlaces = 1ull << 40;
    return ptx::code_window + place % kPlaces * ptx::function_bytes;
}

} // namespace

Phys::~Phys() {
    ::munmap(host_, size_);
    device_->used -= managed_ ? 0 : size_;
}

UniqueFd Phys::export_fd() {
    exported_ = true;
    owner_.reset();
    return reopen(fd_.get());
}

bool Phys::held_elsewhere() const {
    if (::fcntl(fd_.get(), F_SETLEASE, F_WRLCK) == 0) {
        ::fcntl(fd_.get(), F_SETLEASE, F_UNLCK);
        return false;
    }
    return errno == EAGAIN || errno == EBUSY;
}

Machine::Machine(Config config) : config_(std::move(config)), code_(first_code()) {
    for (int i = 0; i < config_.devices; ++i) {
        auto device = std::make_unique<Device>();
        device->index = i;
        device->total = config_.memory;
        devices_.push_back(std::move(device));
    }
    device_page_.reset(::memfd_create(kDeviceMemfdName, MFD_CLOEXEC));
    if (::ftruncate(device_page_.get(), ::sysconf(_SC_PAGESIZE)) != 0) {
        device_page_.reset(-1);
    }
}

CUuuid Machine::uuid(int index) const {
    char text[sizeof(CUuuid) + 1];
    const unsigned number = static_cast<unsigned>(index) % 1000;
    if (config_.name == Config{}.name) {
        std::snprintf(text, sizeof text, "FlowGPU-emu-%03u", number);
    } else { // a device of another name is another device
        const size_t kind = std::hash<std::string>{}(config_.name) % 1000;
        std::snprintf(text, sizeof text, "FlowGPU-e%03u-%03u", static_cast<unsigned>(kind), number);
    }
    CUuuid uuid{};
    std::memcpy(uuid.bytes, text, std::strlen(text));
    return uuid;
}

// A device of the list; -1 for a word that names none, or more than one.
int Machine::named(const std::string& word) const {
    if (word.rfind("GPU-", 0) != 0 && word.rfind("MIG-", 0) != 0) {
        char* end = nullptr;
        const long index = std::strtol(word.c_str(), &end, 10);
        return end != word.c_str() && index >= 0 && index < device_count() ? static_cast<int>(index)
                                                                           : -1;
    }
    int found = -1;
    for (int i = 0; i < device_count(); ++i) {
        if (uuid_text(uuid(i), are_parts() ? "MIG" : "GPU").rfind(word, 0) == 0) {
            if (found >= 0) {
                return -1;
            }
            found = i;
        }
    }
    return found;
}

// As drivers name parts of a GPU.
bool Machine::are_parts() const {
    return config_.name.find(" MIG ") != std::string::npos;
}

// As the CUDA programming guide has it: indexes or beginnings of UUIDs, up to the first that is
// none. PyTorch's reading of the same list says that a device named twice leaves none at all.
std::vector<int> Machine::visible(const char* wanted) const {
    std::vector<int> found;
    // CUDA shows a process one part of a GPU.
    const size_t most = are_parts() ? 1 : static_cast<size_t>(device_count());
    if (wanted == nullptr) {
        for (int i = 0; found.size() < most; ++i) {
            found.push_back(i);
        }
        return found;
    }
    std::stringstream words(wanted);
    for (std::string word; std::getline(words, word, ',');) {
        word.erase(0, word.find_first_not_of(' '));
        const int index = named(word);
        if (index < 0) {
            break;
        }
        if (std::find(found.begin(), found.end(), index) != found.end()) {
            return {};
        }
        found.push_back(index);
    }
    found.resize(std::min(found.size(), most));
    return found;
}

std::shared_ptr<Phys> Machine::adopt(Phys* phys) {
    struct stat st;
    ::fstat(phys->fd(), &st);
    std::shared_ptr<Phys> owned(phys, [this](Phys* p) { dropped(p); });
    known_[{st.st_dev, st.st_ino}] = owned;
    return owned;
}

void Machine::dropped(Phys* phys) {
    struct stat st;
    ::fstat(phys->fd(), &st);
    std::unique_ptr<Phys> owned(phys);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find({st.st_dev, st.st_ino});
    if (found != known_.end() && found->second.expired()) {
        known_.erase(found);
    }
    if (phys->exported() && phys->held_elsewhere()) {
        orphans_.push_back(std::move(owned));
    }
}

bool Machine::take(Device* device, uint64_t bytes) {
    if (device->take(bytes)) {
        return true;
    }
    settle();
    reap();
    return device->take(bytes);
}

bool Machine::has_free(const Device& device, uint64_t bytes) {
    if (device.left() >= bytes) {
        return true;
    }
    settle();
    reap();
    return device.left() >= bytes;
}

std::shared_ptr<Phys> Machine::create(Device* device, uint64_t size, Owner owner) {
    if (!take(device, size)) {
        return nullptr;
    }
    const std::string name = kMemoryMemfdName + (":" + std::to_string(device->index));
    UniqueFd made(::memfd_create(name.c_str(), MFD_CLOEXEC));
    UniqueFd fd;
    void* host = MAP_FAILED;
    if (made && ::ftruncate(made.get(), static_cast<off_t>(size)) == 0) {
        fd = reopen(made.get());
        host =
            ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
    }
    if (!fd || host == MAP_FAILED) {
        device->used -= size;
        return nullptr;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    return adopt(
        new Phys(std::move(fd), static_cast<uint8_t*>(host), size, device, std::move(owner)));
}

UniqueFd Machine::make_managed_file() {
    UniqueFd file(::memfd_create(kManagedMemfdName, MFD_CLOEXEC));
    return file && ::ftruncate(file.get(), off_t{1} << 47) == 0 ? std::move(file) : UniqueFd();
}

std::shared_ptr<Phys> Machine::create_managed(int file, uint64_t address, uint64_t size,
                                              Device* device, Owner owner) {
    UniqueFd fd = reopen(file);
    void* host = fd ? ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
                             fd.get(), static_cast<off_t>(address))
                    : MAP_FAILED;
    return host == MAP_FAILED ? nullptr
                              : std::make_shared<Phys>(std::move(fd), static_cast<uint8_t*>(host),
                                                       size, device, std::move(owner), true);
}

std::shared_ptr<Phys> Machine::import(int fd, CUresult* error) {
    struct stat st;
    char target[128] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(fd);
    const ssize_t length = ::readlink(link.c_str(), target, sizeof target - 1);
    const std::string prefix = std::string("/memfd:") + kMemoryMemfdName + ":";
    int index = -1;
    *error = CUDA_ERROR_UNKNOWN;
    if (length <= 0 || std::string(target).rfind(prefix, 0) != 0 || ::fstat(fd, &st) != 0 ||
        std::sscanf(target + prefix.size(), "%d", &index) != 1) {
        return nullptr;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find({st.st_dev, st.st_ino});
    if (found != known_.end()) {
        if (auto live = found->second.lock()) {
            *error = CUDA_SUCCESS;
            return live;
        }
    }
    for (auto orphan = orphans_.begin(); orphan != orphans_.end(); ++orphan) {
        struct stat own;
        ::fstat((*orphan)->fd(), &own);
        if (own.st_dev == st.st_dev && own.st_ino == st.st_ino) {
            Phys* phys = orphan->release();
            orphans_.erase(orphan);
            *error = CUDA_SUCCESS;
            return adopt(phys);
        }
    }
    Device* target_device = device(index);
    const auto size = static_cast<uint64_t>(st.st_size);
    if (target_device == nullptr || size == 0 || size % kGranularity != 0) {
        return nullptr;
    }
    if (!target_device->take(size)) {
        *error = CUDA_ERROR_OUT_OF_MEMORY;
        return nullptr;
    }
    UniqueFd own = reopen(fd);
    void* host =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, own.get(), 0);
    if (!own || host == MAP_FAILED) {
        target_device->used -= size;
        *error = CUDA_ERROR_OPERATING_SYSTEM;
        return nullptr;
    }
    auto* phys =
        new Phys(std::move(own), static_cast<uint8_t*>(host), size, target_device, nullptr);
    phys->export_fd();
    *error = CUDA_SUCCESS;
    return adopt(phys);
}

bool Machine::reap() {
    std::lock_guard<std::mutex> lock(mutex_);
    orphans_.remove_if([](const auto& phys) { return !phys->held_elsewhere(); });
    return !orphans_.empty();
}

void Machine::log(const std::string& line) {
    if (!config_.log.empty()) {
        std::lock_guard<std::mutex> lock(log_mutex_);
        append_line(config_.log, line);
    }
}

void Machine::log_writes(const std::string& line) {
    std::lock_guard<std::mutex> lock(log_mutex_);
    append_line(config_.write_log, line);
}

void Machine::count_unsupported(const std::string& name) {
    uint64_t times;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        times = ++unsupported_[name];
    }
    log("unsupported " + name + " call " + std::to_string(times));
}

} // namespace flowgpu::emu
