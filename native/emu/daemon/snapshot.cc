// A client's whole state as bytes that it keeps itself, and the way back on any device daemon.
// The client is locked and drained: nothing runs. Memory contents do not pass through here but go
// straight between the memory and the client's pages, written parts only.
#include "graph.h"
#include <set>
#include <unistd.h>

namespace flowgpu::emu {

namespace {

constexpr uint32_t kSnapshotVersion = 6;
// What a checkpoint by driver 580 needs free on each device of the process, on an H200 (more than
// 0, no more than this; docs/design/hardware-notes.md).
constexpr uint64_t kCheckpointRoom = 4ull << 20;

struct Extent {
    uint64_t offset, size;
};

// The parts that were ever written; the rest reads as zeros.
std::vector<Extent> written_parts(const Phys& phys) {
    std::vector<Extent> out;
    const auto end = static_cast<off_t>(phys.size());
    off_t at = 0;
    while (at < end) {
        const off_t data = ::lseek(phys.fd(), at, SEEK_DATA);
        if (data < 0 || data >= end) {
            break;
        }
        const off_t hole = ::lseek(phys.fd(), data, SEEK_HOLE);
        at = hole < 0 ? end : hole;
        out.push_back({static_cast<uint64_t>(data), static_cast<uint64_t>(at - data)});
    }
    return out;
}

template <class Map> void put_map(Writer& w, const Map& map) {
    w.put(static_cast<uint32_t>(map.size()));
    for (const auto& [key, value] : map) {
        w.put(static_cast<uint64_t>(key));
        w.put(static_cast<uint64_t>(value));
    }
}

template <class Key> void take_map(Reader& r, std::map<Key, uint64_t>* map) {
    for (uint32_t left = r.take<uint32_t>(); left > 0 && r.good(); --left) {
        const auto key = static_cast<Key>(r.take<uint64_t>());
        (*map)[key] = r.take<uint64_t>();
    }
}

void put_names(Writer& w, const std::map<std::string, uint64_t>& names) {
    w.put(static_cast<uint32_t>(names.size()));
    for (const auto& [name, handle] : names) {
        w.put_string(name);
        w.put(handle);
    }
}

void take_names(Reader& r, std::map<std::string, uint64_t>* names) {
    for (uint32_t left = r.take<uint32_t>(); left > 0 && r.good(); --left) {
        const std::string name = r.take_string();
        (*names)[name] = r.take<uint64_t>();
    }
}

class Saver {
  public:
    Saver(Client& client, Writer& writer) : c_(client), w_(writer) {}

    void save() {
        w_.put(kSnapshotVersion);
        w_.put(c_.nonce);
        w_.put(c_.next_handle);
        w_.put(c_.next_id);
        w_.put(static_cast<uint32_t>(c_.machine->device_count()));
        for (int i = 0; i < c_.machine->device_count(); ++i) {
            w_.put(c_.machine->uuid(i));
        }
        w_.put(static_cast<uint32_t>(c_.visible.size()));
        for (const int index : c_.visible) {
            w_.put(int32_t{index});
        }
        w_.put(uint8_t{c_.moved_in_part});
        save_memory();
        save_contexts();
        save_code();
        save_graphs(c_, w_);
        w_.put(static_cast<uint32_t>(c_.host_ranges.size()));
        for (const auto& [begin, range] : c_.host_ranges) {
            w_.put(begin);
            w_.put(range.size);
            w_.put(range.flags);
            w_.put(uint8_t{range.owned});
            w_.put(range.context);
        }
    }

  private:
    uint32_t index_of(const std::shared_ptr<Phys>& phys) {
        const auto [at, fresh] =
            indices_.emplace(phys.get(), static_cast<uint32_t>(c_.snapshot.size()));
        if (fresh) {
            c_.snapshot.push_back(phys);
        }
        return at->second;
    }

    void save_memory() {
        // The table of memory comes first for the reader, but is known last: write the rest aside.
        std::vector<uint8_t> before;
        before.swap(w_.buffer());
        save_objects_of_memory();
        std::vector<uint8_t> objects;
        objects.swap(w_.buffer());
        w_.buffer().swap(before);
        w_.put(static_cast<uint32_t>(c_.snapshot.size()));
        for (const auto& phys : c_.snapshot) {
            w_.put(phys->device()->index);
            w_.put(phys->size());
            const auto parts = written_parts(*phys);
            w_.put(static_cast<uint32_t>(parts.size()));
            w_.put_bytes(parts.data(), parts.size() * sizeof(Extent));
        }
        w_.put_bytes(objects.data(), objects.size());
    }

    void save_objects_of_memory() {
        put_map(w_, c_.space.reservations);
        put_map(w_, c_.space.internal_all);
        put_map(w_, c_.space.internal_free);
        const auto handles = c_.every<MemHandle>();
        w_.put(static_cast<uint32_t>(handles.size()));
        for (const auto& handle : handles) {
            w_.put(handle->handle);
            w_.put(index_of(handle->phys));
            w_.put(handle->handle_types);
            w_.put(handle->rdma);
            w_.put(handle->references);
        }
        w_.put(static_cast<uint32_t>(c_.chunks.size()));
        for (const auto& [begin, chunk] : c_.chunks) {
            w_.put(begin);
            w_.put(index_of(chunk.phys));
            w_.put(chunk.context);
            put_map(w_, chunk.used);
        }
        w_.put(static_cast<uint32_t>(c_.space.maps.size()));
        for (const auto& [begin, map] : c_.space.maps) {
            w_.put(map.begin);
            w_.put(map.end);
            w_.put(index_of(map.phys));
            w_.put(map.offset);
            w_.put(map.readers);
            w_.put(map.writers);
            w_.put(map.kind);
            w_.put(map.context);
            w_.put(map.handle);
            w_.put(map.id);
            w_.put(map.pool);
        }
        const auto pools = c_.every<Pool>();
        w_.put(static_cast<uint32_t>(pools.size()));
        for (const auto& pool : pools) {
            w_.put(pool->handle);
            w_.put(pool->device);
            put_map(w_, pool->attributes);
            w_.put(pool->readers);
            w_.put(pool->writers);
        }
        put_map(w_, c_.default_pools);
        put_map(w_, c_.current_pools);
        save_arrays(c_, w_, [this](const std::shared_ptr<Phys>& phys) { return index_of(phys); });
    }

    void save_contexts() {
        w_.put(static_cast<uint32_t>(c_.primaries.size()));
        for (const auto& [device, primary] : c_.primaries) {
            w_.put(device);
            w_.put(primary);
        }
        w_.put(static_cast<uint32_t>(c_.contexts.size()));
        for (const auto& [handle, context] : c_.contexts) {
            w_.put(handle);
            w_.put(context->device->index);
            w_.put(context->flags);
            w_.put(context->id);
            w_.put(uint8_t{context->primary});
            w_.put(context->cache_config);
            w_.put(context->sticky.load());
            put_map(w_, context->limits);
            std::map<uint64_t, uint64_t> peers;
            for (const uint64_t peer : context->peers) {
                peers[peer] = 1;
            }
            put_map(w_, peers);
            save_bindings(*context, w_);
            w_.put(context->null_stream->id);
            std::map<uint64_t, uint64_t> threads;
            for (const auto& [thread, stream] : context->per_thread) {
                threads[thread] = stream->id;
            }
            put_map(w_, threads);
            w_.put(static_cast<uint32_t>(context->streams.size()));
            for (const auto& [stream_handle, stream] : context->streams) {
                w_.put(stream_handle);
                w_.put(stream->flags);
                w_.put(stream->priority);
                w_.put(stream->id);
                w_.put(static_cast<uint32_t>(stream->attributes.size()));
                for (const auto& [attribute, value] : stream->attributes) {
                    w_.put(attribute);
                    w_.put(value);
                }
            }
        }
        const auto events = c_.every<Event>();
        w_.put(static_cast<uint32_t>(events.size()));
        for (const auto& event : events) {
            w_.put(event->handle);
            w_.put(event->context->handle);
            w_.put(event->flags);
            w_.put(uint8_t{event->recorded});
            w_.put(event->stamp == nullptr ? int64_t{0} : event->stamp->nanoseconds.load());
            w_.put(uint8_t{event->captured});
        }
    }

    void save_code() {
        const auto libraries = c_.every<Library>();
        w_.put(static_cast<uint32_t>(libraries.size()));
        for (const auto& library : libraries) {
            w_.put(library->handle);
            w_.put_string(library->image->bytes);
            put_map(w_, library->modules);
            put_names(w_, library->kernels);
        }
        const auto modules = c_.every<Module>();
        w_.put(static_cast<uint32_t>(modules.size()));
        for (const auto& module : modules) {
            w_.put(module->handle);
            w_.put(module->context->handle);
            w_.put(module->library);
            w_.put_string(module->image->bytes);
            w_.put(static_cast<uint32_t>(module->variables.size()));
            w_.put_bytes(module->variables.data(), module->variables.size() * sizeof(uint64_t));
            w_.put(module->code);
            put_names(w_, module->functions);
        }
        const auto functions = c_.every<Function>();
        w_.put(static_cast<uint32_t>(functions.size()));
        for (const auto& function : functions) {
            w_.put(function->handle);
            w_.put(function->module->handle);
            w_.put_string(function->code->name);
            w_.put(function->max_dynamic_shared);
            w_.put(function->carveout);
            w_.put(uint8_t{function->loaded});
        }
        const auto kernels = c_.every<Kernel>();
        w_.put(static_cast<uint32_t>(kernels.size()));
        for (const auto& kernel : kernels) {
            w_.put(kernel->handle);
            w_.put(kernel->library->handle);
            w_.put_string(kernel->name);
            w_.put(kernel->max_dynamic_shared);
            w_.put(kernel->carveout);
        }
    }

    Client& c_;
    Writer& w_;
    std::map<const Phys*, uint32_t> indices_;
};

class Loader {
  public:
    Loader(Client& client, Reader reader, const std::map<std::string, std::string>& pairs)
        : c_(client), r_(reader), pairs_(pairs) {}

    CUresult load(const std::vector<uint64_t>& pages) {
        if (r_.take<uint32_t>() != kSnapshotVersion) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        c_.nonce = r_.take<uint64_t>();
        c_.next_handle = r_.take<uint64_t>();
        c_.next_id = r_.take<uint64_t>();
        if (const CUresult r = load_devices(); r != CUDA_SUCCESS) {
            return r;
        }
        if (const CUresult r = load_memory(pages); r != CUDA_SUCCESS) {
            return r;
        }
        load_objects_of_memory();
        if (const CUresult r = load_contexts(); r != CUDA_SUCCESS) {
            return r;
        }
        if (const CUresult r = load_code(); r != CUDA_SUCCESS) {
            return r;
        }
        load_graphs(c_, r_);
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            const auto begin = r_.take<uint64_t>();
            HostRange& range = c_.host_ranges[begin];
            range.size = r_.take<uint64_t>();
            range.flags = r_.take<uint32_t>();
            range.owned = r_.take<uint8_t>() != 0;
            range.context = r_.take<uint64_t>();
            if (r_.good() && !can_be_pinned(c_.pid, begin, range)) {
                return CUDA_ERROR_INVALID_VALUE;
            }
        }
        return r_.good() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }

  private:
    // Devices are found again by UUID, after the pairs that the caller of the restore gave. Where
    // one becomes another that the process had before, all of those have to be in pairs.
    CUresult load_devices() {
        std::set<std::string> given;
        for (const auto& [before, now] : pairs_) {
            if (!given.insert(now).second) {
                return CUDA_ERROR_INVALID_VALUE; // two devices would be one
            }
        }
        const auto count = r_.take<uint32_t>();
        bool moved = false, all = true;
        for (uint32_t i = 0; i < count && r_.good(); ++i) {
            const auto uuid = r_.take<CUuuid>();
            std::string name(uuid.bytes, sizeof uuid.bytes);
            const auto pair = pairs_.find(name);
            const bool stays = pair != pairs_.end() && pair->second == name;
            all &= pair != pairs_.end();
            moved |= given.count(name) != 0 && !stays; // one becomes this one
            name = pair == pairs_.end() ? name : pair->second;
            int found = -1;
            for (int d = 0; d < c_.machine->device_count(); ++d) {
                const CUuuid own = c_.machine->uuid(d);
                found = name == std::string(own.bytes, sizeof own.bytes) ? d : found;
            }
            devices_.push_back(found);
        }
        if (moved && !all) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        // The process knows its devices by the same ordinals as before, wherever they are now.
        c_.visible.clear();
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            c_.visible.push_back(device_index(r_.take<int32_t>()));
        }
        const bool in_part = c_.visible.size() < static_cast<size_t>(c_.machine->device_count());
        c_.moved_in_part = r_.take<uint8_t>() != 0 || (moved && in_part);
        return CUDA_SUCCESS;
    }

    int device_index(int32_t saved) const {
        return saved >= 0 && static_cast<size_t>(saved) < devices_.size()
                   ? devices_[static_cast<size_t>(saved)]
                   : -1;
    }

    uint32_t device_bits(uint32_t saved) const {
        uint32_t bits = 0;
        for (size_t i = 0; i < devices_.size(); ++i) {
            bits |= (saved >> i & 1) != 0 && devices_[i] >= 0 ? 1u << devices_[i] : 0;
        }
        return bits;
    }

    CUresult load_memory(const std::vector<uint64_t>& pages) {
        const auto count = r_.take<uint32_t>();
        if (count != pages.size()) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        for (uint32_t i = 0; i < count && r_.good(); ++i) {
            Device* device = c_.machine->device(device_index(r_.take<int32_t>()));
            const auto size = r_.take<uint64_t>();
            auto phys = device == nullptr ? nullptr : c_.machine->create(device, size, c_.owner);
            if (phys == nullptr) {
                return device == nullptr ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_OUT_OF_MEMORY;
            }
            for (uint32_t parts = r_.take<uint32_t>(); parts > 0; --parts) {
                const auto part = r_.take<Extent>();
                if (part.offset + part.size > size ||
                    !read_client(c_.pid, pages[i] + part.offset, phys->host() + part.offset,
                                 part.size)) {
                    return CUDA_ERROR_INVALID_VALUE;
                }
            }
            memory_.push_back(std::move(phys));
        }
        return CUDA_SUCCESS;
    }

    std::shared_ptr<Phys> take_phys() {
        const auto index = r_.take<uint32_t>();
        return index < memory_.size() ? memory_[index] : nullptr;
    }

    template <class T> std::shared_ptr<T> make(uint64_t handle) {
        auto object = std::make_shared<T>(handle);
        c_.objects[handle] = object;
        return object;
    }

    void load_objects_of_memory() {
        take_map(r_, &c_.space.reservations);
        take_map(r_, &c_.space.internal_all);
        take_map(r_, &c_.space.internal_free);
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            auto handle = make<MemHandle>(r_.take<uint64_t>());
            handle->phys = take_phys();
            handle->handle_types = r_.take<uint32_t>();
            handle->rdma = r_.take<uint8_t>();
            handle->references = r_.take<uint32_t>();
        }
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            Chunk& chunk = c_.chunks[r_.take<uint64_t>()];
            chunk.phys = take_phys();
            chunk.context = r_.take<uint64_t>();
            take_map(r_, &chunk.used);
        }
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            Mapping map;
            map.begin = r_.take<uint64_t>();
            map.end = r_.take<uint64_t>();
            map.phys = take_phys();
            map.offset = r_.take<uint64_t>();
            map.readers = device_bits(r_.take<uint32_t>());
            map.writers = device_bits(r_.take<uint32_t>());
            map.kind = r_.take<MapKind>();
            map.context = r_.take<uint64_t>();
            map.handle = r_.take<uint64_t>();
            map.id = r_.take<uint64_t>();
            map.pool = r_.take<uint64_t>();
            if (map.phys != nullptr) {
                if (const auto handle = c_.find<MemHandle>(map.handle)) {
                    ++handle->mappings;
                }
                c_.space.map(std::move(map));
            }
        }
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            auto pool = make<Pool>(r_.take<uint64_t>());
            pool->device = device_index(r_.take<int32_t>());
            take_map(r_, &pool->attributes);
            pool->readers = device_bits(r_.take<uint32_t>());
            pool->writers = device_bits(r_.take<uint32_t>());
        }
        for (auto* pools : {&c_.default_pools, &c_.current_pools}) {
            std::map<int, uint64_t> saved;
            take_map(r_, &saved);
            for (const auto& [device, pool] : saved) {
                (*pools)[device_index(device)] = pool;
            }
        }
        load_arrays(c_, r_, [this] { return take_phys(); });
    }

    std::shared_ptr<Stream> make_stream(const std::shared_ptr<Context>& context, uint64_t handle) {
        auto stream = c_.make_own<Stream>(handle);
        stream->context = context;
        return stream;
    }

    CUresult load_contexts() {
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            const int device = device_index(r_.take<int32_t>());
            c_.primaries[device] = r_.take<Primary>();
        }
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            auto context = make<Context>(r_.take<uint64_t>());
            Device* device = c_.machine->device(device_index(r_.take<int32_t>()));
            if (device == nullptr || !c_.take_context_memory(*context, device)) {
                c_.objects.erase(context->handle);
                return device == nullptr ? CUDA_ERROR_INVALID_DEVICE : CUDA_ERROR_OUT_OF_MEMORY;
            }
            c_.contexts[context->handle] = context;
            load_context(context);
        }
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            auto event = make<Event>(r_.take<uint64_t>());
            event->context = c_.find<Context>(r_.take<uint64_t>());
            event->flags = r_.take<uint32_t>();
            event->recorded = r_.take<uint8_t>() != 0;
            event->stamp = std::make_shared<EventStamp>();
            event->stamp->nanoseconds = r_.take<int64_t>();
            event->captured = r_.take<uint8_t>() != 0;
            if (event->context == nullptr) {
                return CUDA_ERROR_INVALID_VALUE;
            }
        }
        return CUDA_SUCCESS;
    }

    void load_context(const std::shared_ptr<Context>& context) {
        context->flags = r_.take<uint32_t>();
        context->id = r_.take<uint64_t>();
        context->primary = r_.take<uint8_t>() != 0;
        context->cache_config = r_.take<int32_t>();
        context->sticky = r_.take<int>();
        take_map(r_, &context->limits);
        std::map<uint64_t, uint64_t> peers;
        take_map(r_, &peers);
        for (const auto& [peer, one] : peers) {
            context->peers.insert(peer);
        }
        load_bindings(*context, r_);
        context->null_stream = make_stream(context, 1);
        context->null_stream->id = r_.take<uint64_t>();
        std::map<uint64_t, uint64_t> threads;
        take_map(r_, &threads);
        for (const auto& [thread, id] : threads) {
            context->per_thread[thread] = make_stream(context, 2);
            context->per_thread[thread]->id = id;
        }
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            auto stream = make_stream(context, r_.take<uint64_t>());
            stream->flags = r_.take<uint32_t>();
            stream->priority = r_.take<int32_t>();
            stream->id = r_.take<uint64_t>();
            for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
                const auto attribute = r_.take<int32_t>();
                stream->attributes[attribute] = r_.take<CUstreamAttrValue>();
            }
            c_.objects[stream->handle] = stream;
            context->streams[stream->handle] = stream;
        }
    }

    CUresult load_code() {
        CUresult error = CUDA_SUCCESS;
        std::string message;
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            auto library = make<Library>(r_.take<uint64_t>());
            library->image = read_image(r_.take_string(), &error, &message);
            take_map(r_, &library->modules);
            take_names(r_, &library->kernels);
            if (library->image == nullptr) {
                return error;
            }
        }
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            auto module = make<Module>(r_.take<uint64_t>());
            module->context = c_.find<Context>(r_.take<uint64_t>());
            module->library = r_.take<uint64_t>();
            const std::string image = r_.take_string();
            module->variables.resize(r_.take<uint32_t>());
            for (uint64_t& address : module->variables) {
                address = r_.take<uint64_t>();
            }
            module->code = r_.take<uint64_t>();
            take_names(r_, &module->functions);
            const auto library = c_.find<Library>(module->library);
            module->image =
                library != nullptr ? library->image : read_image(image, &error, &message);
            if (module->context == nullptr || module->image == nullptr ||
                module->variables.size() != module->image->variables.size()) {
                return CUDA_ERROR_INVALID_VALUE;
            }
            module->kernels_know = module->image->known_to_kernels(module->variables);
        }
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            auto function = make<Function>(r_.take<uint64_t>());
            function->module = c_.find<Module>(r_.take<uint64_t>());
            const std::string name = r_.take_string();
            function->max_dynamic_shared = r_.take<int32_t>();
            function->carveout = r_.take<int32_t>();
            function->loaded = r_.take<uint8_t>() != 0;
            function->code =
                function->module == nullptr ? nullptr : function->module->image->code->find(name);
            if (function->code == nullptr) {
                return CUDA_ERROR_INVALID_VALUE;
            }
        }
        for (uint32_t left = r_.take<uint32_t>(); left > 0 && r_.good(); --left) {
            auto kernel = make<Kernel>(r_.take<uint64_t>());
            kernel->library = c_.find<Library>(r_.take<uint64_t>());
            kernel->name = r_.take_string();
            kernel->max_dynamic_shared = r_.take<int32_t>();
            kernel->carveout = r_.take<int32_t>();
            if (kernel->library == nullptr) {
                return CUDA_ERROR_INVALID_VALUE;
            }
        }
        return CUDA_SUCCESS;
    }

    Client& c_;
    Reader r_;
    const std::map<std::string, std::string>& pairs_;
    std::vector<int> devices_;
    std::vector<std::shared_ptr<Phys>> memory_;
};

} // namespace

int32_t op_Snapshot(Session& s) {
    s.client.snapshot.clear();
    if (!s.client.captures.empty()) {
        s.machine().count_unsupported("a checkpoint in the middle of a capture");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    // Measured: after this the driver answers 999 for good.
    for (const Mapping* map : s.client.space.all()) {
        if (map->kind == MapKind::kManaged) {
            return CUDA_ERROR_NOT_SUPPORTED;
        }
    }
    for (const auto& [handle, context] : s.client.contexts) {
        if (!s.machine().has_free(*context->device, kCheckpointRoom)) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    Writer state;
    Saver(s.client, state).save();
    s.out.put_blob(state.buffer().data(), state.buffer().size());
    s.out.put(static_cast<uint32_t>(s.client.snapshot.size()));
    for (const auto& phys : s.client.snapshot) {
        s.out.put(phys->size());
    }
    return CUDA_SUCCESS;
}

int32_t op_SnapshotCopy(Session& s) {
    const auto index = s.in.take<uint32_t>();
    const auto address = s.in.take<uint64_t>();
    if (index >= s.client.snapshot.size()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const Phys& phys = *s.client.snapshot[index];
    for (const Extent& part : written_parts(phys)) {
        if (!write_client(s.client.pid, address + part.offset, phys.host() + part.offset,
                          part.size)) {
            return CUDA_ERROR_OPERATING_SYSTEM;
        }
    }
    return CUDA_SUCCESS;
}

int32_t op_Detach(Session& s) {
    s.lock.unlock();
    s.client.destroy();
    s.lock.lock();
    return CUDA_SUCCESS;
}

int32_t op_Reinstate(Session& s) {
    std::map<std::string, std::string> pairs;
    for (uint32_t left = s.in.take<uint32_t>(); left > 0 && s.in.good(); --left) {
        const auto pair = s.in.take<CUcheckpointGpuPair>();
        pairs[std::string(pair.oldUuid.bytes, sizeof pair.oldUuid.bytes)] =
            std::string(pair.newUuid.bytes, sizeof pair.newUuid.bytes);
    }
    const std::string_view state = s.in.take_blob();
    std::vector<uint64_t> pages(s.in.take<uint32_t>());
    for (uint64_t& page : pages) {
        page = s.in.take<uint64_t>();
    }
    if (!s.in.good() || !s.client.objects.empty()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    s.fd_out = s.machine().device_page();
    Loader loader(s.client, Reader(reinterpret_cast<const uint8_t*>(state.data()), state.size()),
                  pairs);
    return loader.load(pages);
}

} // namespace flowgpu::emu
