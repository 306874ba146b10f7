#include "living.h"

#include <map>
#include <mutex>

namespace flowgpu::replay::living {

namespace {

struct Table {
    std::mutex mutex;
    std::map<const void*, unsigned> makers; // by handle
};

Table& table() {
    static auto* one = new Table; // calls come while static objects are destroyed
    return *one;
}

} // namespace

CUresult begun(CUresult result, unsigned symbol, const CUlinkState* place) {
    if (result != CUDA_SUCCESS || !place)
        return result;
    std::lock_guard<std::mutex> lock(table().mutex);
    table().makers[*place] = symbol;
    return result;
}

Ending::Ending(const void* handle) : handle_(handle) {
    std::lock_guard<std::mutex> lock(table().mutex);
    auto found = table().makers.find(handle);
    known_ = found != table().makers.end();
    maker_ = known_ ? found->second : 0;
    if (known_)
        table().makers.erase(found);
}

CUresult Ending::done(CUresult result) {
    if (result != CUDA_SUCCESS && known_) {
        std::lock_guard<std::mutex> lock(table().mutex);
        table().makers.emplace(handle_, maker_);
    }
    return result;
}

void add_names(std::set<std::string>* names) {
    std::lock_guard<std::mutex> lock(table().mutex);
    for (const auto& [handle, maker] : table().makers)
        names->insert(symbol_names[maker]);
}

} // namespace flowgpu::replay::living
