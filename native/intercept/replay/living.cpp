#include "living.h"

#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

namespace flowgpu::replay::living {

namespace {

// The functions that make and end objects of one kind begin alike: cuArrayCreate, cuArray3DCreate,
// cuArrayDestroy. Handles of two kinds may be equal.
using Key = std::pair<std::string_view, uint64_t>;

Key key_of(unsigned symbol, uint64_t handle) {
    const std::string_view name = symbol_names[symbol];
    return {name.substr(0, name.find_first_of("3CD")), handle};
}

struct Table {
    std::mutex mutex;
    std::map<Key, unsigned> makers;
};

Table& table() {
    static auto* one = new Table; // calls come while static objects are destroyed
    return *one;
}

} // namespace

CUresult begun(CUresult result, unsigned symbol, const void* place) {
    uint64_t handle = 0;
    if (result != CUDA_SUCCESS || !place)
        return result;
    memcpy(&handle, place, sizeof handle);
    std::lock_guard<std::mutex> lock(table().mutex);
    table().makers[key_of(symbol, handle)] = symbol;
    return result;
}

Ending::Ending(unsigned symbol, uint64_t handle) : symbol_(symbol), handle_(handle) {
    std::lock_guard<std::mutex> lock(table().mutex);
    auto found = table().makers.find(key_of(symbol, handle));
    known_ = found != table().makers.end();
    maker_ = known_ ? found->second : 0;
    if (known_)
        table().makers.erase(found);
}

CUresult Ending::done(CUresult result) {
    if (result != CUDA_SUCCESS && known_) {
        std::lock_guard<std::mutex> lock(table().mutex);
        table().makers.emplace(key_of(symbol_, handle_), maker_);
    }
    return result;
}

void end_in_contexts() {
    std::lock_guard<std::mutex> lock(table().mutex);
    for (auto it = table().makers.begin(); it != table().makers.end();)
        it = it->first.first == "cuLink" ? std::next(it) : table().makers.erase(it);
}

void add_names(std::set<std::string>* names) {
    std::lock_guard<std::mutex> lock(table().mutex);
    for (const auto& [key, maker] : table().makers)
        names->insert(symbol_names[maker]);
}

} // namespace flowgpu::replay::living
