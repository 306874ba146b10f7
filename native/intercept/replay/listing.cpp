#include "listing.h"

#include <cerrno>
#include <memory>
#include <mutex>
#include <vector>

#include <sys/socket.h>

#include "code.h"
#include "graphs.h"
#include "registry.h"
#include "task.h"
#include "told.h"
#include "user_objects.h"

namespace flowgpu::replay {

void Told::send_all() {
    for (size_t sent = 0; socket_ >= 0 && sent < length_;) {
        const ssize_t some = send(socket_, buffer_ + sent, length_ - sent, MSG_NOSIGNAL);
        if (some > 0)
            sent += static_cast<size_t>(some);
        else if (errno != EINTR)
            socket_ = -1;
    }
    length_ = 0;
}

void Told::number(uint64_t value, unsigned base) {
    char digits[20];
    size_t count = 0;
    do
        digits[count++] = "0123456789abcdef"[value % base];
    while (value /= base);
    while (count)
        put(digits[--count]);
}

void Told::address(uint64_t value) {
    put("\"0x");
    number(value, 16);
    put('"');
}

// Names need not be text: a byte that is not ASCII becomes the letter with its number.
void Told::quoted(const char* text) {
    put('"');
    for (; *text; text++) {
        const auto one = static_cast<unsigned char>(*text);
        if (one >= ' ' && one < 0x7f && one != '"' && one != '\\') {
            put(*text);
            continue;
        }
        put("\\u00");
        put("0123456789abcdef"[one >> 4]);
        put("0123456789abcdef"[one & 15]);
    }
    put('"');
}

void Told::bytes(const void* value, size_t count) {
    const auto* all = static_cast<const unsigned char*>(value);
    while (count && !all[count - 1])
        count--;
    put('"');
    for (size_t i = 0; i < count; i++) {
        put("0123456789abcdef"[all[i] >> 4]);
        put("0123456789abcdef"[all[i] & 15]);
    }
    put('"');
}

void Told::begin_row() {
    put('{');
    first_ = true;
}

void Told::field(const char* name) {
    next();
    quoted(name);
    put(':');
}

void Told::end_row() {
    put("}\n");
    first_ = true;
}

namespace {

void tell_kind(Told& told, const char* kind) {
    told.begin_row();
    told.field("kind");
    told.quoted(kind);
}

void tell_handle(Told& told, const char* name, const void* handle) {
    told.field(name);
    tell(told, handle);
}

void tell_name(Told& told, const char* name, unsigned symbol) {
    told.field(name);
    told.quoted(symbol_names[symbol]);
}

template <class... V> void tell_call(Told& told, unsigned symbol, const V&... values) {
    tell_name(told, "call", symbol);
    told.field("values");
    tell_list(told, values...);
}

template <class Signature> void tell_recipe(Told& told, const Recipe<Signature>& recipe) {
    tell_name(told, "call", recipe.symbol());
    told.field("values");
    recipe.tell_values(told);
}

const char* name_of(CUgraphNodeType type) {
    switch (type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return "kernel";
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return "memcpy";
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return "memset";
    case CU_GRAPH_NODE_TYPE_HOST:
        return "host";
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return "graph";
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return "empty";
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return "wait event";
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return "event record";
    default:
        return "other";
    }
}

void tell_nodes(Told& told, const GraphPlan& plan) {
    told.field("nodes");
    told.begin_list();
    for (const NodePlan& node : plan.nodes) {
        told.next();
        told.quoted(name_of(node.type));
    }
    told.end_list();
}

void tell_code(Told& told, const Object& object) {
    const Image& image = object.code->image;
    told.field("code");
    told.quoted(image.copy      ? "a copy"
                : image.library ? "in a library's file"
                                : "in the program's file");
    told.field("bytes");
    told.number(image.bytes);
    told.field("variables");
    told.number(object.variables.size());
}

void tell_object(Told& told, const Object& object) {
    tell_kind(told, kind_names[static_cast<size_t>(object.kind)]);
    told.field("serial");
    told.number(object.serial);
    tell_handle(told, "handle", object.slot);
    if (object.context)
        tell_handle(told, "context", object.context->slot);
    if (object.parent)
        tell_handle(told, "parent", object.parent->slot);
    if (object.make)
        tell_recipe(told, object.make);
    if (object.primary >= 0) {
        told.field("retained");
        told.number(object.uses);
    }
    if (object.kind == Kind::context) {
        told.field("active");
        told.put(object.active ? "true" : "false");
    }
    if (object.kind == Kind::event) {
        told.field("recorded");
        told.put(object.marked.load() ? "true" : "false");
    }
    if (object.code)
        tell_code(told, object);
    if (object.graph && object.graph->plan)
        tell_nodes(told, *object.graph->plan);
    if (!object.state.empty()) {
        told.field("set");
        told.begin_list();
        for (const auto& [key, again] : object.state) {
            told.next();
            told.put("{\"call\":");
            told.quoted(symbol_names[again.symbol()]);
            told.put(",\"values\":");
            again.tell_values(told);
            told.put('}');
        }
        told.end_list();
    }
    told.end_row();
}

void tell_texture(Told& told, const Object* context, unsigned long long number,
                  const Texture& texture) {
    tell_kind(told, texture.surface ? "surface" : "texture");
    told.field("handle");
    told.address(number);
    if (context)
        tell_handle(told, "context", context->slot);
    // All resources begin with the array, the mipmapped array or the address.
    const void* of = texture.resource.res.array.hArray;
    if (texture.surface)
        tell_call(told, I_cuSurfObjectCreate, texture.resource.resType, of);
    else
        tell_call(told, I_cuTexObjectCreate, texture.resource.resType, of, texture.texture.flags);
    told.end_row();
}

void tell_host(Told& told, void* address, const HostMemory& place) {
    tell_kind(told, "host memory");
    tell_handle(told, "handle", address);
    if (place.context)
        tell_handle(told, "context", place.context->slot);
    if (place.ours)
        tell_call(told, I_cuMemHostAlloc, place.bytes, place.flags);
    else
        tell_call(told, I_cuMemHostRegister_v2, static_cast<const void*>(address), place.bytes,
                  place.flags);
    told.end_row();
}

} // namespace

bool list_record(int socket) {
    const auto told = std::make_unique<Told>(socket);
    const std::vector<Region> reserved = address_map().all(kReserved);
    Registry& r = registry();
    std::lock_guard<std::mutex> lock(r.mutex);
    for (const auto& [device, flags] : r.primary_flags) {
        tell_kind(*told, "primary context");
        tell_call(*told, I_cuDevicePrimaryCtxSetFlags_v2, device, flags);
        told->end_row();
    }
    for (const Region& region : reserved) {
        tell_kind(*told, "reservation");
        told->field("handle");
        told->address(region.address);
        tell_call(*told, I_cuMemAddressReserve, region.bytes);
        told->end_row();
    }
    for (const auto& [serial, object] : r.objects)
        if (!object->graph)
            tell_object(*told, *object);
    for (const auto& [key, texture] : r.textures)
        tell_texture(*told, key.first, key.second, texture);
    for (const auto& [address, place] : r.host)
        tell_host(*told, address, place);
    for (const auto& object : user_objects::living()) {
        tell_kind(*told, "user object");
        tell_handle(*told, "handle", object.get());
        tell_call(*told, I_cuUserObjectCreate, object->data,
                  reinterpret_cast<const void*>(object->destroy), object->own, object->flags);
        told->end_row();
    }
    for (const Kind kind : {Kind::graph, Kind::node, Kind::executable})
        for (const auto& [serial, object] : r.objects)
            if (object->graph && object->kind == kind)
                tell_object(*told, *object);
    return told->finish();
}

} // namespace flowgpu::replay
