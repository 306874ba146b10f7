// Values as JSON, for people: what `flowgpu inspect --record` lists.
#ifndef FLOWGPU_INTERCEPT_REPLAY_TOLD_H
#define FLOWGPU_INTERCEPT_REPLAY_TOLD_H

#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "handles.h"

namespace flowgpu::replay {

// Writes JSON to a socket, by a buffer of its own, as the registry is locked meanwhile. Only the
// service thread has one.
class Told {
  public:
    explicit Told(int socket) : socket_(socket) {}
    Told(const Told&) = delete;
    Told& operator=(const Told&) = delete;

    void put(char one) {
        if (length_ == sizeof buffer_)
            send_all();
        buffer_[length_++] = one;
    }
    void put(const char* text) {
        for (; *text; text++)
            put(*text);
    }
    void number(uint64_t value, unsigned base = 10);
    void quoted(const char* text);
    void address(uint64_t value); // in quotes, as no reader of JSON keeps 64 bits of a number
    void bytes(const void* value, size_t count); // without the zeros at the end

    // Rows are objects of named fields.
    void begin_row();
    void field(const char* name);
    void end_row();
    // Elements of a list.
    void begin_list() {
        put('[');
        first_ = true;
    }
    void next() {
        if (!first_)
            put(',');
        first_ = false;
    }
    void end_list() {
        put(']');
        first_ = false;
    }
    // False: the other end is gone.
    bool finish() {
        send_all();
        return socket_ >= 0;
    }

  private:
    void send_all();

    int socket_; // -1: nobody reads any more
    size_t length_ = 0;
    bool first_ = true; // the next is the first of its row or list
    char buffer_[1 << 14];
};

// A value of 64 bits to which the driver is given the address.
struct Word64 {
    uint64_t value;
};

template <class... V> void tell_list(Told& told, const V&... values);

inline void tell(Told& told, const std::string& text) {
    told.quoted(text.c_str());
}
inline void tell(Told& told, const Word64& word) {
    told.number(word.value);
}
inline void tell(Told& told, const CUDA_ARRAY_DESCRIPTOR& about) {
    tell_list(told, about.Width, about.Height, about.Format, about.NumChannels);
}
inline void tell(Told& told, const CUDA_ARRAY3D_DESCRIPTOR& about) {
    tell_list(told, about.Width, about.Height, about.Depth, about.Format, about.NumChannels,
              about.Flags);
}
inline void tell(Told& told, const CUmemLocation& where) {
    tell_list(told, where.type, where.id);
}
inline void tell(Told& told, const CUmemPoolProps& props) {
    tell_list(told, props.allocType, props.handleTypes, props.location, props.maxSize);
}
inline void tell(Told& told, const CUmemAccessDesc& access) {
    tell_list(told, access.location, access.flags);
}

template <class V> void tell(Told& told, const V& value) {
    if constexpr (std::is_pointer_v<V>) {
        told.address(reinterpret_cast<uintptr_t>(value));
    } else if constexpr (std::is_enum_v<V> || std::is_integral_v<V>) {
        const auto number = static_cast<int64_t>(value);
        if (std::is_signed_v<V> && number < 0)
            told.put('-');
        told.number(std::is_signed_v<V> && number < 0 ? -static_cast<uint64_t>(number)
                                                      : static_cast<uint64_t>(number));
    } else {
        static_assert(std::is_trivially_copyable_v<V>, "a value has no form in JSON");
        told.bytes(&value, sizeof value);
    }
}

template <class V> void tell(Told& told, const std::vector<V>& values) {
    told.begin_list();
    for (const V& value : values) {
        told.next();
        tell(told, value);
    }
    told.end_list();
}

template <class... V> void tell_list(Told& told, const V&... values) {
    told.begin_list();
    ((told.next(), tell(told, values)), ...);
    told.end_list();
}

} // namespace flowgpu::replay

#endif
