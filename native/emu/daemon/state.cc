#include "graph.h"

#include <algorithm>
#include <sys/random.h>
#include <sys/socket.h>
#include <thread>
#include <utility>

namespace flowgpu::emu {

// 23 random bits, then a number that only grows: never null, never a small constant, never used
// twice, and of no meaning to another connection. Below 2^60, where the intercept library begins to
// count its own.
constexpr int kNonceShift = 36;

uint64_t Client::new_handle() {
    while (nonce == 0) {
        if (::getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) {
            nonce = id;
        }
        nonce &= (1u << 23) - 1;
    }
    return nonce << kNonceShift | ++next_handle << 4;
}

bool Client::made(uint64_t handle) const {
    const uint64_t number = (handle & ((uint64_t{1} << kNonceShift) - 1)) >> 4;
    return nonce != 0 && handle >> kNonceShift == nonce && number != 0 && number <= next_handle;
}

const HostRange* Client::host_range(uint64_t address, uint64_t size) const {
    const auto next = host_ranges.upper_bound(address);
    if (next == host_ranges.begin()) {
        return nullptr;
    }
    const auto range = std::prev(next);
    return address + size <= range->first + range->second.size ? &range->second : nullptr;
}

std::vector<std::shared_ptr<Stream>> Client::streams_of(const Context& context) const {
    std::vector<std::shared_ptr<Stream>> out{context.null_stream};
    for (const auto& [thread, stream] : context.per_thread) {
        out.push_back(stream);
    }
    for (const auto& [handle, stream] : context.streams) {
        out.push_back(stream);
    }
    out.insert(out.end(), context.ended.begin(), context.ended.end());
    return out;
}

std::shared_ptr<Context> Client::make_primary(Device* device, Primary& primary) {
    auto context = make_context(device, primary.flags, primary.handle);
    if (context != nullptr) {
        context->primary = true;
        primary.handle = primary.context = context->handle;
    }
    return context;
}

std::shared_ptr<Context> Client::make_context(Device* device, uint32_t flags, uint64_t handle) {
    auto context = make<Context>(handle);
    if (!take_context_memory(*context, device)) {
        objects.erase(context->handle);
        return nullptr;
    }
    context->flags = flags;
    context->id = ++next_id;
    context->limits = {{CU_LIMIT_STACK_SIZE, 1024},
                       {CU_LIMIT_PRINTF_FIFO_SIZE, 1 << 20},
                       {CU_LIMIT_MALLOC_HEAP_SIZE, 8 << 20},
                       {CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT, 2048},
                       {CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 64},
                       {CU_LIMIT_PERSISTING_L2_CACHE_SIZE, 0}};
    context->null_stream = make_own<Stream>(1);
    context->null_stream->context = context;
    context->null_stream->id = ++next_id;
    contexts[context->handle] = context;
    return context;
}

bool Client::take_context_memory(Context& context, Device* device) {
    const uint64_t bytes = machine->config().context_memory;
    if (!machine->take(device, bytes)) {
        return false;
    }
    context.device = device;
    context.memory = bytes;
    return true;
}

void Client::destroy_context(const std::shared_ptr<Context>& context) {
    for (const auto& stream : streams_of(*context)) {
        if (const auto capture = stream->capture) {
            end_capture(*this, capture);
        }
    }
    std::vector<uint64_t> dead;
    for (const auto& [handle, object] : objects) {
        const auto* stream = dynamic_cast<Stream*>(object.get());
        const auto* event = dynamic_cast<Event*>(object.get());
        const auto* module = dynamic_cast<Module*>(object.get());
        const auto* function = dynamic_cast<Function*>(object.get());
        const auto* array = dynamic_cast<Array*>(object.get());
        const auto* mipmap = dynamic_cast<Mipmap*>(object.get());
        if ((array != nullptr && array->context == context->handle) ||
            (mipmap != nullptr && mipmap->context == context->handle) ||
            (stream != nullptr && stream->context == context) ||
            (event != nullptr && event->context == context) ||
            (module != nullptr && module->context == context) ||
            (function != nullptr && function->module->context == context)) {
            dead.push_back(handle);
        }
    }
    for (const uint64_t handle : dead) {
        objects.erase(handle);
    }
    for (const auto& library : every<Library>()) {
        library->modules.erase(context->handle);
    }
    for (auto at = host_ranges.begin(); at != host_ranges.end();) {
        at = at->second.context == context->handle ? host_ranges.erase(at) : std::next(at);
    }
    std::vector<uint64_t> memory;
    for (const Mapping* map : space.all()) {
        if (map->kind != MapKind::kVmm && map->context == context->handle) {
            memory.push_back(map->begin);
        }
    }
    for (const uint64_t address : memory) {
        release(address);
    }
    context->bindings.clear();
    // Its default streams point back at it.
    context->null_stream.reset();
    context->per_thread.clear();
    context->streams.clear();
    context->ended.clear();
    contexts.erase(context->handle);
    objects.erase(context->handle);
    context->device->used -= std::exchange(context->memory, 0);
}

Device* Client::ended_primary(uint64_t handle) const {
    for (const auto& [index, primary] : primaries) {
        if (handle != 0 && primary.handle == handle && primary.context == 0) {
            return machine->device(index);
        }
    }
    return nullptr;
}

void Client::unload(const std::shared_ptr<Module>& module) {
    for (const auto& [name, function] : module->functions) {
        objects.erase(function);
    }
    const auto library = find<Library>(module->library);
    for (size_t i = 0; i < module->variables.size(); ++i) {
        if (library == nullptr || library->managed.count(i) == 0) {
            release(module->variables[i]);
        }
    }
    module->context.reset();
    objects.erase(module->handle);
}

Device* Client::device(int ordinal) const {
    return ordinal >= 0 && static_cast<size_t>(ordinal) < visible.size()
               ? machine->device(visible[static_cast<size_t>(ordinal)])
               : nullptr;
}

int Client::ordinal(const Device& device) const {
    const auto found = std::find(visible.begin(), visible.end(), device.index);
    return found == visible.end() ? CU_DEVICE_INVALID : static_cast<int>(found - visible.begin());
}

int32_t Client::allocate(const Context& context, MapKind kind, uint64_t size, uint64_t* address,
                         uint64_t* need) {
    constexpr uint64_t kLargest = uint64_t{1} << 46;
    if (size > kLargest) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    Mapping mapping;
    mapping.kind = kind;
    mapping.context = context.handle;
    mapping.id = ++next_id;
    mapping.readers = 1u << context.device->index;
    for (const auto& [handle, other] : contexts) {
        if (other->peers.count(context.handle) != 0) {
            mapping.readers |= 1u << other->device->index;
        }
    }
    mapping.writers = mapping.readers;
    if (size <= kGranularity / 2) {
        return allocate_small(context, mapping, size, address, need);
    }
    const uint64_t whole = (size + kGranularity - 1) / kGranularity * kGranularity;
    const uint64_t begin = space.take_internal(whole);
    if (begin == 0) {
        *need = whole;
        return context.device->total < whole ? int32_t{CUDA_ERROR_OUT_OF_MEMORY} : kNeedAddresses;
    }
    mapping.phys = machine->create(context.device, whole, owner);
    if (mapping.phys == nullptr) {
        space.give_internal(begin, whole);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    mapping.begin = begin;
    mapping.end = begin + size;
    space.map(std::move(mapping));
    *address = begin;
    return CUDA_SUCCESS;
}

int32_t Client::allocate_small(const Context& context, Mapping mapping, uint64_t size,
                               uint64_t* address, uint64_t* need) {
    const uint64_t whole = (size + kSmallAlignment - 1) / kSmallAlignment * kSmallAlignment;
    for (auto& [base, chunk] : chunks) {
        if (chunk.context != context.handle) {
            continue;
        }
        uint64_t at = 0;
        for (const auto& [offset, end] : chunk.used) {
            if (offset - at >= whole) {
                break;
            }
            at = end;
        }
        if (kGranularity - at < whole) {
            continue;
        }
        chunk.used[at] = at + whole;
        mapping.phys = chunk.phys;
        mapping.offset = at;
        mapping.begin = base + at;
        mapping.end = base + at + size;
        *address = mapping.begin;
        space.map(std::move(mapping));
        return CUDA_SUCCESS;
    }
    const uint64_t begin = space.take_internal(kGranularity);
    if (begin == 0) {
        *need = kGranularity;
        return kNeedAddresses;
    }
    Chunk chunk;
    chunk.phys = machine->create(context.device, kGranularity, owner);
    if (chunk.phys == nullptr) {
        space.give_internal(begin, kGranularity);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    chunk.context = context.handle;
    chunks[begin] = std::move(chunk);
    return allocate_small(context, std::move(mapping), size, address, need);
}

void Client::release(uint64_t address) {
    const Mapping* map = space.at(address);
    if (map == nullptr || map->begin != address) {
        return;
    }
    if (map->kind == MapKind::kManaged) {
        release_managed(address);
        return;
    }
    const uint64_t whole = map->size();
    space.unmap(address);
    const uint64_t base = address / kGranularity * kGranularity;
    const auto chunk = chunks.find(base);
    if (chunk == chunks.end()) {
        space.give_internal(address, (whole + kGranularity - 1) / kGranularity * kGranularity);
        return;
    }
    chunk->second.used.erase(address - base);
    if (chunk->second.used.empty()) {
        chunks.erase(chunk);
        space.give_internal(base, kGranularity);
    }
}

void Client::destroy() {
    {
        std::lock_guard<std::mutex> guard(mutex);
        if (gone) {
            return;
        }
        gone = true;
        for (const auto& context : every<Context>()) {
            context->cancel = true;
        }
        if (callback_socket >= 0) {
            ::shutdown(callback_socket, SHUT_RDWR);
        }
        callbacks_end.notify_all();
    }
    // Tasks hold what they use; they end soon, now that their contexts are cancelled.
    std::vector<TicketRef> running;
    {
        std::lock_guard<std::mutex> guard(mutex);
        for (const auto& context : every<Context>()) {
            for (const auto& stream : streams_of(*context)) {
                if (stream->last != nullptr) {
                    running.push_back(stream->last);
                }
            }
        }
    }
    for (const TicketRef& ticket : running) {
        ticket->wait();
    }
    std::lock_guard<std::mutex> guard(mutex);
    for (const auto& context : every<Context>()) {
        destroy_context(context);
    }
    objects.clear();
    forget_managed_pages(0, UINT64_MAX);
    space.maps.clear();
    space.changed();
    space.view();
    chunks.clear();
    managed_pieces.clear();
    snapshot.clear();
}

long Client::left_behind() const {
    // A stream's thread drops the last task only after it has said that the task is done.
    for (int i = 0; i < 1000 && owner.use_count() > 1; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return owner.use_count() - 1;
}

std::shared_ptr<Context> Session::context_by(uint64_t handle, CUresult* error) {
    const uint64_t wanted = handle == 0 ? header.context : handle;
    auto found = client.find<Context>(wanted);
    if (found == nullptr) {
        *error = client.made(wanted) ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
    }
    return found;
}

bool Session::current_has_ended() {
    CUresult error = CUDA_SUCCESS;
    context_by(0, &error);
    return error == CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

std::shared_ptr<Context> Session::context(CUresult* error, uint64_t handle) {
    auto found = context_by(handle, error);
    if (found != nullptr && found->sticky != CUDA_SUCCESS) {
        *error = static_cast<CUresult>(found->sticky.load());
        return nullptr;
    }
    return found;
}

std::shared_ptr<Stream> Session::stream(uint64_t handle, CUresult* error) {
    constexpr uint64_t kLegacy = 1;
    constexpr uint64_t kPerThread = 2;
    if (handle == 0) {
        handle = (header.flags & kFlagPerThreadStream) != 0 ? kPerThread : kLegacy;
    }
    if (handle == kLegacy || handle == kPerThread) {
        auto owner = context(error);
        if (owner == nullptr) {
            return nullptr;
        }
        if (handle == kLegacy) {
            return owner->null_stream;
        }
        auto& mine = owner->per_thread[header.thread];
        if (mine == nullptr) {
            mine = client.make_own<Stream>(kPerThread);
            mine->context = owner;
            mine->id = ++client.next_id;
        }
        return mine;
    }
    auto found = client.find<Stream>(handle);
    if (found == nullptr) {
        *error = CUDA_ERROR_INVALID_HANDLE;
    } else if (found->context->sticky != CUDA_SUCCESS) {
        *error = static_cast<CUresult>(found->context->sticky.load());
        return nullptr;
    }
    return found;
}

void Session::wait(const TicketRef& ticket) {
    if (ticket != nullptr) {
        lock.unlock();
        ticket->wait();
        lock.lock();
    }
}

CUresult Session::wait_idle(const Context& context) {
    std::vector<TicketRef> pending;
    for (const auto& stream : client.streams_of(context)) {
        if (!stream->idle()) {
            pending.push_back(stream->last);
        }
    }
    for (const TicketRef& ticket : pending) {
        wait(ticket);
    }
    return static_cast<CUresult>(context.sticky.load());
}

namespace {

// The legacy default stream comes after and before every blocking stream of its context.
std::vector<TicketRef> predecessors(Client& client, const Stream& stream) {
    std::vector<TicketRef> after;
    auto add = [&](const Stream& other) {
        if (!other.idle()) {
            after.push_back(other.last);
        }
    };
    add(stream);
    const Context& context = *stream.context;
    if (&stream == context.null_stream.get()) {
        for (const auto& other : client.streams_of(context)) {
            if ((other->flags & CU_STREAM_NON_BLOCKING) == 0 && other.get() != &stream) {
                add(*other);
            }
        }
    } else if ((stream.flags & CU_STREAM_NON_BLOCKING) == 0) {
        add(*context.null_stream);
    }
    return after;
}

// A context that has failed, or whose client is gone, carries out nothing more.
std::function<void()> guarded(std::shared_ptr<Context> context, std::function<void()> run) {
    return [context = std::move(context), run = std::move(run)] {
        if (!context->cancel && context->sticky == CUDA_SUCCESS) {
            run();
        }
    };
}

} // namespace

TicketRef submit_to(Worker& worker, std::shared_ptr<Context> context, std::function<void()> run,
                    std::vector<TicketRef> after) {
    auto ticket = std::make_shared<Ticket>();
    worker.submit({std::move(after), guarded(std::move(context), std::move(run)), ticket});
    return ticket;
}

TicketRef submit(Client& client, const std::shared_ptr<Stream>& stream, std::function<void()> run,
                 std::vector<TicketRef> after) {
    for (TicketRef& ticket : predecessors(client, *stream)) {
        after.push_back(std::move(ticket));
    }
    stream->last = submit_to(*stream->worker, stream->context, std::move(run), std::move(after));
    return stream->last;
}

void run_and_wait(Session& session, const std::shared_ptr<Stream>& stream,
                  std::function<void()> run) {
    if (!predecessors(session.client, *stream).empty()) {
        session.wait(submit(session.client, stream, std::move(run)));
        return;
    }
    auto ticket = std::make_shared<Ticket>();
    stream->last = ticket;
    session.lock.unlock();
    guarded(stream->context, std::move(run))();
    ticket->finish();
    session.lock.lock();
}

} // namespace flowgpu::emu
