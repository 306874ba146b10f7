#include "modimage.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "fatbin.h"
#include "forms.h"

namespace flowgpu {

namespace {

// No image is as long; a limit lets the sums in the readers do without overflow checks.
constexpr size_t kMostBytes = size_t{1} << 40;
constexpr uint32_t kElfMagic = 0x464c457f;

// Byte by byte, since a text may be shorter than the number.
bool begins_with(std::string_view bytes, uint32_t magic) {
    char wanted[sizeof magic];
    std::memcpy(wanted, &magic, sizeof magic);
    for (size_t i = 0; i < sizeof magic; ++i) {
        if (i >= bytes.size() || bytes[i] != wanted[i]) {
            return false;
        }
    }
    return true;
}

template <class T> std::vector<T> sorted(std::vector<T> all) {
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    return all;
}

class Reader {
  public:
    ModuleImage result;

    void read(const void* image, size_t limit) {
        const std::string_view all(static_cast<const char*>(image), limit);
        if (!begins_with(all, fatbin::kWrapperMagic)) {
            read_form(all);
        } else if (limit < sizeof(fatbin::Wrapper)) {
            fail("a fat binary's wrapper that is cut short");
        } else {
            read_wrapper(fatbin::value_at<fatbin::Wrapper>(all, 0));
        }
        result.variables = sorted(std::move(found_.names));
        result.constants = sorted(std::move(found_.constants));
        result.addresses = sorted(std::move(found_.addresses));
        result.known = result.why.empty();
        result.by_address_alone = result.known && found_.by_address_alone;
        result.heap = found_.heap;
        result.managed = found_.managed;
    }

  private:
    // The first reason stays.
    void fail(const std::string& why) {
        if (result.why.empty()) {
            result.why = why;
        }
    }

    void read_wrapper(const fatbin::Wrapper& wrapper) {
        if ((wrapper.version != 1 && wrapper.version != 2) || wrapper.container == nullptr) {
            return fail("a fat binary's wrapper of version " + std::to_string(wrapper.version));
        }
        result.bytes = read_container(wrapper.container);
        if (wrapper.version == 1 || wrapper.extra == nullptr) {
            return;
        }
        for (auto* next = static_cast<const void* const*>(wrapper.extra); *next != nullptr;
             ++next) {
            result.linked_from.push_back(read_container(*next));
        }
    }

    std::string_view read_container(const void* container) {
        fatbin::Header header;
        std::memcpy(&header, container, sizeof header);
        if (header.magic != fatbin::kMagic) {
            fail("a wrapper of something that is no fat binary");
            return {};
        }
        const std::string_view bytes(static_cast<const char*>(container), kMostBytes);
        return read_entries(bytes);
    }

    void read_form(std::string_view all) {
        std::string why;
        if (begins_with(all, fatbin::kMagic)) {
            result.bytes = read_entries(all);
        } else if (begins_with(all, kElfMagic)) {
            size_t size = 0;
            if (!cubin_variables(all, &size, &found_, &why)) {
                fail(why);
            }
            result.bytes = all.substr(0, size);
        } else {
            const size_t length = ::strnlen(all.data(), all.size());
            if (!ptx_variables(all.substr(0, length), &found_, &why)) {
                fail(why);
            } else if (length == all.size()) {
                fail("PTX text: no NUL at its end");
            }
            result.bytes = all.substr(0, length + 1);
        }
    }

    // A container that begins `all`; its bytes.
    std::string_view read_entries(std::string_view all) {
        const auto header = fatbin::value_at<fatbin::Header>(all, 0);
        if (header.header_bytes < sizeof header || header.body_bytes > all.size() ||
            header.header_bytes > all.size() - header.body_bytes) {
            fail("a fat binary that is cut short");
            return {};
        }
        const std::string_view bytes = all.substr(0, header.header_bytes + header.body_bytes);
        fatbin::Entries entries(bytes);
        for (fatbin::Entry entry; entries.next(&entry);) {
            read_entry(entry);
        }
        if (entries.left() != 0) {
            fail("a fat binary with a damaged entry");
        }
        return bytes;
    }

    void read_entry(const fatbin::Entry& entry) {
        std::string buffer, why;
        std::string_view code;
        size_t size;
        if (entry.kind != fatbin::kPtx && entry.kind != fatbin::kCubin) {
            return fail("an entry of kind " + std::to_string(entry.kind) + " in the fat binary");
        }
        bool ok = fatbin::unpack(entry, &buffer, &code, &why);
        if (ok && entry.kind == fatbin::kPtx) {
            ok = ptx_variables(code.substr(0, code.find('\0')), &found_, &why);
        } else if (ok) {
            ok = cubin_variables(code, &size, &found_, &why);
        }
        if (!ok) {
            fail(why);
        }
    }

    Variables found_;
};

} // namespace

ModuleImage read_module_image(const void* image, size_t limit) {
    ModuleImage out;
    try {
        Reader reader;
        reader.read(image, std::min(limit, kMostBytes));
        out = std::move(reader.result);
    } catch (const std::bad_alloc&) {
        out.why = "no memory to read the module's image";
    }
    return out;
}

ModuleImage read_module_image(const void* image) {
    return read_module_image(image, kMostBytes);
}

ModuleImageCopy::ModuleImageCopy(const ModuleImage& image) {
    parts_.reserve(1 + image.linked_from.size()); // pointers to the parts stay good
    parts_.emplace_back(image.bytes);
    image_ = parts_[0].data();
    if (image.linked_from.empty()) {
        return;
    }
    for (const std::string_view part : image.linked_from) {
        linked_from_.push_back(parts_.emplace_back(part).data());
    }
    linked_from_.push_back(nullptr);
    wrapper_ = {fatbin::kWrapperMagic, 2, image_, linked_from_.data()};
    image_ = &wrapper_;
}

} // namespace flowgpu
